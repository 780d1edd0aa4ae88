"""Products made in two parts give torch's bits; where they are not made, and the tensors that they keep."""

from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from engine_cases import WIDTH, batches
from pipeline_cases import chain, linear, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
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


def of_a_computed_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Its pending gradient goes on through the user's graph, and a hook there scales it in place."""

    def tripled(gradient: Tensor) -> None:
        gradient.mul_(3)

    bias = b.exp()
    bias.register_hook(tripled)
    return F.linear(x, w, bias)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "three uses": (three_uses, [(9, 9)]),
    "siblings": (siblings, [(9, 9)]),
    "tied": (tied, [(9, 9)]),
    "by keywords, worked on in place": (lambda x, w, b: F.linear(bias=b, weight=w, input=x).relu_(), [(6, 9), (6,)]),
    "one keyword, worked on in place": (lambda x, w: F.linear(x, weight=w).mul_(2).tanh_(), [(6, 9)]),
    "a computed bias": (of_a_computed_bias, [(6, 9), (6,)]),
    "a bias that is broadcast": (F.linear, [(6, 9), (1,)]),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uses_add_up_in_the_order_of_autograd(function: str, dtype: torch.dtype) -> None:
    call, shapes = FUNCTIONS[function]
    model = Apply(call, *(draws(torch.empty(shape, dtype=dtype), i + 1) / 3 for i, shape in enumerate(shapes)))
    for rows in ((), (17,), (3, 7)):
        xs = [draws(torch.empty(*rows, 9, dtype=dtype), m) for m in range(4)]
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


class Again(nn.Module):
    """A checkpoint around a function, not a module: nothing of plait is on in its recomputation.

    The weight is square, and torch keeps its transpose: who takes the one for the other gets a gradient of the right
    shape.

    Args:
        around: what the checkpoint is around: a function that calls ``F.linear``, one that calls the layer, the layer.
        dropout: drawn inside the function.
    """

    def __init__(self, around: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.own, self.around, self.dropout = linear(), around, dropout

    def inner(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.own.weight, self.own.bias) if self.around == "function" else self.own(x)
        return F.dropout(torch.tanh(y), self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        if self.around == "layer":
            return torch.tanh(checkpoint(self.own, x, use_reentrant=False))
        return checkpoint(self.inner, x, use_reentrant=False)


def again(around: str, dropout: float = 0.0) -> nn.Module:
    """With two of them, which ``recompute="full"`` runs a second time around their own checkpoints."""
    return chain(linear(), nn.Sequential(Again(around, dropout)), nn.Sequential(Again(around)), linear())


UNITS = ("l1.0", "l2.0")
AROUND = pytest.mark.parametrize("around", ["function", "call", "layer"])
RECOMPUTE = pytest.mark.parametrize("recompute", [None, "full"])


@AROUND
@RECOMPUTE
def test_a_checkpoint_around_a_function_in_a_backward_in_two_parts(recompute: str | None, around: str) -> None:
    same(again(around), schedule="zb_h1", recompute=recompute, units=UNITS)


@RECOMPUTE
def test_dropout_in_such_a_checkpoint_is_refused(recompute: str | None) -> None:
    """Which mask to draw again is not known, also where the engine runs the block around it a second time."""
    with pytest.raises(ValueError, match="in a checkpoint around a function that is no module's call"):
        cases.train(again("function", 0.3), "shard=2", "zero3", batches(1), recompute=recompute, units=UNITS)


def penalised(layer: Callable[[Tensor], Tensor]) -> None:
    """The gradient of a gradient, which starts from the constant of a sum."""
    x = torch.ones(3, WIDTH, requires_grad=True)
    torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_a_backward_in_two_parts_cannot_be_differentiated_again() -> None:
    penalised(layer := nn.Linear(WIDTH, 4))
    deferred = Deferring(layer.parameters())
    deferred.begin(0)
    with deferred, pytest.raises(ValueError, match=r"create_graph=True.*another order"):
        penalised(layer)


class Ours(Tensor):
    """A subclass without ``__torch_function__``."""


FOREIGN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "sparse": lambda layer, x: layer(x.to_sparse()),
    "nested": lambda layer, x: layer(torch.nested.nested_tensor([x[:1], x])).to_padded_tensor(0.0),
    "subclass": lambda layer, x: layer(x.as_subclass(Ours)),
    "autocast": lambda layer, x: torch.autocast("cpu", torch.bfloat16)(layer)(x),
    "vmap": lambda layer, x: torch.func.vmap(layer)(x),
    "grad": lambda layer, x: torch.func.grad(lambda z: layer(z).tanh().sum())(x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("call", FOREIGN)
def test_foreign_tensors_are_left_to_torch(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = cases.distinct(nn.Linear(WIDTH, 4)).float(), torch.randn(3, WIDTH)
    wanted = FOREIGN[call](layer, x)
    monkeypatch.setattr(products, "linear", lambda *args, **kwargs: pytest.fail("plait multiplied"))
    deferred = Deferring(layer.parameters())
    deferred.begin(0)
    with deferred:
        assert torch.equal(FOREIGN[call](layer, x), wanted)
