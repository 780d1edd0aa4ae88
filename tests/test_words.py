"""The habits of translated English: none in docstrings, comments and messages of src, nor on the pages.

``docs/log.md`` and ``docs/decisions`` are history, and stay as they were written.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "plait"
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "guide").glob("*.md"),
]

OPENINGS = re.compile(r"^(What|Whether|Of|Those|By|How|Who|Which|Where)\b")
HABITS = {
    "a docstring that opens with What, Whether, Of, Those, By, How, Who, Which or Where": OPENINGS,
    "nobody, somebody, whoever": re.compile(r"\b(nobody|somebody|whoever)\b", re.IGNORECASE),
    "of one's own, of the user's": re.compile(r"\bof (one's own|(the|a) user's( own)?)\b(?! [a-z])"),
    "is told": re.compile(r"\b(is|are|was|were) told\b"),
    "alike": re.compile(r"\balike\b"),
    "behind for after": re.compile(r"\bbehind (the|a|its|each|every|it)\b"),
    "another x than for different from": re.compile(r"(?<!any )(?<!no )\b(an)?other (\w+ ){1,2}than\b"),
    "lies, stands for is": re.compile(r"\b(lies|lie|stands) (in|on|at|there|beside|for|where|behind)\b"),
}


def texts(source: str) -> Iterator[tuple[str, str]]:
    """Docstrings (also those below an assignment), comments and messages of a file, each with its kind."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield "docstring" if id(node) in statements else "message", node.value
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (("comment", token.string) for token in tokens if token.type == tokenize.COMMENT)


@cache
def everything() -> tuple[tuple[str, str, str], ...]:
    """Each text of src and of the pages: where it is, its kind, and itself."""
    found = [(f"{file.relative_to(ROOT)}", *one) for file in SOURCE.rglob("*.py") for one in texts(file.read_text())]
    for page in PAGES:
        if page.name != "log.md":
            prose = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
            found += [(f"{page.relative_to(ROOT)}", "page", part) for part in prose.split("\n\n")]
    return tuple(found)


def seen(habit: str, kind: str, text: str) -> list[str]:
    """The places of a text that have the habit."""
    pattern = HABITS[habit]
    if pattern is OPENINGS and kind != "docstring":
        return []
    return [text[max(0, found.start() - 30) : found.end() + 30] for found in pattern.finditer(text)]


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_does_not_come_back(habit: str) -> None:
    found = [f"{where}: {place}" for where, kind, text in everything() for place in seen(habit, kind, text)]
    assert not found, "\n".join(found[:20])


def test_each_habit_is_seen() -> None:
    source = (
        '"""What lies in the middle of nobody."""\n'
        'x = "behind the step, of one\'s own"  # is told, alike, another way than that\n'
        '"""Whether it stands there."""\n'
    )
    counted = {habit: sum(len(seen(habit, *one)) for one in texts(source)) for habit in HABITS}
    assert list(counted.values()) == [2, 1, 1, 1, 1, 1, 1, 2]
