"""The protocol of shared memory: every interleaving of a few ranks in its model, and the model held against the code.

How the model is made, and what it leaves out, is told in docs/decisions/113-the-protocol-is-checked.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import protocol_mutants
import pytest
from protocol_checker import Finding, check
from protocol_mailbox import Ring, reads, writes
from protocol_model import Rank, Swift
from protocol_replay import DeviationError, follow
from protocol_scenarios import add, add_in_code, gather, gather_in_code, leave, leave_in_code, update, update_in_code
from protocol_steps import Shared
from protocol_trace import Script, played

from plait.shared_memory import mailbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="anonymous files are Linux's")

BODIES: dict[Callable[..., Any], Callable[..., None]] = {
    gather: gather_in_code,
    add: add_in_code,
    update: update_in_code,
    leave: leave_in_code,
}


def check_mailbox(writers: int = 1, records: int = 3, *, room: int = 2, mutant: str = "", **how: bool) -> int:
    """``records`` from each writer to one reader."""
    shared, start = Shared(**how), ()
    for writer in range(writers):
        start = shared.set(start, f"room{writer}{writers}", room)

    def rings() -> list[Ring]:
        return [Ring(room, writer, writers, mutant) for writer in range(writers)]

    programs = [lambda writer=writer: writes(rings()[writer], records) for writer in range(writers)]
    return check([*programs, lambda: reads(rings(), records)], shared, start)  # type: ignore[list-item]


def check_ranks(
    scenario: Callable[..., Any], size: int, *, capacity: int = 4, mutant: str = "", fine: bool = True, **how: Any
) -> int:
    """All interleavings of a scenario; ``fine``: alarms included, each mailbox looked at on its own."""
    kind, mail = Rank if fine else Swift, scenario is not update
    shared = Shared(capacity=capacity, bells=fine and size == 2, mail=mail)
    return check([lambda r=r: scenario(kind(r, size, mutant), **how) for r in range(size)], shared, fused=not fine)  # type: ignore[misc]


# ---- the protocol as it is -------------------------------------------------------------------------------


def test_a_mailbox_keeps_order_and_no_bell_is_missed() -> None:
    check_mailbox()
    check_mailbox(records=2, room=1)


def test_of_two_writers_as_well() -> None:
    check_mailbox(2, 1, room=1)


def test_where_a_failed_look_orders_nothing_a_bell_may_be_missed_and_a_nap_ends_the_wait() -> None:
    """ARM with glibc: both may look before what the other has posted arrives.  So a sleep has an end of its own."""
    with pytest.raises(Finding, match="rank 0 and 1 would never come to an end"):
        check_mailbox(weak=True)
    check_mailbox(weak=True, naps=True)


@pytest.mark.parametrize(
    ("scenario", "how"),
    [
        (gather, {"rounds": 2}),
        (gather, {"rounds": 1, "leave": True}),
        (gather, {"rounds": 1, "chunks": 3, "fine": False}),
        (add, {"rounds": 1}),
        (add, {"rounds": 2, "chunks": 2, "fine": False}),
        (add, {"rounds": 1, "lent": True}),
        (update, {"rounds": 2}),
        (update, {"rounds": 3, "fine": False}),
    ],
)
def test_two_ranks_in_every_order(scenario: Callable[..., Any], how: dict[str, Any]) -> None:
    check_ranks(scenario, 2, **how)


@pytest.mark.parametrize(("scenario", "how"), [(gather, {}), (update, {"rounds": 2})])
def test_three_ranks_in_every_order(scenario: Callable[..., Any], how: dict[str, Any]) -> None:
    check_ranks(scenario, 3, fine=False, **how)


def test_three_ranks_add_in_every_order() -> None:
    check_ranks(add, 3, fine=False)


def test_who_leaves_is_missed_only_when_all_it_sent_was_looked_at() -> None:
    check_ranks(leave, 3, capacity=1, records=1)


# ---- and the code is the same ----------------------------------------------------------------------------

LEFT_MEANWHILE: Script = [
    (1, ("take", "asleep0")),
    (0, ("nap",)),
    (2, ("nap",)),
    (0, ("nap",)),
    (2, None),
    (0, ("nap",)),
]
"""Rank 0 waits for room in rank 1's mailbox while rank 2's message comes, and rank 2 leaves."""

RUNS = [
    (2, gather, {"rounds": 2, "chunks": 3, "leave": True}),
    (3, gather, {"rounds": 1, "chunks": 3, "leave": True}),
    (2, add, {"rounds": 2, "chunks": 3}),
    (3, add, {"rounds": 1, "chunks": 2, "lent": True}),
    (3, update, {"rounds": 2}),
    (3, leave, {"records": 2}),
]


@pytest.mark.parametrize("records", [2, 1024])
@pytest.mark.parametrize(("size", "scenario", "how"), RUNS)
def test_every_step_of_a_run_is_the_models(
    monkeypatch: pytest.MonkeyPatch, size: int, scenario: Callable[..., Any], how: dict[str, Any], records: int
) -> None:
    monkeypatch.setattr(mailbox, "RECORDS", records)
    for seed in range(4):
        script = LEFT_MEANWHILE if scenario is leave and seed == 0 and records == 2 else ()
        follow(played(size, seed, partial(BODIES[scenario], **how), script), partial(scenario, **how))


# ---- mutants ---------------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """How the checker meets it, and a run that shows that code and model have the same one."""

    checked: Callable[..., int]
    found: str
    size: int
    scenario: Callable[..., Any]
    how: dict[str, Any]
    records: int = 1024
    script: Script = ()


at_once = "touch .* at once"
endless = "would never come to an end"
MUTANTS = {
    "posts before it writes": Mutant(check_mailbox, at_once, 2, gather, {}),
    "gives room before it reads": Mutant(check_mailbox, at_once, 2, gather, {"chunks": 2}),
    "sleeps without a last look": Mutant(check_mailbox, endless, 2, gather, {}),
    "publishes before it copies": Mutant(partial(check_ranks, gather, 2), at_once, 2, gather, {}),
    "frees a block at the first reader": Mutant(
        partial(check_ranks, gather, 3, fine=False, rounds=2), at_once, 3, gather, {"rounds": 2}
    ),
    "acknowledges before it copies": Mutant(partial(check_ranks, gather, 2, rounds=2), at_once, 2, gather, {}),
    "acknowledges before it gives the sum back": Mutant(partial(check_ranks, add, 2), at_once, 2, add, {}),
    "acknowledges nothing": Mutant(partial(check_ranks, gather, 2, chunks=3), endless, 2, gather, {"chunks": 3}),
    "does not wait for readers": Mutant(partial(check_ranks, update, 2), at_once, 2, update, {}),
    "waits for the generation before": Mutant(partial(check_ranks, update, 2), at_once, 2, update, {}),
    "waits for its neighbour alone": Mutant(partial(check_ranks, update, 3, fine=False), at_once, 3, update, {}),
    "tells and does not ring": Mutant(partial(check_ranks, update, 2), endless, 2, update, {}),
    "says who has left before it looks": Mutant(
        partial(check_ranks, leave, 3, capacity=1, records=1),
        "rank 2 has left",
        3,
        leave,
        {"records": 2},
        2,
        LEFT_MEANWHILE,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_finds_each_mutant(name: str) -> None:
    mutant = MUTANTS[name]
    with pytest.raises(Finding, match=mutant.found) as found:
        mutant.checked(mutant=name)
    print(f"{name}: {found.value}")
    assert "rank 0" in str(found.value).splitlines()[1]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_code_is_the_models_mutant_and_not_the_model(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(mailbox, "RECORDS", mutant.records)
    body, program = partial(BODIES[mutant.scenario], **mutant.how), partial(mutant.scenario, **mutant.how)
    mutate = getattr(protocol_mutants, name.replace(" ", "_"))
    runs = [played(mutant.size, seed, body, mutant.script, mutate) for seed in range(4)]
    for run in runs:
        follow(run, program, name)
    with pytest.raises(DeviationError):
        for run in runs:
            follow(run, program)
