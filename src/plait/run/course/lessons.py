"""Finds the lessons: next to the package ``plait_lessons`` in the repository, in its folder ``course`` when installed.

01_one_process.py      its docstring begins "Lesson 1: one process."; ``main(ranks)`` runs it
"""

import ast
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

NUMBERED = re.compile(r"(\d\d)_\w+\.py")

PARTS = {
    1: "One process, then several",
    5: "Messages",
    9: "Data parallel, and what it need not keep",
    15: "Inside a layer",
    17: "Across layers and processes",
    19: "All of it together",
}
"""The parts of the path, by their first lesson."""


@dataclass(frozen=True)
class Lesson:
    """One numbered file of the course."""

    number: int
    path: Path

    @property
    def text(self) -> str:
        return ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""

    @property
    def title(self) -> str:
        """The first line of the docstring, without the number."""
        return self.text.splitlines()[0].partition(": ")[2].rstrip(".")


def folder() -> Path:
    package = Path(str(files("plait_lessons")))
    return package / "course" if (package / "course").is_dir() else package.parent


def numbered(part: str = "") -> tuple[Lesson, ...]:
    """The numbered files of the course, or of one of its folders, in order."""
    files = sorted((folder() / part).glob("*.py"))
    return tuple(Lesson(int(match[1]), path) for path in files if (match := NUMBERED.fullmatch(path.name)))


def find(number: int, part: str = "") -> Lesson:
    """One numbered file.  ValueError if there is none with this number."""
    found = {lesson.number: lesson for lesson in numbered(part)}
    if number not in found:
        kind = part.rstrip("s") or "lesson"
        raise ValueError(f"there is no {kind} {number}: they are {', '.join(map(str, found))}; see plait lesson list")
    return found[number]
