"""Optimizers of 2026 against one process: those that are element-wise under any row, the others on whole tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from engine_cases import agree, batches, net, plain, train
from optimizer_cases import AdEMAMix, Lion, Orthogonal, Shampoo

import plait

CELLS = [("shard=3", "zero1"), ("shard=2", "zero2"), ("shard=3", "zero3")]


def outside(package: str, name: str, **options: Any) -> Any:
    """A class of another package, in its training mode where it has modes."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = getattr(pytest.importorskip(package), name)(parameters, lr=0.01, **options)
        if callable(mode := getattr(made, "train", None)):
            mode()
        return made

    return make


ELEMENTWISE: dict[str, Any] = {
    "lion": Lion,
    "ademamix": AdEMAMix,
    "pytorch_optimizer Lion": outside("pytorch_optimizer", "Lion"),
    "pytorch_optimizer AdEMAMix": outside("pytorch_optimizer", "AdEMAMix"),
    "schedulefree": outside("schedulefree", "AdamWScheduleFree"),
}
WHOLE: dict[str, Any] = {
    "orthogonal": Orthogonal,
    "shampoo": Shampoo,
    "pytorch_optimizer ScalableShampoo": outside(
        "pytorch_optimizer", "ScalableShampoo", start_preconditioning_step=1, skip_preconditioning_rank_lt=2
    ),
}


def declared(make: Any, parameters: Any) -> torch.optim.Optimizer:
    return plait.elementwise(make(parameters))


@pytest.mark.parametrize(("mesh", "row"), CELLS)
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_what_is_elementwise_is_declared_and_right_under_any_row(kind: str, mesh: str, row: str) -> None:
    make, data = ELEMENTWISE[kind], batches(3)
    truth = plain(net(), data, optimizer=make)
    with pytest.raises(
        ValueError, match=r'(?s)not one of torch.s .*cut="tensor".*ddp.*plait\.elementwise\(optimizer\)'
    ):
        train(net(), mesh, row, data, optimizer=make)
    if kind == "schedulefree" and row != "zero3":
        with pytest.raises(ValueError, match=r"changes parameters between steps.*use ddp or zero3"):
            train(net(), mesh, row, data, optimizer=partial(declared, make))
    else:
        agree(train(net(), mesh, row, data, optimizer=partial(declared, make)), truth, 1e-12)


@pytest.mark.parametrize(("mesh", "row"), CELLS)
@pytest.mark.parametrize("kind", WHOLE)
def test_what_looks_at_matrices_is_named_on_pieces_and_right_on_whole_tensors(kind: str, mesh: str, row: str) -> None:
    make, data = WHOLE[kind], batches(3)
    truth = plain(net(), data, optimizer=make)
    if mesh == "shard=3" and not kind.endswith("ScalableShampoo"):  # which a probe builds anew to begin in step 25
        with pytest.raises(ValueError, match="though it was declared element-wise: steps on a tensor of shape"):
            train(net(), mesh, row, data, optimizer=partial(declared, make))
    agree(train(net(), mesh, row, data, optimizer=make, cut="tensor"), truth, 1e-12)


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_soap_on_whole_tensors_has_the_bits_of_ddp(row: str) -> None:
    """Its bases are eigenvectors of sums that are singular at first: rounding turns them, so bits are compared."""
    make = outside("pytorch_optimizer", "SOAP", precondition_frequency=1)
    right, cut = (train(net(), "shard=3", name, batches(3), make, cut="tensor")[0] for name in ("ddp", row))
    assert all(torch.equal(cut.state[name], value) for name, value in right.state.items())
    with pytest.raises(ValueError, match="though it was declared element-wise"):
        train(net(), "shard=3", row, batches(3), optimizer=partial(declared, make))


def test_an_optimizer_that_keeps_gradients_is_named() -> None:
    """Its first momentum is the gradient itself, in whose memory the next step's sums are made."""
    with pytest.raises(ValueError, match=r"Shampoo keeps a gradient beyond its step \('momentum_buffer'\)"):
        train(net(), "shard=2", "zero1", batches(), outside("pytorch_optimizer", "Shampoo"), cut="tensor")
