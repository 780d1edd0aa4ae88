"""Shows that a stopped program goes on as if it had not been stopped: any program, by its own save and load.

    uninterrupted     begin ─ step 1 ─ step 2 ─ step 3 ─ step 4 ─ ...             all fields, samples, losses are kept
    interrupted       begin ─ step 1 ─ step 2 ─ save
                      begin ─ load ──────────── step 3 ─ save
                      begin ─ load ───────────────────── step 4 ─ ...             all are compared, to the bit

Before the first update after a load, all fields are compared; then, step by step, the samples, the loss, and all fields
again.  The comparison ends at the first thing that is wrong, because it makes everything after it wrong.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from plait.comm import Comm, ThreadWorld
from plait.comm.texts import broadcast_text, gather_texts
from plait.comm.thread import ThreadComm
from plait.referee.values import gap
from plait.referee.values import same as same_tensor
from plait.referee.verify.program import Field, Fields, fields_of, random_kept, samples_seen
from plait.table.collectives import Note
from plait.table.mesh import Mesh

Program = TypeVar("Program")
SHOWN = 8
"""The largest number of faults that an error shows."""
KINDS = ("loss", "parameter", "buffer", "average", "optimizer", "group", "state", "generator", "random")
"""The order in which faults are reported."""


@dataclass(frozen=True)
class ResumeReport:
    """The values that were compared; all are the same."""

    compared: Mapping[str, int]
    """The number of values, by kind."""

    def __str__(self) -> str:
        return f"the run that was stopped is the run that was not, to the bit\n{_counts(self.compared)}"


def _counts(compared: Mapping[str, int]) -> str:
    return "compared, by kind: " + ", ".join(f"{kind} {count}" for kind, count in compared.items())


def verify_resume(
    begin: Callable[[], Program],
    step: Callable[[Program], Any],
    save: Callable[[Program, Path], Any],
    load: Callable[[Program, Path], Any],
    *,
    state: Callable[[Program], Any] | None = None,
    steps: int = 6,
    at: Sequence[int] = (2, 3),
    comm: Comm | None = None,
) -> ResumeReport:
    """Compares a run that is stopped, saved, loaded and continued with one that is not; for your own tests::

        def test_resume():
            plait.verify_resume(
                begin=Program,                              # a new program: model, optimizer, schedule, data
                step=lambda program: program.step(),        # a step on its next batch; the loss
                save=lambda program, folder: torch.save(program.state_dict(), folder / "program.pt"),
                load=lambda program, folder: program.load_state_dict(torch.load(folder / "program.pt")),
            )

    Args:
        begin: makes a new program, as a new process would: any object that holds everything it trains with.
        step: makes one step on the program's next batch. Returns the loss, or the loss and the identity of the samples
            (a list of their numbers); without it, the inputs of the program's modules are compared.
        save: writes into an empty folder, which all ranks see.
        load: reads from it, into a new program.
        state: returns the values that must go on, as nested dicts of anything that ``program`` knows; None finds them
            among the program's attributes.
        steps: the number of steps of the whole run.
        at: the numbers of steps after which it is stopped, one or several.
        comm: this rank's world, for a program that runs on several ranks. All ranks call it together, each compares its
            own part, and all raise any rank's fault.

    Returns:
        The counts of the compared values.

    Raises:
        AssertionError: they are not the same, to the bit; its first line names the first thing that is wrong.
        ValueError: a stop is not a step of the run, or the program does not repeat itself when it is not stopped.
    """
    if sorted({*at}) != [*at] or not at or not 0 < at[0] <= at[-1] < steps:
        raise ValueError(f"stops after {list(at)} of {steps} steps: give rising numbers from 1 to {steps - 1}")
    threads = isinstance(comm, ThreadComm) and comm.world_size > 1  # they share the process's generators
    world = comm or ThreadWorld(Mesh()).comm(0)
    runs = _Runs(begin, step, state or (lambda program: program), world, not threads)
    with nullcontext(lambda number: None) if threads else random_kept() as seed, _folders(world) as new_folder:
        seed(0)
        runs.uninterrupted(steps)
        seed(0)
        program = begin()
        for made in range(steps):
            if made in at:
                own = new_folder()
                save(program, own)
                runs.compare_state(program, made, f"saving after step {made} has changed the program: ")
                seed(made)
                program = begin()
                runs.before_load = runs.fields(program)
                load(program, own)
                runs.compare_state(program, made, f"after the load of step {made}, ")
            runs.compare_step(program, made, resumed=made >= at[0])
    return ResumeReport(runs.compared)


@contextmanager
def _folders(comm: Comm) -> Iterator[Callable[[], Path]]:
    """Gives a function that makes an empty folder, the same on all ranks; removes the folders at the end."""

    def new() -> Path:
        return Path(broadcast_text(comm, "" if comm.rank else tempfile.mkdtemp(dir=parent), Note("check")))

    with nullcontext("") if comm.rank else tempfile.TemporaryDirectory() as parent:
        yield new
        broadcast_text(comm, "", Note("check"))  # all ranks have read


@dataclass
class _Runs(Generic[Program]):
    """Keeps the uninterrupted run, and compares another one with it."""

    begin: Callable[[], Program]
    step: Callable[[Program], Any]
    shown: Callable[[Program], Any]
    comm: Comm
    shared_random: bool
    states: list[Fields] = field(default_factory=list)
    """The fields before the first step, and after each."""
    losses: list[Fields] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    before_load: Fields = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)

    def fields(self, program: Program) -> Fields:
        return fields_of(self.shown(program), shared_random=self.shared_random)

    def uninterrupted(self, steps: int) -> None:
        """Runs it, and keeps all of it."""
        program = self.begin()
        self.states.append(self.fields(program))
        for _ in range(steps):
            loss, samples = self._step(program)
            self.losses.append(loss)
            self.samples.append(samples)
            self.states.append(self.fields(program))
        shared = [one for one in self.states[0] if one.kind == "random"]
        unused = [one for one in shared if all(same(state[one], self.states[0][one]) for state in self.states)]
        for state in self.states:  # a generator from which no step draws does not matter
            for one in unused:
                del state[one]

    def _step(self, program: Program) -> tuple[Fields, Any]:
        """Returns a step's loss, and the identity of its samples."""
        with samples_seen(self.shown(program)) as seen:
            loss = self.step(program)
        loss, samples = loss if isinstance(loss, tuple) else (loss, seen)
        value = loss.detach().to("cpu", copy=True) if isinstance(loss, Tensor) else loss
        return {Field("loss", "the loss"): value}, samples

    def compare_step(self, program: Program, made: int, *, resumed: bool) -> None:
        """Makes step ``made + 1``, and compares its samples, its loss and the fields after it."""
        loss, samples = self._step(program)
        right = same(samples, self.samples[made])
        self.compared["samples"] += 1
        faults = [] if right else [_about_samples(samples, made, self.samples)]
        if not faults:
            for words in self._differences(loss, self.losses[made], made):
                faults.append(
                    f"{words.replace('the loss', f'the loss of step {made + 1}', 1)}, though state, samples and random "
                    f"numbers before it were the same: it computed with something that is not among them (weights that "
                    f"become active a step later, a mode, a cache)"
                )
        self._judge(faults, resumed=resumed)
        self.compare_state(program, made + 1, f"after step {made + 1}, ", resumed=resumed)

    def compare_state(self, program: Program, made: int, when: str, *, resumed: bool = True) -> None:
        """Compares all fields, to the bit."""
        differences = self._differences(self.fields(program), self.states[made], made)
        self._judge([f"{when}{words}" for words in differences], resumed=resumed)

    def _differences(self, ours: Fields, theirs: Fields, made: int) -> list[str]:
        """Describes the differences in words."""
        faults = []
        asked = [one for one in theirs | ours if one in theirs or one.kind != "random"]
        for one in sorted(asked, key=lambda one: KINDS.index(one.kind)):
            self.compared[one.kind] += 1
            if one not in ours or one not in theirs or not same(ours[one], theirs[one]):
                faults.append(f"{one.words} {self._about(one, ours, theirs, made)}")
        return faults

    def _about(self, one: Field, ours: Fields, theirs: Fields, made: int) -> str:
        """Describes how a field differs."""
        if one not in ours:
            return "is not there: it is fresh" if one.kind == "optimizer" else "is not there, and was"
        if one not in theirs:
            return "is there, and was not"
        mine, was = ours[one], theirs[one]
        unloaded = same(mine, self.before_load.get(one))
        moments = [n for n, state in enumerate(self.states) if n != made and same(state.get(one), mine)]
        hint = " (as it was before the load)" if unloaded else ""
        if not hint and len(moments) == 1 and moments[0]:
            hint = f" (as it is after step {moments[0]})"
        if one.kind in ("random", "generator"):
            return f"is another{hint}"
        if not isinstance(mine, Tensor) or not isinstance(was, Tensor):
            return f"is {_shortened(mine)} and was {_shortened(was)}{hint}"
        if (mine.shape, mine.dtype) != (was.shape, was.dtype):
            return f"is {tuple(mine.shape)} {mine.dtype} and was {tuple(was.shape)} {was.dtype}"
        if not mine.dim():
            return f"is {mine.item()} and was {was.item()}{hint}"
        if not mine.any():
            return f"is fresh: all zeros{hint}"
        return f"differs by up to {gap(mine, was):.3g}{hint}"

    def _judge(self, faults: list[str], *, resumed: bool) -> None:
        """Raises AssertionError on all ranks if any has found a fault; ValueError before the first stop."""
        told = gather_texts(self.comm, "\n".join(faults), Note("check"))
        if len({*told}) == 1:  # all ranks found the same
            found = faults
        else:
            found = [f"rank {rank}: {line}" for rank, text in enumerate(told) for line in text.splitlines()]
        if found and not resumed:
            raise ValueError(
                f"the program is not the same run twice, though it was not stopped: {found[0]}; let begin seed all "
                f"that it draws from, and take nothing from the run before"
            )
        if found:
            more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
            raise AssertionError("\n".join([*found[:SHOWN], *more, _counts(self.compared)]))


def same(ours: Any, theirs: Any) -> bool:
    """True if two values have the same bits and the same type."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return same_tensor(ours, theirs)
    if isinstance(ours, Tensor) or isinstance(theirs, Tensor) or type(ours) is not type(theirs):
        return False
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs) or (ours != ours and theirs != theirs)


def _about_samples(samples: Any, made: int, known: Sequence[Any]) -> str:
    """Names the samples on which a step has trained instead of its own."""
    step = f"step {made + 1}"
    for place, others in enumerate(known):
        if same(samples, others):
            if place < made:
                return f"{step} trained on the samples of step {place + 1} again"
            return f"{step} trained on the samples of step {place + 1}: its own were skipped"
    here = f" ({_shortened(samples)} and not {_shortened(known[made])})" if isinstance(samples, list | tuple) else ""
    return f"{step} trained on samples of no step of the uninterrupted run{here}"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
