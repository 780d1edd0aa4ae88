"""Duties of every world, as functions of one rank's comm: run both in threads and in processes.

Expected values are computed here from coordinates, in plain loops, without the library's own fold.
"""

import itertools

import pytest
import torch
from plait_lessons.script import init
from torch import Tensor

from plait.comm.agree import gather_floats, gather_ints
from plait.comm.base import Comm, MismatchError, Observer, Operation
from plait.comm.header import empty_header, header_of, shape_in
from plait.comm.texts import check_together, gather_bytes, same_everywhere, same_tensors
from plait.table.collectives import Entry, Note, bytes_sent

COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}
LENGTHS = (0, 1, 5, 1000)


def value(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's own numbers: of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    mantissa = torch.randn(numel, generator=generator, dtype=torch.float64)
    exponent = torch.randint(-3, 6, (numel,), generator=generator)
    return (mantissa * 10.0**exponent).to(dtype)


def axes_of(comm: Comm) -> list[tuple[str, ...]]:
    """Every choice of the mesh's larger axes, in every order; one axis of size 1 thrown in."""
    large = [a for a in ("replica", "shard", "tensor", "pipe") if comm.mesh.axis(a) > 1]
    orders = [p for k in range(1, len(large) + 1) for p in itertools.permutations(large, k)]
    one = [a for a in ("pipe", "tensor") if comm.mesh.axis(a) == 1]
    return [*orders, (*orders[-1], one[0]) if orders else (one[0],)]


def folded(comm: Comm, axes: tuple[str, ...], op: str, numel: int, dtype: torch.dtype) -> Tensor:
    """The first axis is folded first, from left to right; then the next."""

    def at(left: tuple[str, ...], where: dict[str, int]) -> Tensor:
        if not left:
            return value(comm.mesh.rank(**where), numel, dtype)
        total = at(left[:-1], {**where, left[-1]: 0})
        for i in range(1, comm.mesh.axis(left[-1])):
            total = COMBINE[op](total, at(left[:-1], {**where, left[-1]: i}))
        return total

    return at(axes, comm.mesh.coordinates(comm.rank))


def same(a: Tensor, b: Tensor) -> None:
    """Bit for bit."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a, b)
    assert torch.equal(a, b), (a, b, (a - b).abs().max())


def check_collectives(comm: Comm) -> None:
    """Every collective over every choice of axes, bit for bit, at several lengths."""
    for axes, m, in_place in itertools.product(axes_of(comm), LENGTHS, (False, True)):
        ranks = comm.mesh.group(comm.rank, axes)
        index, n = comm.mesh.index(comm.rank, axes), len(ranks)
        mine = slice(index * m, (index + 1) * m)

        out = torch.full((n * m,), -7.0)
        piece = out[mine].copy_(value(comm.rank, m)) if in_place else value(comm.rank, m)
        comm.all_gather(out, piece, axes).wait()
        same(out, torch.cat([value(r, m) for r in ranks]))

        for op in COMBINE:
            whole = value(comm.rank, n * m)
            out = whole[mine] if in_place else torch.full((m,), -7.0)
            expected = folded(comm, axes, op, n * m, torch.float32)[mine]
            comm.reduce_scatter(out, whole, axes, op).wait()
            same(out, expected)

            tensor = value(comm.rank, m)
            comm.all_reduce(tensor, axes, op).wait()
            same(tensor, folded(comm, axes, op, m, torch.float32))

        for root in range(n):
            tensor = value(comm.rank, m)
            comm.broadcast(tensor, axes, root).wait()
            same(tensor, value(ranks[root], m))

            tensor = value(comm.rank, m)
            comm.reduce(tensor, axes, root).wait()
            here = index == root
            same(tensor, folded(comm, axes, "sum", m, torch.float32) if here else value(comm.rank, m))

            whole = value(comm.rank, n * m)
            out = whole[mine] if here and in_place else torch.full((m,), -7.0)
            comm.scatter(out, whole if here else None, axes, root).wait()
            same(out, value(ranks[root], n * m)[mine])

            room = torch.full((n * m,), -7.0)
            piece = room[mine].copy_(value(comm.rank, m)) if in_place else value(comm.rank, m)
            comm.gather(room if here else None, piece, axes, root).wait()
            if here:
                same(room, torch.cat([value(r, m) for r in ranks]))

        out = torch.full((n * m,), -7.0)
        comm.all_to_all(out, value(comm.rank, n * m), axes).wait()
        same(out, torch.cat([value(r, n * m)[mine] for r in ranks]))
        comm.barrier(axes)


def check_dtypes_and_long(comm: Comm) -> None:
    """Other dtypes, and arrays long enough for blocks, chunks and the two-phase all-reduce."""
    axes = axes_of(comm)[-1]
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        tensor = value(comm.rank, 77, dtype)
        comm.all_reduce(tensor, axes).wait()
        same(tensor, folded(comm, axes, "sum", 77, dtype))
    # Two ranks: more than one chunk. More ranks: two phases, and cut in n pieces that are not equal.
    long = 2_500_001 if len(comm.mesh.group(comm.rank, axes)) == 2 else 400_001
    tensor = value(comm.rank, long)
    comm.all_reduce(tensor, axes).wait()
    same(tensor, folded(comm, axes, "sum", long, torch.float32))


def check_under_way(comm: Comm) -> None:
    """Several operations at once; waited for in another order than issued, the same on all members, and twice."""
    axes = axes_of(comm)[-1]
    ranks, index = comm.mesh.group(comm.rank, axes), comm.mesh.index(comm.rank, axes)
    n, m = len(ranks), 400_000
    sums = [value(comm.rank, m), value(comm.rank, m).flip(0)]  # they differ in their values alone
    expected = [total := folded(comm, axes, "sum", m, torch.float32), total.flip(0)]
    whole, piece, gathered = value(comm.rank, n * 10), torch.empty(10), torch.empty(n * 4)
    works = [comm.all_reduce(x, axes) for x in sums]
    works.append(comm.reduce_scatter(piece, whole, axes))
    works.append(comm.all_gather(gathered, value(comm.rank, 4), axes))
    for k in (1, 3, 0, 2):
        works[k].wait()
        works[k].wait()
    for got, want in zip(sums, expected, strict=True):
        same(got, want)
    same(piece, folded(comm, axes, "sum", n * 10, torch.float32)[index * 10 : index * 10 + 10])
    same(gathered, torch.cat([value(r, 4) for r in ranks]))


def check_no_grad(comm: Comm) -> None:
    """Parameters may be handed in; nothing of it is recorded for autograd."""
    axes = axes_of(comm)[-1]
    leaf = value(comm.rank, 6).requires_grad_()
    assert torch.is_grad_enabled()
    comm.all_reduce(leaf, axes).wait()
    assert leaf.is_leaf and leaf.requires_grad
    same(leaf.detach(), folded(comm, axes, "sum", 6, torch.float32))


def check_ledger(comm: Comm) -> None:
    """One line per operation, with the logical bytes; none for a group of one."""
    axes, note = axes_of(comm)[0], Note("backward", "blocks.0", 3)
    n, index = comm.mesh.count(axes), comm.mesh.index(comm.rank, axes)
    mark, whole = len(comm.ledger), torch.zeros(n * 3)
    one = (next(a for a in ("pipe", "tensor", "replica") if comm.mesh.axis(a) == 1),)
    comm.all_gather(whole, torch.ones(3), axes, note).wait()
    comm.reduce_scatter(torch.ones(3), whole, axes, "max", note).wait()
    comm.all_reduce(torch.ones(5), axes, note=note).wait()
    comm.broadcast(torch.ones(5), axes, 1, note).wait()
    comm.barrier(axes, note)
    comm.all_reduce(torch.ones(5), one, note=note).wait()
    comm.all_gather(torch.ones(5), torch.ones(5), one).wait()
    comm.barrier(())
    expected = (
        Entry("all_gather", axes, n * 12, (n - 1) * 12, note),
        Entry("reduce_scatter", axes, n * 12, (n - 1) * 12, note),
        Entry("all_reduce", axes, 20, 2 * (n - 1) * 20 // n, note),
        Entry("broadcast", axes, 20, (n - 1) * 20 if index == 1 else 0, note),
        Entry("barrier", axes, 0, 0, note),
    )
    assert comm.ledger.since(mark) == expected, comm.ledger.since(mark)
    assert expected[2].sent == bytes_sent("all_reduce", 20, n)


def check_messages(comm: Comm) -> None:
    """Around the line and back; of no element and of many."""
    last = comm.mesh.size - 1
    right, left = (comm.rank + 1) % (last + 1), (comm.rank - 1) % (last + 1)
    coming = comm.recv(first := torch.empty(2, 3), left)  # everybody asks first, then sends
    comm.send(torch.full((2, 3), float(comm.rank)), right)
    coming.wait()
    same(first, torch.full((2, 3), float(left)))
    if comm.rank == 0:
        comm.send(torch.empty(0), 1)
        big = value(0, 3_000_000)
        comm.send(big, 1).wait()
        big.zero_()
    elif comm.rank == 1:
        comm.recv(torch.empty(0), 0).wait()
        comm.recv(got := torch.empty(3_000_000), 0).wait()
        same(got, value(0, 3_000_000))
    comm.barrier(("shard", "replica", "pipe"))


def check_headers(comm: Comm) -> None:
    """A header tells shape and dtype, also of nothing, of a scalar and of many dims; the message follows."""
    n = comm.mesh.size
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    shapes: list[tuple[int, ...]] = [(3, 5), (0, 4), (), (2_500_000,), (7,), (1,) * 14]
    types = [torch.float32, torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.bool]

    def sent(rank: int, i: int) -> Tensor:
        return value(rank, torch.Size(shapes[i]).numel()).view(shapes[i]).to(types[i])

    works = []
    for i in range(len(shapes)) if n > 1 else ():
        tensor = sent(comm.rank, i)
        works += [comm.send(header_of(tensor, comm.device), after), comm.send(tensor, after)]
    for i in range(len(shapes)) if n > 1 else ():
        comm.recv(header := empty_header(comm.device), before).wait()
        shape, dtype = shape_in(header)
        comm.recv(got := torch.empty(shape, dtype=dtype), before).wait()
        same(got, sent(before, i))
    for work in works:
        work.wait()


def check_many_messages_before_any_is_taken(comm: Comm) -> None:
    """A rank that keeps the handles never waits in ``send``, for any number of them; each arrives in its turn."""
    n, many = comm.mesh.size, 100
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    if after == comm.rank:
        return
    works = [comm.send(torch.full((3,), float(i)), after) for i in range(many)]
    for i in range(many):
        comm.recv(got := torch.empty(3), before).wait()
        same(got, torch.full((3,), float(i)))
    for work in works:
        work.wait()


def check_messages_whose_handles_are_dropped(comm: Comm) -> None:
    """They go, and a world keeps the memory of a few of them only."""
    many = 1100
    for i in range(many if comm.rank == 0 and comm.mesh.size > 1 else 0):
        comm.send(torch.full((3,), float(i)), 1)
        assert len(getattr(comm, "sends", ())) <= 1024
    for i in range(many if comm.rank == 1 else 0):
        comm.recv(got := torch.empty(3), 0).wait()
        same(got, torch.full((3,), float(i)))


def check_gather_bytes(comm: Comm) -> None:
    """Bytes of different lengths from every rank, none included."""
    every = gather_bytes(comm, bytes(range(comm.rank)) * 3)
    if comm.rank == 0:
        assert every == [bytes(range(rank)) * 3 for rank in range(comm.mesh.size)]
    else:
        assert every is None


def check_rows(comm: Comm) -> None:
    """Rows of numbers of all members, in group order, to the bit; what differs among them is found."""
    axes, note = axes_of(comm)[-1], Note("rows")
    ranks = comm.mesh.group(comm.rank, axes)
    rows = gather_ints(comm, [comm.rank, 2**62 - comm.rank], axes, note)
    assert rows == [[rank, 2**62 - rank] for rank in ranks] and gather_ints(comm, [], axes, note) == [[]] * len(ranks)
    assert gather_floats(comm, [0.1 + comm.rank], axes, note) == [[0.1 + rank] for rank in ranks]
    one = len(ranks) == 1
    assert same_everywhere(comm, [7, comm.rank, -(2**62)], axes, note) == [True, one, True]
    tensor = torch.ones(3, dtype=torch.complex64).conj()
    assert same_tensors(comm, [tensor, torch.empty(0)], axes, note)
    assert same_tensors(comm, [tensor + comm.rank], axes, note) == one


def check_waits_are_told(comm: Comm) -> None:
    """A listener gets every wait, with its operation, and nothing after it has stopped listening."""
    if comm.mesh.size == 1:
        return
    heard: list[tuple[str, float]] = []

    class Ear(Observer):
        def asked(self, operation: Operation) -> None:
            asked.append(str(operation))

        def waited(self, operation: Operation, start: float, end: float) -> None:
            heard.append((str(operation), end - start))

    before, asked = comm.observers, list[str]()
    comm.observers = (*before, Ear())
    axes = next(axes for axes in axes_of(comm) if comm.mesh.count(axes) > 1)
    comm.all_reduce(torch.ones(8), axes, note=Note("heard")).wait()
    comm.observers = before
    comm.all_reduce(torch.ones(8), axes).wait()
    assert len(asked) == 1 and heard and all("heard" in call and seconds >= 0 for call, seconds in heard)


def check_refused_messages(comm: Comm) -> None:
    """A script's message of another shape or dtype names both sides, at once; the next one arrives."""
    world = init(comm)
    if comm.rank == 0:
        world.send_tensor(torch.ones(3, 4), 1)
        world.send_tensor(torch.ones(3, 4), 1)
        world.send_tensor(torch.ones(2), 1)
    elif comm.rank == 1:
        for shape, dtype in (((4, 3), torch.float32), ((3, 4), torch.float64)):
            with pytest.raises(MismatchError) as caught:
                world.recv_tensor(shape, 0, dtype)
            text = str(caught.value)
            assert f"{dtype}".removeprefix("torch.") + f" {shape}" in text, text
            assert "rank 1" in text and "rank 0" in text and "float32 (3, 4)" in text, text
        same(world.recv_tensor((2,), 0), torch.ones(2))


def check_check_together(comm: Comm) -> None:
    axes = axes_of(comm)[-1]
    check_together(comm, None, axes)
    bad = comm.mesh.group(comm.rank, axes)[-1]
    error = OSError("disk full: é") if comm.rank == bad else None
    with pytest.raises((OSError, RuntimeError)) as caught:
        check_together(comm, error, axes)
    if comm.rank == bad:
        assert caught.value is error
    else:
        assert (
            isinstance(caught.value, RuntimeError) and str(caught.value) == f"rank {bad} failed: OSError: disk full: é"
        )


EVERYTHING = [f for name, f in list(globals().items()) if name.startswith("check_") and f is not check_together]
