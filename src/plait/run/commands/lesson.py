"""``plait lesson``: the course.

plait lesson list               shows the lessons
plait lesson run 9              runs one: it prints what it finds and asserts what it claims
plait lesson run 9 --ranks 2    the same on another number of ranks
plait lesson find 3             runs a file with a fault, its verdict, and the fix
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from plait.messages.escape import say
from plait.run.course.lessons import find, numbered
from plait.run.job.user_code import load_file


@dataclass(frozen=True)
class ListLessons:
    """Show the lessons and the faults to find, with their files."""

    def run(self) -> None:
        for lesson in numbered():
            say(f"{lesson.number:3}  {lesson.title:58} {lesson.path.name}\n", sys.stdout)
        for fault in numbered("faults"):
            say(f"{fault.number:3}  find the fault: {fault.title:42} faults/{fault.path.name}\n", sys.stdout)
        say(f"in {numbered()[0].path.parent}; plait lesson run 1, plait lesson find 1\n", sys.stdout)


@dataclass(frozen=True)
class RunLesson:
    """Run a lesson. Exit code 1: a claim of the lesson does not hold here."""

    number: tyro.conf.Positional[int]
    """The lesson, as in plait lesson list."""
    ranks: int | None = None
    """How many ranks it uses, where that is not the lesson's own number."""

    def run(self) -> None:
        lesson = find(self.number)
        module = load_file(str(lesson.path), "lesson")
        module.main(*(() if self.ranks is None else (self.ranks,)))


@dataclass(frozen=True)
class FindFault:
    """Run a file with a fault: the symptom, the verdict, and the same with the fix. Read the file first."""

    number: tyro.conf.Positional[int]
    """The fault, as in plait lesson list."""

    def run(self) -> None:
        load_file(str(find(self.number, "faults").path), "fault").main()


@dataclass(frozen=True)
class LessonCommand:
    """Learn by running: a course of lessons, each a file that asserts what it says."""

    what: Annotated[
        Annotated[ListLessons, tyro.conf.subcommand("list")]
        | Annotated[RunLesson, tyro.conf.subcommand("run")]
        | Annotated[FindFault, tyro.conf.subcommand("find")],
        tyro.conf.arg(name=""),
    ]
    """The operation."""


def run(config: LessonCommand, argv: Sequence[str]) -> int:
    """Runs the operation and returns the exit code."""
    config.what.run()
    return 0
