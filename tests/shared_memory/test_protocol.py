"""The protocol of shared memory in many drawn orders of its steps, and faults in it that these orders find.

docs/decisions/133-orders-are-drawn.md says how the orders are drawn, and what they leave out.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import protocol_mutants
import pytest
import torch
from protocol_orders import PlayedRank, play

from plait.shared_memory import mailbox


def value(turn: int, rank: int, chunk: int) -> int:
    """The number of a rank in a round; a sum of them shows which ranks are in it."""
    return (turn + 1) * 10**rank + 1000 * chunk


def gather(me: PlayedRank, rounds: int = 1, chunks: int = 1, *, leave: bool = False) -> None:
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


def add(me: PlayedRank, rounds: int = 1, chunks: int = 1, *, lent: bool = False) -> None:
    numel = me.size * chunks
    tensor = me.transport.empty(numel, torch.float64) if lent else torch.empty(numel, dtype=torch.float64)
    for turn in range(rounds):
        tensor.copy_(torch.tensor([value(turn, me.rank, k) for k in range(numel)]))
        me.wait(me.transport.library(replace(me.operation, kind="all_reduce"), tensor, tensor))
        due = [float(sum(value(turn, rank, k) for rank in range(me.size))) for k in range(numel)]
        assert tensor.tolist() == due, (tensor.tolist(), due)


def update(me: PlayedRank, rounds: int = 1) -> None:
    """Forwards that read common memory, and an update of its pieces after each but the last."""
    pieces = me.common.tensor_split(me.size)
    transport, operation = me.transport, replace(me.operation, kind="all_gather")
    for turn in range(rounds + 1):
        transport.wrote_common(later=True)
        works = transport.library(operation, me.common, pieces[me.rank])
        assert works is not None
        me.wait(works)
        for k in range(me.size):
            found = me.load(pieces[k])
            assert found == (value(turn, k, 0) if turn else 0), (found, turn, k)
        if turn < rounds:
            transport.wait_for_readers()
            me.store(pieces[me.rank], value(turn + 1, me.rank, 0))
            transport.wrote_common(later=False)


def message(me: PlayedRank, rounds: int = 1) -> None:
    one, other = torch.zeros(1, dtype=torch.float64), 1 - me.rank
    for turn in range(rounds):
        me.transport.send(me.operation, one.fill_(value(turn, me.rank, 0)), other, turn)
        me.wait(me.transport.recv(me.operation, one, other, turn))
        assert one.item() == value(turn, other, 0)


def leave(me: PlayedRank, records: int) -> None:
    """Rank 0 hears from both others; one of them has left by then, and the other's mailbox is full."""
    mail, one = me.transport, torch.zeros(1, dtype=torch.float64)
    if me.rank == 0:
        for tag in range(records):
            mail.send(me.operation, one + tag, 1, 10 + tag)
        come = {src: one.clone() for src in (2, 1)}
        me.wait([work for src, tensor in come.items() for work in mail.recv(me.operation, tensor, src, 1)])
        assert (come[1].item(), come[2].item()) == (1.0, 2.0)
    else:
        mail.send(me.operation, one + me.rank, 0, 1)
        if me.rank == 1:
            me.wait_for_the_end_of(2)
            for tag in range(records):
                me.wait(mail.recv(me.operation, one, 0, 10 + tag))
        else:
            mail.close()


RUNS = [
    (2, gather, {"rounds": 2, "chunks": 3, "leave": True}),
    (3, gather, {"rounds": 2, "chunks": 3, "leave": True}),
    (2, add, {"rounds": 2, "chunks": 3}),
    (3, add, {"rounds": 1, "chunks": 2, "lent": True}),
    (2, update, {"rounds": 2}),
    (3, update, {"rounds": 2}),
    (2, message, {"rounds": 3}),
    (3, leave, {"records": 2}),
]


@pytest.mark.parametrize("records", [2, 1024])
@pytest.mark.parametrize(("size", "scenario", "how"), RUNS)
def test_every_order_ends_well(
    monkeypatch: pytest.MonkeyPatch, size: int, scenario: Callable[..., Any], how: dict[str, Any], records: int
) -> None:
    monkeypatch.setattr(mailbox, "RECORDS", records)
    for seed in range(20):
        assert play(size, seed, partial(scenario, **how)) == {}, f"seed {seed}"


MUTANTS: dict[str, tuple[int, Callable[..., Any], dict[str, Any], int]] = {
    "posts before it writes": (2, message, {"rounds": 3}, 1024),
    "gives room before it reads": (2, message, {"rounds": 6}, 2),
    "sleeps without a last look": (2, message, {}, 1024),
    "frees a block at the first reader": (3, gather, {"rounds": 2}, 1024),
    "acknowledges before it copies": (2, message, {"rounds": 3}, 1024),
    "reports a part before it is written": (2, gather, {}, 1024),
    "has used a part before it uses it": (2, gather, {"rounds": 2, "chunks": 2}, 1024),
    "has used a part before it gives the sum back": (2, add, {}, 1024),
    "reports no part as used": (2, gather, {"chunks": 3}, 1024),
    "does not wait for readers": (2, update, {}, 1024),
    "waits for the generation before": (2, update, {}, 1024),
    "tells and does not ring": (2, update, {}, 1024),
}
MOST_SEEDS = 400


@pytest.mark.parametrize("name", MUTANTS)
def test_some_order_finds_each_mutant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    size, scenario, how, records = MUTANTS[name]
    monkeypatch.setattr(mailbox, "RECORDS", records)
    mutate = getattr(protocol_mutants, name.replace(" ", "_"))
    found = (seed for seed in range(MOST_SEEDS) if play(size, seed, partial(scenario, **how), mutate))
    seed = next(found, None)
    print(f"{name}: found by seed {seed}")
    assert seed is not None
