"""Each function whose weight gradient waits gives, to the bit, what torch's own backward gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weight_grads_cases import ORDER, Apply, Deferring, assert_equal, draws, plain, split

from plait.forward.deferred_products import DeferredGrad, value

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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution(dims: int, dtype: torch.dtype, bias: bool) -> None:
    conv: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (1, {"stride": 2, "padding": 1}),
        (2, {"groups": 2, "dilation": (2,) * dims}),
        (6, {"groups": 6, "padding": [1] * dims}),
        (1, {"padding": "same"}),
        (1, {"padding": "valid", "stride": (2,)}),
    ]
    for seed, (groups, options) in enumerate(cases):
        weight = draws(torch.empty(6, 6 // groups, *[3] * dims, dtype=dtype), seed)
        more = [draws(torch.empty(6, dtype=dtype), seed + 1)] if bias else []
        for batch in ([], [3]):
            x = draws(torch.empty(*batch, 6, *(7, 6, 5)[:dims], dtype=dtype), seed + 2)
            model = Apply(lambda x, w, b=None, o=options: conv(x, bias=b, weight=w, **o), weight, *more)
            for wants in (True, False):
                assert_equal(split(model, [x], "F0 I0 W0", wants), plain(model, [x], "W0", wants))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_embedding(dtype: torch.dtype, padding_idx: int | None) -> None:
    for shape in [(), (4,), (3, 7), (0, 2)]:
        tokens = torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(1))
        model = Apply(lambda t, w: F.embedding(t, w, padding_idx), draws(torch.empty(6, 5, dtype=dtype), 0))
        assert_equal(split(model, [tokens], "F0 I0 W0"), plain(model, [tokens], "W0"))


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}, {"sparse": True}])
def test_embeddings_of_other_kinds(option: dict[str, Any]) -> None:
    tokens = torch.tensor([1, 2, 1, 1, 0])
    found = []
    for way in (split, plain):
        model = nn.Embedding(6, 5, **option)
        model.weight.data.copy_(draws(model.weight, 3))
        way(model, [tokens], "F0 I0 W0")
        assert model.weight.grad is not None and model.weight.grad.is_sparse == bool(option.get("sparse"))
        found.append([model.weight.grad.to_dense(), model.weight.detach()])
    assert_equal(*found)


def test_each_product_is_made_once_and_in_the_weight_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    compute = DeferredGrad.compute

    def watched(self: DeferredGrad) -> Tensor:
        if not isinstance(self.operands[0], DeferredGrad):
            made.append(tuple(self.shape))
        return compute(self)

    monkeypatch.setattr(DeferredGrad, "compute", watched)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3), nn.Conv1d(7, 2, 1))
    tokens = torch.randint(0, 6, (2, 7))
    split(model, [tokens], "F0 I0 W0", between=lambda: made and pytest.fail(f"{made} made in I"))
    assert sorted(made) == sorted(tuple(p.shape) for p in model.parameters())


# ---- several uses ---------------------------------------------------------------------------------------------------


def three_uses(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(F.linear(x, w).tanh(), w).tanh(), w)


def mixed_uses(x: Tensor, w: Tensor) -> Tensor:
    """In backward: deferred, autograd's, deferred, autograd's."""
    return F.linear(F.linear(x @ w.t(), w).tanh() @ w, w)


def siblings(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) * F.linear(x.tanh(), w) + F.linear(x.sin(), w) * (x @ w.t()).cos()


@pytest.mark.parametrize("function", [three_uses, mixed_uses, siblings])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uses_add_up_in_the_order_of_autograd(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    w = draws(torch.empty(9, 9, dtype=dtype), 1) / 3
    xs = [draws(torch.empty(17, 9, dtype=dtype), m) for m in range(4)]
    model = Apply(function, w)
    assert_equal(split(model, xs, ORDER), plain(model, xs, ORDER))


def test_another_order_of_adding_is_seen() -> None:
    """The comparison can tell the order of three products: added from the other end they differ."""
    w = nn.Parameter(draws(torch.empty(9, 9), 1) / 3)
    deferred = Deferring([w])
    deferred.begin(0)
    with deferred:
        y = three_uses(draws(torch.empty(17, 9), 0), w)
    y.backward(draws(y, 0))
    total = deferred.stand_in(w).grad
    while isinstance(total, DeferredGrad) and len(total.operands) == 1:
        (total,) = total.operands
    assert isinstance(total, DeferredGrad)
    first, third = total.operands
    a, b = (value(p) for p in first.operands)
    c = value(third)
    deferred.weigh(0)
    assert torch.equal(w.grad, (a + b) + c)
    assert not torch.equal(w.grad, a + (b + c))


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
