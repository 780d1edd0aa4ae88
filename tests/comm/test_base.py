"""The face of every world, sums in the order of ranks, and the clock of deadlines."""

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trace_world import TraceComm

from plait.comm import Comm, Ledger, deadline, ordered_sum
from plait.comm import ordered_reduce as fold
from plait.comm.deadline import within
from plait.comm.gloo import GlooTransport
from plait.comm.operation import NO_NOTE, Group, Operation
from plait.table.collectives import Entry, Note
from plait.table.mesh import Mesh

E = torch.empty


@pytest.fixture
def comm() -> Comm:
    return TraceComm(Mesh(shard=3, replica=2), rank=4)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda c: c.all_gather(E(10), E(4), ("shard",)), r"out has 10 elements, but 3 x piece of 4 makes 12; pad"),
        (lambda c: c.reduce_scatter(E(4), E(13), ("shard",)), r"whole has 13 elements, but 3 x out of 4 makes 12"),
        (lambda c: c.scatter(E(4), E(13), ("shard",), 1), r"scatter.*whole has 13"),
        (lambda c: c.gather(E(13), E(4), ("shard",), 1), r"gather.*out has 13"),
        (lambda c: c.gather(None, E(4), ("shard",), 1), r"rank 4 is the root and needs out, not None"),
        (lambda c: c.scatter(E(4), E(12), ("shard",), 0), r"rank 4 is not the root \(that is rank 3\): whole is None"),
        (lambda c: c.all_to_all(E(10), E(10), ("shard",)), r"whole has 10 elements and out 10.* multiple of 3"),
        (lambda c: c.all_gather(E(12), E(4).double(), ("shard",)), r"all_gather between float32 and float64"),
        (lambda c: c.all_reduce(E(4, 4).t(), ("shard",)), r"not contiguous: call .contiguous\(\)"),
        (lambda c: c.all_reduce(E(4, device="meta"), ("shard",)), r"tensor is on meta, this world moves cpu"),
        (lambda c: c.all_reduce(E(4), ("shard",), "avg"), r"SUM only, divide yourself"),
        (lambda c: c.all_reduce(E(4), ("shard",), "mean"), r"SUM only, divide yourself"),
        (lambda c: c.all_reduce(E(4), ("shard",), "prod"), r"unknown op 'prod': use one of sum, min, max"),
        (lambda c: c.reduce_scatter(E(4), E(12), ("shard",), "AVG"), r"SUM only"),
        (lambda c: c.all_reduce(E(4), ("shards",)), r"unknown mesh axis 'shards'"),
        (lambda c: c.all_reduce(E(4), ("shard", "shard")), r"an axis is given twice"),
        (lambda c: c.broadcast(E(4), ("shard",), 4), r"root 4: the root is an index within the group, 0 to 2"),
        (lambda c: c.send(E(4), 4), r"send between rank 4 and rank 4"),
        (lambda c: c.send(E(4), None), r"send between rank 4 and rank None.*one of 0 to 5"),  # the end of a line
        (lambda c: c.recv(E(4), 6), r"one of 0 to 5, and not 4 itself"),
    ],
)
def test_refused_with_the_numbers_and_the_way_out(comm: Comm, ask, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ask(comm)
    assert comm.ledger.entries == ()


def test_a_piece_in_the_wrong_place_of_its_whole_is_refused(comm: Comm) -> None:
    whole = E(12)
    comm.all_gather(whole, whole[4:8], ("shard",))  # rank 4 is member 1
    comm.reduce_scatter(whole[4:8], whole, ("shard",))
    for place in (0, 2, 8):
        with pytest.raises(ValueError, match=rf"element {place} of out; rank 4 is member 1, whose slice starts at 4"):
            comm.all_gather(whole, whole[place : place + 4], ("shard",))
        with pytest.raises(ValueError, match=rf"scatter .* out begins at element {place} of whole;"):
            comm.scatter(whole[place : place + 4], whole, ("shard",), 1)
        with pytest.raises(ValueError, match=rf"gather .* piece begins at element {place} of out;"):
            comm.gather(whole, whole[place : place + 4], ("shard",), 1)
    with pytest.raises(ValueError, match="overwrite data that it has yet to send"):
        comm.all_to_all(whole, whole, ("shard",))


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_off_the_mesh_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="is not on the mesh replica=2 shard=3 of 6 ranks"):
        TraceComm(Mesh(shard=3, replica=2), rank)


def test_trace_writes_the_same_lines_and_moves_nothing(comm: Comm) -> None:
    out, note = torch.zeros(12), Note("forward", "head", 1)
    comm.all_gather(out, torch.ones(4), ("shard",), note).wait()
    assert not out.any()
    comm.send(torch.ones(2), 1)
    comm.recv(torch.ones(2), 0)
    comm.all_reduce(torch.ones(2).double(), ("shard", "replica"))
    assert comm.ledger.entries == (
        Entry("all_gather", ("shard",), 48, 32, note),
        Entry("send", ("replica",), 8, 8),
        Entry("recv", ("replica", "shard"), 8, 0),
        Entry("all_reduce", ("shard", "replica"), 16, 26),
    )


