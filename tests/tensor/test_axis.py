"""The tensor axis seen from one rank: gathers and sums along a dim, uneven and empty parts, pieces of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from parallel_cases import is_close, lines, on_ranks, part_of, values
from torch import Tensor

from plait.anymodel.tensor.functions import Share, split, unsplit
from plait.table.collectives import Note
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor.axis import Divide, Gather, Leave, TensorAxis
from plait.tensor.pieces import assemble, piece_of

WAYS = [1, 2, 3, 4]
NOTE = Note(FORWARD, "here")


def test_a_sum_takes_a_tensor_that_is_not_contiguous() -> None:
    shares = [values(5, 2, seed=rank).t() for rank in range(3)]
    for ours in on_ranks(3, lambda axis: axis.start_sum(shares[axis.index], NOTE)()):
        is_close(ours, shares[0] + shares[1] + shares[2])


def test_unequal_parts_travel_padded_to_the_largest() -> None:
    """7 steps of time over 3 ranks are 3, 3, 1 and travel as 3, 3, 3: 2 x 9 x 5 elements of 8 bytes."""

    def body(axis: TensorAxis) -> list[int]:
        piece = axis.start_scatter(values(2, 7, 5), NOTE)()
        axis.start_gather(piece, 1, 7, NOTE)()
        return [entry.bytes for entry in axis.comm.ledger.entries]

    assert on_ranks(3, body, sequence=True, length=7) == [[720, 720]] * 3


class Travel(NamedTuple):
    """A way of an activation [2, time, 5]: how a rank has it before and after, and what is sent."""

    apply: Callable[[Tensor, TensorAxis], Tensor]
    before: int | str
    """The dim in which a rank has its part; ``"whole"``, or ``"share"`` of a sum."""
    after: int | str
    sent: list[tuple[str, str]]
    sequence: bool = False


TRAVELS = {
    "leave": Travel(lambda x, a: Leave.apply(x, a, "here", False), "share", "whole", [("all_reduce", FORWARD)]),
    "leave in time": Travel(
        lambda x, a: Leave.apply(x, a, "here", True),
        "share",
        1,
        [("reduce_scatter", FORWARD), ("all_gather", BACKWARD)],
        sequence=True,
    ),
    "gather": Travel(lambda x, a: Gather.apply(x, a, 2, 5, "here"), 2, "whole", [("all_gather", FORWARD)]),
    "divide": Travel(lambda x, a: Divide.apply(x, a, 2, "here"), "whole", 2, [("all_gather", BACKWARD)]),
    "split": Travel(lambda x, a: split(x, a, "here"), "whole", 1, [("all_gather", BACKWARD)], sequence=True),
    "unsplit": Travel(lambda x, a: unsplit(x, a, "here"), 1, "whole", [("all_gather", FORWARD)], sequence=True),
}


@pytest.mark.parametrize("time", [1, 7, 8])
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("name", TRAVELS)
def test_an_activation_and_its_gradient_travel(name: str, ways: int, time: int) -> None:
    """The gradient of a part is a part of the whole gradient, that of a share is the whole one."""
    apply, before, after, sent, sequence = TRAVELS[name]
    shares, probe = [values(2, time, 5, seed=rank) for rank in range(ways)], values(2, time, 5, seed=9)
    whole = sum(shares, torch.zeros(2, time, 5, dtype=torch.float64))

    def here(tensor: Tensor, how: int | str, axis: TensorAxis) -> Tensor:
        return part_of(tensor, how, axis) if isinstance(how, int) else tensor.clone()

    def body(axis: TensorAxis) -> tuple[Tensor, ...]:
        x = (shares[axis.index].clone() if before == "share" else here(whole, before, axis)).requires_grad_()
        y = apply(x * 1, axis)
        (y * here(probe, after, axis)).sum().backward()
        assert lines(axis) == ([] if ways == 1 else [(*message, "here") for message in sent])
        assert name != "split" or axis.length == time, "what follows knows how long the stream is"
        return y.detach(), here(whole, after, axis), x.grad, here(probe, before, axis)

    for y, wanted, gradient, due in on_ranks(ways, body, sequence=sequence, length=time):
        is_close(y, wanted)
        assert torch.equal(gradient, due)


@pytest.mark.parametrize("last", [None, 2, 5])
@pytest.mark.parametrize("ways", WAYS)
def test_what_cut_computation_reads_sums_its_gradient(ways: int, last: int | None) -> None:
    """Only that of the ``last`` features: the others' is whole on each rank.  Nothing is sent for what does not train,
    and a gradient that others hold too is left alone."""
    probes = [values(2, 3, 5, seed=rank) for rank in range(ways)]
    total = sum(probes, torch.zeros(2, 3, 5, dtype=torch.float64))

    def body(axis: TensorAxis) -> tuple[Tensor | None, ...]:
        x, fixed = values(2, 3, 5, seed=7).requires_grad_(), values(4)
        shared, other = Share.apply(axis, "experts", last, x * 1, fixed)
        given = probes[axis.index].clone()
        shared.backward(given)
        assert not other.requires_grad and torch.equal(shared, x)
        assert torch.equal(given, probes[axis.index])
        assert lines(axis) == ([] if ways == 1 else [("all_reduce", BACKWARD, "experts")])
        wanted = probes[axis.index].clone()
        wanted[..., -(last or 5) :] = total[..., -(last or 5) :]
        return x.grad, wanted

    for gradient, wanted in on_ranks(ways, body):
        is_close(gradient, wanted)


@pytest.mark.parametrize("given", [torch.arange(4), (torch.ones(2, 4, 3),)])
def test_only_a_stream_is_cut_in_time(given: object) -> None:
    """Position ids, say, that a module gets as its first argument."""
    with pytest.raises(ValueError, match=r"'pos', whose stream .* not \[batch, time, width\]: say 'split'"):
        on_ranks(2, lambda axis: split(given, axis, "pos"), sequence=True)


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "parts", "grain"),
    [
        ((5, 3), 0, (5,), 1),
        ((3, 7), 1, (7,), 1),
        ((11,), 0, (11,), 1),
        ((11,), 0, (4, 7), 1),
        ((9, 2), 0, (2, 3, 4), 1),
        ((96, 2), 0, (48, 24, 24), 2),
        ((2, 3, 5), 2, (5,), 1),
        ((3, 2), 0, (3,), 1),
    ],
)
def test_the_whole_comes_back_from_its_pieces(
    shape: tuple[int, ...], dim: int, parts: tuple[int, ...], grain: int, ways: int
) -> None:
    whole, cut = values(*shape), TensorCut(shape, dim, ways, parts, grain)
    pieces = [piece_of(whole, cut, index) for index in range(ways)]
    assert [tuple(piece.shape) for piece in pieces] == [cut.local_shape(index) for index in range(ways)]
    assert torch.equal(assemble(pieces, cut), whole)


def test_a_piece_of_a_fused_weight_has_its_rows_of_every_part() -> None:
    whole, cut = torch.arange(16)[:, None], TensorCut((16, 1), 0, 2, (8, 4, 4), 2)
    assert piece_of(whole, cut, 0).flatten().tolist() == [0, 1, 2, 3, 8, 9, 12, 13]
    assert piece_of(whole, cut, 1).flatten().tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_a_piece_of_one_part_shares_the_memory_of_the_whole() -> None:
    whole = values(5, 3)
    piece_of(whole, TensorCut((5, 3), 0, 2, (5,)), 1).zero_()
    assert whole[3:].count_nonzero() == 0 and whole[:3].count_nonzero() == 9
