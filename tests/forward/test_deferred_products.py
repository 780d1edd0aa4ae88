"""``F.linear`` whose weight gradient waits gives, to the bit, what torch's own backward gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weight_grads_cases import ORDER, Apply, Deferring, assert_equal, draws, plain, split

from plait.forward import products

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "by columns": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "rows swapped": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 1 else x,
}
SHAPES = [(5,), (1, 5), (7, 5), (0, 5), (33, 1), (3, 7, 5), (2, 0, 5), (1, 1, 17), (2, 3, 5, 9)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype, layout: str, bias: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        for out in (1, 6, 31):
            x = draws(torch.empty(shape, dtype=dtype), seed)
            weight = draws(torch.empty(out, shape[-1], dtype=dtype), seed + 1)
            for w in (weight, weight.t().contiguous().t()):
                more = [draws(torch.empty(out, dtype=dtype), seed + 2)] if bias else []
                model = Apply(lambda x, *p: F.linear(LAYOUTS[layout](x), *p), w, *more)
                assert_equal(split(model, [x], "F0 I0 W0"), plain(model, [x], "W0"))
                assert_equal(split(model, [x], "F0 I0 W0", wants=False), plain(model, [x], "W0", wants=False))


@pytest.mark.parametrize("shape", [(5,), (7, 5), (3, 7, 5)])
def test_linear_by_keywords_and_worked_on_in_place(shape: tuple[int, ...]) -> None:
    w, b, x = draws(torch.empty(6, 5), 0), draws(torch.empty(6), 1), draws(torch.empty(shape), 2)
    for model in (
        Apply(lambda x, w, b: F.linear(bias=b, weight=w, input=x).relu_(), w, b),
        Apply(lambda x, w: F.linear(x, weight=w).mul_(2).tanh_(), w),
    ):
        assert_equal(split(model, [x], "F0 I0 W0"), plain(model, [x], "W0"))


def test_each_product_is_made_once_and_in_the_weight_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    original = products._weight_gradient

    def watched(*given: Any) -> Tensor:
        made.append(tuple((gradient := original(*given)).shape))
        return gradient

    monkeypatch.setattr(products, "_weight_gradient", watched)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    split(model, [torch.ones(5, 4)], "F0 I0 W0", between=lambda: made and pytest.fail(f"{made} made in I"))
    assert sorted(made) == [(2, 3), (3, 4)]


def three_uses(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(F.linear(x, w).tanh(), w).tanh(), w)


def siblings(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) * F.linear(x.tanh(), w) + F.linear(x.sin(), w)


def tied(x: Tensor, w: Tensor) -> Tensor:
    """In backward: twice deferred, then autograd's."""
    return F.linear(F.linear(w[:5].tanh(), w).tanh(), w)


@pytest.mark.parametrize("function", [three_uses, siblings, tied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uses_add_up_in_the_order_of_autograd(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    w = draws(torch.empty(9, 9, dtype=dtype), 1) / 3
    xs = [draws(torch.empty(17, 9, dtype=dtype), m) for m in range(4)]
    model = Apply(function, w)
    assert_equal(split(model, xs, ORDER), plain(model, xs, ORDER))


def test_an_input_part_in_two_calls() -> None:
    """Two outputs, backward one after the other: the second call's gradients are added to the first's."""
    w, x = nn.Parameter(draws(torch.empty(9, 9), 1)), draws(torch.empty(17, 9), 0)
    found = []
    for deferred in (Deferring([w]), None):
        w.grad = None
        if deferred:
            deferred.begin(0)
            with deferred:
                outputs = [F.linear(x, w).tanh(), F.linear(x.sin(), w), x @ w]
        else:
            outputs = [F.linear(x, w).tanh(), F.linear(x.sin(), w), x @ w]
        for i, y in enumerate(outputs):
            y.backward(draws(y, i))
        if deferred:
            assert w.grad is None
            deferred.weigh(0)
        found.append([w.grad])
    assert_equal(*found)


def test_a_pending_gradient_may_be_written_to() -> None:
    """The bias is computed, so its gradient goes on through the user's graph, and a hook there scales it in place."""

    def tripled(g: Tensor) -> None:
        g.mul_(3)

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        bias = b.exp()
        bias.register_hook(tripled)
        return F.linear(x, w, bias)

    model = Apply(function, draws(torch.empty(6, 5), 0), draws(torch.empty(6), 1))
    x = draws(torch.empty(7, 5), 2)
    assert_equal(split(model, [x], "F0 I0 W0"), plain(model, [x], "W0"))


def test_a_bias_that_is_broadcast() -> None:
    model = Apply(F.linear, draws(torch.empty(6, 5), 0), draws(torch.empty(1), 1))
    x = draws(torch.empty(7, 5), 2)
    assert_equal(split(model, [x], "F0 I0 W0"), plain(model, [x], "W0"))
