"""Refusals and their messages: the operator, the layouts, the redistribution that makes it legal."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from tensor_cases import shard, values

from plait.comm import Comm
from plait.sharded import LayoutError, ShardedTensor, auto_redistribute

PENDING, ROWS, COLUMNS = ([((5, 6), layout)] for layout in ("a b, pending(tensor)", "a/tensor b", "a b/tensor"))

REFUSED: list[tuple[list[tuple[tuple[int, ...], str]], Callable[..., Any], str]] = [
    (
        PENDING,
        F.relu,
        r"relu of \[5, 6\] 'd0 d1, pending\(tensor\)': only a linear .* \.redistribute\('d0 d1'\) .*all_reduce",
    ),
    (PENDING, lambda x: x + 1, "a number added to a sum pending over tensor"),
    (
        [*PENDING, ((6,), "b")],
        lambda x, y: x + y,
        r"would be added once per rank\. Either call \.redistribute\('d0, pending\(tensor\)'\) on .*\(sends nothing",
    ),
    (PENDING, lambda x: x * x, "the product of two sums is not the sum of products"),
    (PENDING, lambda x: x.to(torch.int64), "rounding each share to torch.int64 is not rounding the sum"),
    ([*ROWS, *COLUMNS], torch.add, r"two dims are cut over tensor.*all_to_all"),
    ([*ROWS, *PENDING], torch.mul, "cut over tensor, another has a sum"),
    ([*ROWS, ((6, 4), "b c/tensor")], torch.matmul, "two dims are cut over tensor"),
    (
        [*COLUMNS, ((4, 6), "c b/tensor"), ((4,), "c")],
        F.linear,
        r"every rank would add the whole bias\. Add it after the sum.*as plait\.auto_redistribute\(\) does: call ",
    ),
    (COLUMNS, lambda x: x.softmax(-1), r"softmax needs the dims that it works along whole.*'d0 d1'.*all_gather"),
    (COLUMNS, lambda x: F.layer_norm(x, (6,)), "a norm needs the dims that it normalises"),
    (COLUMNS, lambda x: x.flatten(), "must be whole"),
    (ROWS, lambda x: x.flatten(), r"the pieces of dim 0 \(5 over tensor\) are no pieces of \[30\]"),
    (ROWS, lambda x: x[1:], "a part of a dim can be taken where it is whole"),
    (ROWS, lambda x: torch.cat([x, x]), "joined along a dim that is whole"),
    (
        COLUMNS,
        lambda x: F.cross_entropy(x, torch.zeros(5, dtype=torch.int64)),
        r"the classes are cut; plait\.cross_entropy_sum computes on cut classes",
    ),
    ([((2, 4, 5, 3), "b h t/tensor w")] * 3, F.scaled_dot_product_attention, "attention needs time and width whole"),
    (
        [((2, 6, 5, 2), "b h/tensor t w"), ((2, 3, 5, 2), "b h/tensor t w"), ((2, 3, 5, 2), "b h/tensor t w")],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "3 key heads on 2 ranks: each rank needs whole groups of 2 query heads",
    ),
    (ROWS, F.dropout, r"inside `with dropout_stream\(seed\):`"),
    (
        [((6, 6), "a/tensor b")],
        torch.linalg.inv,
        r"linalg_inv of .*needs the dims that it works along whole.*\('d0 d1'\)",
    ),
    (ROWS, lambda x: torch.sum(x, 0, out=torch.empty(6)), "result have different layouts"),
]


DUE: list[Callable[[Any], Any]] = [
    lambda p: p + np.float32(2),
    lambda p: p + np.float64(2),
    lambda p: p - np.int64(2),
    lambda p: p + torch.tensor(2.0),
    lambda p: p.add_(np.float32(2)),
    lambda p: torch.where(torch.ones(5, 5) > 0, p, np.float32(2)),
    lambda p: torch.where(torch.ones(5, 5) > 0, p, torch.tensor(2.0).double()),
    lambda p: p.cumsum(0, dtype=torch.int64),
    lambda p: p.sum(0, dtype=torch.int64),
    lambda p: p.to(torch.int32),
    lambda p: p.half(),
    lambda p: (p * 0).long().copy_(p),
    lambda p: p / torch.zeros(5, 5),
    lambda p: p.nansum(),
    lambda p: p.sinh(),
    lambda p: p[:, 0] > 0,
    lambda p: F.pad(p, (1, 1), value=1.0),
]
"""Not linear, or linear only in finite numbers of the same kind: the shares of a sum are summed first."""

SAID_OTHERWISE: list[tuple[str, Callable[[Any], Any]]] = [
    ("a b/tensor c", lambda x: x.unbind(dim=1)),
    ("a b/tensor c", lambda x: x.flip(0, 1)),
    ("a b/tensor c", lambda x: x.select(0, 0).fill_diagonal_(7.0)),
    ("a b c, pending(tensor)", lambda x: torch.add(x, other=1.0)),
    ("a b c, pending(tensor)", lambda x: x.sub(other=1.0)),
    ("a b c, pending(tensor)", lambda x: x + True),
]
REFUSED += [([((5, 5), "a b, pending(tensor)")], fn, ".") for fn in DUE]
REFUSED += [([((2, 4, 3), layout)], fn, ".") for layout, fn in SAID_OTHERWISE]


@pytest.mark.parametrize(("operands", "fn", "says"), REFUSED, ids=[r[2][:40] for r in REFUSED])
@each_rank("tensor=2")
def test_a_refusal_names_operator_layouts_and_the_way_out(
    comm: Comm, operands: list[tuple[tuple[int, ...], str]], fn: Callable[..., Any], says: str
) -> None:
    tensors = [shard(values(shape, k, False), text, comm) for k, (shape, text) in enumerate(operands)]
    for _ in range(2):  # a plan that was refused is not kept
        with pytest.raises(LayoutError, match=says) as caught:
            fn(*tensors)
        assert not comm.ledger.entries
        assert "d0" in str(caught.value) or says == "."


@each_rank("tensor=3")
def test_the_mean_of_cut_targets_is_refused_and_of_whole_targets_right(comm: Comm) -> None:
    logits, targets = values((5, 4)), torch.tensor([0, 3, -100, 1, 2])
    want = F.cross_entropy(logits, targets).detach()
    x = ShardedTensor.from_full(logits, "sample/tensor class", comm)
    assert float(F.cross_entropy(x, targets).full()) == pytest.approx(float(want))
    mine = ShardedTensor.from_full(targets, "sample/tensor", comm)
    with pytest.raises(LayoutError, match=r"Use reduction='sum' and divide by the global count.*all_gather"):
        F.cross_entropy(x, mine)
    comm.ledger.clear()
    with auto_redistribute():
        assert float(F.cross_entropy(x, mine).full()) == pytest.approx(float(want))
    first = comm.ledger.entries[0]
    assert (first.kind, first.note.phase, first.note.unit) == ("all_gather", "auto", "cross_entropy")


@each_rank("tensor=2")
def test_auto_redistribute_ends_with_its_block_and_concerns_one_thread(comm: Comm) -> None:
    x = shard(values((5, 6)), "a b, pending(tensor)", comm)
    with auto_redistribute():
        assert torch.equal(x.relu().local, x.full().relu())
    mark = len(comm.ledger)
    with pytest.raises(LayoutError):
        x.relu()
    assert len(comm.ledger) == mark


@each_rank("tensor=4")
def test_an_index_outside_a_cut_table_is_an_error_and_not_a_row_of_zeros(comm: Comm) -> None:
    table = ShardedTensor.from_full(values((5, 3)), "row/tensor width", comm)
    with pytest.raises(IndexError, match="table of 5 rows"):
        F.embedding(torch.tensor([0, 5]), table)