def test_ledger() -> None:
    ledger = Ledger()
    lines = [Entry("send", ("pipe",), k, k, Note(phase)) for k, phase in ((1, "a"), (2, "b"), (4, "a"))]
    for line in lines[:2]:
        ledger.add(line)
    mark = len(ledger)
    ledger.add(lines[2])
    assert ledger.entries == tuple(ledger) == tuple(lines)
    assert ledger.since(mark) == (lines[2],)
    assert ledger.sent == 7
    assert ledger.sent_by_phase() == {"a": 5, "b": 2}
    ledger.clear()
    assert len(ledger) == 0
    with pytest.raises(ValueError, match="mark 2 on a ledger that keeps the lines from 0 to 0"):
        ledger.since(mark)
    ledger.add(lines[0])
    assert ledger.entries == (lines[0],)
    with ledger.phase("mine"):
        ledger.add(lines[1])
    ledger.add(lines[1])
    assert [e.note.phase for e in ledger.entries] == ["a", "mine", "b"]


def test_a_ledger_keeps_its_newest_lines_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.comm.ledger.MOST_KEPT", 3)
    ledger = Ledger()
    lines = [Entry("send", ("pipe",), k, k, Note("ab"[k % 2])) for k in range(5)]
    for line in lines:
        ledger.add(line)
    assert len(ledger) == 5 and ledger.entries == tuple(lines[2:])
    assert ledger.sent == 10 and ledger.sent_by_phase() == {"a": 6, "b": 4}
    assert ledger.since(3) == tuple(lines[3:]) and ledger.since(2) == tuple(lines[2:]) and ledger.since(5) == ()
    with pytest.raises(ValueError, match="mark 1 on a ledger that keeps the lines from 2 to 5: ask sooner"):
        ledger.since(1)


def test_a_spare_buffer_is_of_the_same_device() -> None:
    """A world of GPUs reduces tensors of the CPU too."""
    transport = object.__new__(GlooTransport)
    transport._spare = {}
    group = Group(("shard",), (0, 1), 0, (2,))
    for device in ("cpu", "meta", "cpu"):
        mine = torch.empty(4, device=device)
        buffer, stack = transport._receive_stack(Operation("reduce", group, NO_NOTE, 4, mine.dtype, "sum"), mine)
        assert {tensor.device.type for tensor in (buffer, *stack)} == {device}
        transport._spare[buffer.dtype, buffer.device].append(buffer)


def test_a_call_that_never_returns_is_left_behind() -> None:
    held = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.05, held.wait)
    held.set()
    assert within(30, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(30, lambda: {}["x"])


def test_the_clock_of_deadlines_leaves_out_time_in_which_no_rank_could_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    clock = deadline.WaitClock()
    for seconds, counted, awake in ((0.5, 0.5, 0.0), (2.0, 2.5, 0.0), (3600.0, 4.5, 4602.5), (1.0, 5.5, 4602.5)):
        now[0] += seconds
        assert (clock(), clock.awake_since()) == (counted, awake)


COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def left(values: list[torch.Tensor], op: str) -> torch.Tensor:
    total = values[0]
    for x in values[1:]:
        total = COMBINE[op](total, x)
    return total


def by_loops(stack: torch.Tensor, sizes: tuple[int, ...], op: str) -> torch.Tensor:
    """``stack`` seen as [size of axis 0, size of axis 1, ..., numel]: the first dim is folded first."""
    nested = stack.view(*sizes, -1)
    for _ in sizes:
        nested = left(list(nested), op)
    return nested


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 70),
    st.sampled_from(list(COMBINE)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 2**31),
    st.sampled_from([16, 64, 4096]),
)
@example([4], 70, "sum", torch.float32, 0, 16)
@example([2, 4, 3], 70, "sum", torch.float32, 0, 4096)
def test_equals_nested_left_folds_bit_for_bit(sizes, numel, op, dtype, seed, block) -> None:
    n = math.prod(sizes)
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (n, numel), generator=generator)
    stack = (torch.randn(n, numel, generator=generator) * scale).to(dtype)
    expected = by_loops(stack, tuple(sizes), op)
    before, fold.BLOCK_BYTES = fold.BLOCK_BYTES, block
    try:
        out = torch.full((numel,), 7.0, dtype=dtype)
        ordered_sum(list(stack), sizes, op, out)
        assert torch.equal(out, expected)
        for k in range(n):  # out may be any of the members, early or late
            members = list(stack.clone())
            ordered_sum(members, sizes, op, members[k])
            assert torch.equal(members[k], expected)
            assert all(torch.equal(members[j], stack[j]) for j in range(n) if j != k)
    finally:
        fold.BLOCK_BYTES = before


def test_the_sign_of_zero_survives() -> None:
    out = torch.empty(1)
    ordered_sum([torch.tensor([-0.0])] * 3, [3], "sum", out)
    assert math.copysign(1.0, out.item()) == -1.0


def test_what_makes_no_sense_is_refused() -> None:
    x = [torch.ones(2)] * 4
    with pytest.raises(ValueError, match=r"sizes \(2, 3\) make 6 members, not 4"):
        ordered_sum(x, (2, 3), "sum", torch.empty(2))
