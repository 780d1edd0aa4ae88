"""The habits of translated English, counted in docstrings and comments of src, so that they do not come back.

``MOST`` has how often each habit still occurs.  A change may only lower a number; at 0 the habit is gone.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "plait"

OPENINGS = re.compile(r"^(What|Whether|Of|Those|By|How)\b")
HABITS: dict[str, tuple[re.Pattern[str], int]] = {
    "a docstring that opens with What, Whether, Of, Those, By or How": (OPENINGS, 137),
    "nobody, somebody, whoever": (re.compile(r"\b(nobody|somebody|whoever)\b", re.IGNORECASE), 14),
    "of one's own, of the user's": (re.compile(r"\bof (one's own|the user's)\b"), 6),
    "is told": (re.compile(r"\b(is|are|was|were) told\b"), 5),
    "alike": (re.compile(r"\balike\b"), 4),
    "behind for after": (re.compile(r"\bbehind (the|a|its|each|every|it)\b"), 15),
    "lies, stands for is": (re.compile(r"\b(lies|lie|stands) (in|on|at|there|beside|for|where|behind)\b"), 10),
}


@cache
def texts(source: str) -> tuple[tuple[str, str], ...]:
    """Docstrings, also those below an assignment, and comments, each with its kind."""
    return tuple(_texts(source))


def _texts(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield "docstring", node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "comment", token.string


def count(habit: str, source: str) -> int:
    """The number of times that a source has a habit."""
    pattern = HABITS[habit][0]
    if pattern is OPENINGS:
        return sum(kind == "docstring" and bool(pattern.search(text)) for kind, text in texts(source))
    return sum(len(pattern.findall(text)) for _, text in texts(source))


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_does_not_come_back(habit: str) -> None:
    found = {file.relative_to(SOURCE).as_posix(): count(habit, file.read_text()) for file in SOURCE.rglob("*.py")}
    worst = sorted(((n, name) for name, n in found.items() if n), reverse=True)[:20]
    most = HABITS[habit][1]
    assert sum(found.values()) <= most, f"{habit}: {sum(found.values())} times, more than {most}; most in {worst}"


def test_each_habit_is_seen() -> None:
    source = (
        '"""What lies in the middle of nobody."""\n'
        "x = 1  # is told behind the step, alike, of one's own\n"
        '"""Whether it stands there."""\n'
    )
    counted = {habit: count(habit, source) for habit in HABITS}
    assert (
        min(counted.values()) >= 1 and counted["a docstring that opens with What, Whether, Of, Those, By or How"] == 2
    )
