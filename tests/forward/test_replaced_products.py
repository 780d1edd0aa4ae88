"""Products made in two parts instead of torch's: where they are not made, and the tensors that they keep."""

from __future__ import annotations

from collections.abc import Callable

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from engine_cases import WIDTH, batches
from pipeline_cases import chain, linear, same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weight_grads_cases import Deferring

from plait.forward import products


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
