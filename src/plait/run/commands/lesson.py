"""``plait lesson``: the course.

plait lesson list               shows the lessons
plait lesson run 9              runs one: it prints its findings and asserts its claims
plait lesson run 9 --ranks 2    the same on another number of ranks
plait lesson run 9 --world process    its body on ranks that are processes; torchrun -m plait lesson run 9 does so too
plait lesson find 3             runs a file with a fault, its verdict, and the fix
plait lesson check 1            judges your solution of a puzzle, in bytes and elements
plait lesson open 9             writes a page that steps through a lesson, with one column per rank
"""

import os
import sys
import traceback
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from plait.comm import Comm
from plait.comm.environment import launched
from plait.comm.run_threads import run as run_threads
from plait.messages.escape import UnheardError, say
from plait.run.config.machine import MachineConfig
from plait.run.course.lessons import PARTS, find, numbered
from plait.run.job.user_code import load_file, load_name
from plait.run.launch.local import launch
from plait.table.mesh import AXES, Mesh

PUZZLES = "Puzzles: plait lesson check 1"
MOST_PROBLEMS = 12
"""The number of problems of a solution that are shown."""


@dataclass(frozen=True)
class ListLessons:
    """Show the lessons and the faults to find, with their files."""

    def run(self) -> None:
        parts = [("", "", PARTS), ("faults", "Find the fault: plait lesson find 1", {}), ("puzzles", PUZZLES, {})]
        for folder, heading, headings in parts:
            for lesson in numbered(folder):
                if heading := headings.get(lesson.number, heading):
                    say(f"{heading}\n", sys.stdout)
                say(f"{lesson.number:4}  {lesson.title:68} {Path(folder, lesson.path.name)}\n", sys.stdout)
                heading = ""
        say(f"in {numbered()[0].path.parent}; plait lesson run 1, plait lesson open 9\n", sys.stdout)


@dataclass(frozen=True)
class RunLesson:
    """Run a lesson. Exit code 1: a claim of the lesson does not hold here."""

    number: tyro.conf.Positional[int]
    """The lesson, as in plait lesson list."""
    ranks: int | None = None
    """Number of ranks; the lesson's own unless given."""
    world: Literal["thread", "process"] = "thread"
    """Kind of a rank. With process, only the body of the lesson runs, and is compared with threads, to the bit."""

    def run(self, argv: Sequence[str]) -> int:
        lesson = load_file(str(find(self.number).path), "lesson")
        started = os.environ.get("WORLD_SIZE", "") if launched(fix="start one torchrun") else ""
        ranks = int(started) if started and self.ranks is None else self.ranks
        if ranks is not None and ranks not in lesson.RANKS:
            some = ", ".join(map(str, lesson.RANKS))
            raise ValueError(f"lesson {self.number} runs on {some} ranks, not {ranks}: {lesson.WHY}")
        if started or self.world == "process":
            return on_processes(self.number, lesson, ranks, ["-m", "plait", *argv])
        try:
            lesson.main(*(() if ranks is None else (ranks,)))
        except BrokenPipeError as error:
            raise UnheardError("the program that read the standard output has gone: it takes no more") from error
        return 0


def on_processes(number: int, lesson: Any, ranks: int | None, command: Sequence[str]) -> int:
    """Runs the body of a lesson's module on processes, ``ranks`` or those of its mesh, and returns the exit code.
    ``command`` has the words after ``python`` that come here again, now as a rank."""
    if not hasattr(lesson, "body"):
        raise ValueError(f"lesson {number} has no ranks, or starts them itself: plait lesson run {number}")
    mesh = mesh_of(number, lesson.MESH, ranks)
    return launch(MachineConfig(mesh=str(mesh), world="process"), partial(_compare, number, lesson), command)


