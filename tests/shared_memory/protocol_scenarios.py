"""What ranks do in a few rounds, for the model and, the same, for the code."""

from __future__ import annotations

from dataclasses import replace

import torch
from protocol_arrivals import Copying
from protocol_model import Outgoing, Rank
from protocol_steps import Program
from protocol_trace import Traced

from plait.shared_memory import arrivals, outgoing


def value(turn: int, rank: int, chunk: int) -> int:
    """That a rank has in a round: sums of them tell who is in it."""
    return (turn + 1) * 10**rank + 1000 * chunk


def gather(me: Rank, rounds: int = 1, chunks: int = 1, *, leave: bool = False) -> Program:
    for turn in range(rounds):
        whole = [[value(turn, rank, chunk) for chunk in range(chunks)] for rank in range(me.size)]
        slots = [whole[rank] if rank == me.rank else [0] * chunks for rank in range(me.size)]
        yield from me.wait(me.exchange(turn, slots, [slots[me.rank]] * me.size))
        assert slots == whole, f"gathers {slots}, and not {whole}"
    if leave:
        yield from me.close()


def gather_in_code(me: Traced, rounds: int = 1, chunks: int = 1, *, leave: bool = False) -> None:
    for turn in range(rounds):
        whole = torch.tensor(
            [value(turn, rank, chunk) for rank in range(me.size) for chunk in range(chunks)], dtype=torch.float64
        )
        slots = list((whole * 0).tensor_split(me.size))
        slots[me.rank] = whole.tensor_split(me.size)[me.rank].clone()
        me.wait(me.transport.exchange(me.operation, slots, [slots[me.rank]] * me.size, turn))
        assert torch.equal(torch.cat(slots), whole), slots
    if leave:
        me.transport.close()


def add(me: Rank, rounds: int = 1, chunks: int = 1, *, lent: bool = False) -> Program:
    for turn in range(rounds):
        slices = [[value(turn, me.rank, k * chunks + chunk) for chunk in range(chunks)] for k in range(me.size)]
        cells = [[("lent", me.rank, k, chunk) for chunk in range(chunks)] for k in range(me.size)] if lent else ()
        for k in range(me.size) if lent else ():
            for chunk in range(chunks):
                yield ("store", *cells[k][chunk], slices[k][chunk])
        yield from me.wait(me.all_reduce(turn, slices, cells))
        for k in range(me.size):
            for chunk in range(chunks):
                if lent and k != me.rank:
                    slices[k][chunk] = yield ("load", *cells[k][chunk])
                due = sum(value(turn, rank, k * chunks + chunk) for rank in range(me.size))
                assert slices[k][chunk] == due, f"sums up to {slices[k][chunk]}, and not {due}"


def add_in_code(me: Traced, rounds: int = 1, chunks: int = 1, *, lent: bool = False) -> None:
    numel = me.size * chunks
    tensor = me.transport.empty(numel, torch.float64) if lent else torch.empty(numel, dtype=torch.float64)
    for turn in range(rounds):
        tensor.copy_(torch.tensor([value(turn, me.rank, k) for k in range(numel)]))
        me.wait(me.transport.all_reduce(me.operation, tensor, turn))
        due = [float(sum(value(turn, rank, k) for rank in range(me.size))) for k in range(numel)]
        assert tensor.tolist() == due, (tensor.tolist(), due)


def update(me: Rank, rounds: int = 1, *, behind: bool = True) -> Program:
    """A forward, which reads common memory, and an update of its pieces.

    Args:
        behind: another gather behind the last update.
    """
    for turn in range(rounds + behind):
        yield from me.wrote_common(later=True)
        yield from me.wait(me.hear())
        for k in range(me.size):
            found = yield ("load", "piece", k)
            due = value(turn, k, 0) if turn else 0
            assert found == due, f"piece {k} is read as {found}, and not {due}"
        if turn < rounds:
            yield from me.wait_for_readers()
            yield ("store", "piece", me.rank, value(turn + 1, me.rank, 0))
            yield from me.wrote_common(later=False)


def update_in_code(me: Traced, rounds: int = 1, *, behind: bool = True) -> None:
    pieces = me.common.tensor_split(me.size)
    transport, operation = me.transport, replace(me.operation, kind="all_gather")
    for turn in range(rounds + behind):
        transport.wrote_common(later=True)
        works = transport.library(operation, me.common, pieces[me.rank])
        assert works is not None
        me.wait(works)
        for k in range(me.size):
            found = me.load(pieces[k], "piece", k)
            assert found == (value(turn, k, 0) if turn else 0), (found, turn, k)
        if turn < rounds:
            transport.wait_for_readers()
            me.store(pieces[me.rank], value(turn + 1, me.rank, 0), "piece", me.rank)
            transport.wrote_common(later=False)


def leave(me: Rank, records: int) -> Program:
    """Rank 0 hears from both others; one of them has left by then, and the other's mailbox is full."""
    if me.rank == 0:
        for tag in range(records):
            yield from me.pump(Outgoing([tag], [1], 10 + tag, (), False))
        slots = {2: [0], 1: [0]}
        arrival = Copying(me, slots, [], 1)
        me.under_way.append(arrival)
        yield from me.until(arrival)
        assert slots == {2: [2], 1: [1]}
    else:
        yield from me.pump(Outgoing([me.rank], [0], 1, (), False))
        if me.rank == 1:
            for tag in range(records):
                yield from me.until(Copying(me, {0: [0]}, [], 10 + tag))
        else:
            yield from me.close()


def leave_in_code(me: Traced, records: int) -> None:
    mail, one = me.transport, torch.zeros(1, dtype=torch.float64)
    if me.rank == 0:
        for tag in range(records):
            mail._begin(outgoing.Outgoing(me.operation, [one + tag], [1], 10 + tag))
        slots = {2: [one.clone()], 1: [one.clone()]}
        me.wait(mail._begun(arrivals.Copying(mail, slots, (), 1), one))
        assert (slots[1][0].item(), slots[2][0].item()) == (1.0, 2.0)
    else:
        mail._begin(outgoing.Outgoing(me.operation, [one + me.rank], [0], 1))
        if me.rank == 1:
            for tag in range(records):
                me.wait(mail.recv(me.operation, one, 0, 10 + tag))
        else:
            mail.close()
