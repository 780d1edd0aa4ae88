"""Holds a real run of ``plait.shared_memory`` against its model.

Each step of the run has to be the next one of the model's rank, with an outcome that the model has for it.  When a
message is sent or acknowledged, what it says in memory has to be what it says in the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from protocol_checker import columns, told
from protocol_model import Fine
from protocol_steps import Memory, Program, Shared, Step
from protocol_trace import Run, Stuck

from plait.shared_memory import mailbox
from plait.shared_memory.mailbox import DATA


class DeviationError(AssertionError):
    """The code does what its model does not."""


class Replay:
    """The model's ranks, as far as a trace has come."""

    def __init__(self, programs: Sequence[Program], shared: Shared, start: tuple[Any, ...]) -> None:
        self._programs, self._shared, self._memory = programs, shared, start
        self._steps: list[Step | None] = []
        self._steps += [next(program, None) for program in programs]
        self._broken: set[int] = set()
        """Ranks of the model that read what they should not."""
        self._places: dict[Any, Any] = {}
        """Where the code has what the model names: both ways."""

    def follow(self, run: Run) -> int:
        """How many steps there were.

        Raises:
            DeviationError: one of them is not the model's.
        """
        for rank in range(run.size):
            self._silent(rank)
        for count, (rank, step, outcome, content) in enumerate(run.trace):
            due = self._steps[rank]
            if due is not None and due[:2] == ("load", "slot") and self._value(self._memory, *due[1:]) == 0:
                return count  # it reads what nobody has written: anything may come then
            if due is None or not self._same(rank, due, step) or not self._go(rank, due, outcome, content):
                recent = [(r, told(s, o)) for r, s, o, _ in run.trace[max(0, count - 12) : count + 1]]
                says = "has come to its end" if due is None else f"would do: {told(due, None)}"
                raise DeviationError(f"rank {rank} of the model {says}\n{columns(recent, run.size)}")
            self._silent(rank)
        for rank in range(run.size):
            error = run.errors.get(rank)
            if isinstance(error, Stuck) and self._steps[rank] is not None:
                continue  # so is the model
            if self._steps[rank] is not None or (rank in self._broken) != (error is not None):
                raise DeviationError(f"rank {rank} ended with {error!r}, the model at {self._steps[rank]}")
        return len(run.trace)

    def _silent(self, rank: int) -> None:
        """Does what the trace does not have: accesses of a rank to its own memory."""
        while (step := self._steps[rank]) is not None and step[0] in ("store", "load") and step[1] in ("block", "lent"):
            if step[0] == "load" and step[2] != rank:
                break
            self._go(rank, step, None, None, any_outcome=True)

    def _value(self, memory: Memory, *cell: Any) -> Any:
        return self._shared.get(memory, ("cell", *cell))

    def _go(self, rank: int, due: Step, outcome: Any, content: Any, *, any_outcome: bool = False) -> bool:
        for given, then in self._shared.outcomes(self._memory, rank, due):
            if any_outcome or self._alike(given, outcome, rank if due[0] != "load" else due[2]):
                if content is not None and self._value(then, *self._cell(due[-1], rank, due[3])) != content:
                    return False
                self._memory = then
                try:
                    self._steps[rank] = self._programs[rank].send(given)
                except (StopIteration, AssertionError) as end:
                    self._steps[rank] = None
                    self._broken |= {rank} if isinstance(end, AssertionError) else set()
                return True
        return False

    def _cell(self, record: tuple[Any, ...], writer: int, reader: int) -> tuple[Any, ...]:
        if record[0] == DATA:
            self._places["cell", writer, record[3]] = record[2]
            return record[2]
        return self._places["cell", reader, record[1]]

    def _same(self, rank: int, due: Step, step: Step) -> bool:
        if due[0] != step[0]:
            return False
        if due[0] == "told":
            return due[1] == step[1]
        if due[0] == "load" and due[1] in ("block", "lent"):
            return step[1] == due[2] and self._bound(due[1:], step[1:])
        if due[0] == "store" and due[1] == "slot":
            return due[1:-1] == step[1:-1] and self._alike(due[-1], step[-1], rank)
        return due == step

    def _alike(self, mine: Any, its: Any, owner: int) -> bool:
        """Whether an outcome is the model's; of a message, tag and place may have other names."""
        if isinstance(mine, tuple) and mine[0] == DATA:
            return (
                len(mine) == len(its)
                and (mine[0], mine[3]) == (its[0], its[3])
                and self._bound(("tag", mine[1]), ("tag", its[1]))
                and self._bound(mine[2], (owner, its[2]))
            )
        return mine == its

    def _bound(self, mine: Any, its: Any) -> bool:
        return self._places.setdefault(("to", mine), its) == its and self._places.setdefault(("of", its), mine) == mine


def follow(run: Run, program: Callable[[Fine], Program], mutant: str = "") -> int:
    """Follows a run in the model; how many steps it has.

    Raises:
        DeviationError: code and model differ.
    """
    shared, start, records = Shared(), (), mailbox.RECORDS
    for writer in range(run.size):
        for reader in range(run.size):
            start = shared.set(start, f"room{writer}{reader}", records if writer != reader else 0)
    ranks = [Fine(rank, run.size, records, mutant) for rank in range(run.size)]
    return Replay([program(rank) for rank in ranks], shared, start).follow(run)