def mesh_of(number: int, text: str, ranks: int | None) -> Mesh:
    """The mesh of a lesson with another number of ranks on its only axis, or on ``shard`` if it has several."""
    mesh = Mesh.parse(text)
    if ranks is None or ranks == mesh.size:
        return mesh
    sizes = {axis: mesh.axis(axis) for axis in AXES if mesh.axis(axis) > 1}
    axis = next(iter(sizes)) if len(sizes) == 1 else "shard"
    others = mesh.size // sizes[axis]
    if ranks < 1 or ranks % others:
        raise ValueError(f"lesson {number}: {ranks} ranks do not make its mesh {text!r}: give a multiple of {others}")
    return Mesh(**(sizes | {axis: ranks // others}))


def _compare(number: int, lesson: Any, comm: Comm) -> int:
    """Compares this process's result and bytes with those of the same rank as a thread; rank 0 reports for all."""

    def result(comm: Comm) -> tuple[object, int]:
        return lesson.body(comm), comm.ledger.sent

    found, expected = result(comm), run_threads(comm.mesh, result)[comm.rank]
    verdicts = torch.empty(comm.world_size, dtype=torch.int64)
    comm.all_gather(verdicts, torch.tensor([int(same(found, expected))]), AXES).wait()
    wrong = [rank for rank, verdict in enumerate(verdicts.tolist()) if not verdict]
    where = f"lesson {number} on {comm.world_size} processes, {comm.mesh}"
    right = f"each rank has its thread's values, to the bit; rank 0 sent {found[1]:,} bytes"
    say(f"{where}: {f'ranks {wrong} differ from the same ranks as threads' if wrong else right}\n", sys.stdout)
    return int(bool(wrong))


def same(found: Any, expected: Any) -> bool:
    """True if two results are equal, with every tensor equal to the bit."""
    if isinstance(expected, Tensor):
        return isinstance(found, Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@dataclass(frozen=True)
class FindFault:
    """Run a file with a fault: the symptom, the verdict, and the same with the fix. Read the file first."""

    number: tyro.conf.Positional[int]
    """The fault, as in plait lesson list."""

    def run(self) -> None:
        load_file(str(find(self.number, "faults").path), "fault").main()


@dataclass(frozen=True)
class CheckPuzzle:
    """Judge a solution of a puzzle. Exit code 0: solved, 1: not yet, with what is wrong."""

    number: tyro.conf.Positional[int]
    """The puzzle, as in plait lesson list."""
    file: str | None = None
    """A file with your solve; the puzzle's own file unless given."""

    def run(self) -> int:
        puzzle = load_file(str(find(self.number, "puzzles").path), "puzzle")
        solve = puzzle.solve if self.file is None else load_name(f"{self.file}:solve", "solution")
        try:
            problems = puzzle.judge(solve)
        except NotImplementedError:
            problems = [f"solve is still to be written, in {puzzle.__file__}, or a copy of it: --file FILE"]
        except Exception as error:
            problems = _failed(error, self.file or str(puzzle.__file__))
        more = [f"and {len(problems) - MOST_PROBLEMS} more"] * (len(problems) > MOST_PROBLEMS)
        say("".join(f"{line}\n" for line in problems[:MOST_PROBLEMS] + more) or "solved\n", sys.stdout)
        return int(bool(problems))


def _failed(error: Exception, file: str) -> list[str]:
    """The error of a solution, and the lines of its file that led there; those of other ranks are in its text."""
    place = Path(file).resolve()
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == place]
    where = "" if frames else ", when the puzzle used what solve returned"
    text = f"{type(error).__name__}: {error}{where}".splitlines()
    said = [line for line in text if not line.startswith("  ") or place.name in line]
    return said + [f"  line {f.lineno}, in {f.name}: {f.line}" for f in frames]


@dataclass(frozen=True)
class OpenLesson:
    """Write a page that steps through a lesson's ranks, side by side, and open it in the browser."""

    number: tyro.conf.Positional[int]
    """The lesson, as in plait lesson list."""
    out: str | None = None
    """The file to write; lesson-09.html and so on unless given."""
    no_browser: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write the page only."""

    def run(self) -> None:
        from plait.run.commands.trace import write
        from plait.run.course.page import lesson_page

        place = self.out or f"lesson-{self.number:02}.html"
        write(place, partial(lesson_page, find(self.number)))
        if not self.no_browser:
            webbrowser.open(Path(place).resolve().as_uri())


Operation = (
    Annotated[ListLessons, tyro.conf.subcommand("list")]
    | Annotated[RunLesson, tyro.conf.subcommand("run")]
    | Annotated[FindFault, tyro.conf.subcommand("find")]
    | Annotated[CheckPuzzle, tyro.conf.subcommand("check")]
    | Annotated[OpenLesson, tyro.conf.subcommand("open")]
)


def run(config: Operation, argv: Sequence[str]) -> int:
    try:
        return config.run(argv) if isinstance(config, RunLesson) else config.run() or 0
    except ModuleNotFoundError as error:
        raise ValueError(f"lesson {getattr(config, 'number', '')} is skipped: {error}") from None
