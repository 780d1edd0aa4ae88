"""The page of the systems names lessons, commands and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from plait.run.commands.main import COMMANDS
from plait.run.course.lessons import numbered

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| .+ \| (\d+) \| `plait (\w+)([^`]*)` \| `([^`]+)` \|$", re.MULTILINE)


def test_every_system_has_a_lesson_a_command_and_a_test_that_exist() -> None:
    rows = ROW.findall((ROOT / "docs" / "mission.md").read_text(encoding="utf-8"))
    lessons = {lesson.number for lesson in numbered()}
    assert [int(number) for number, *_ in rows] == list(range(1, 33))
    for number, lesson, command, words, test in rows:
        assert int(lesson) in lessons and command in COMMANDS and (ROOT / test).is_file(), number
        if run := re.search(r"run (\d+)", words):
            assert int(run[1]) in lessons, number


def test_every_lesson_serves_a_system() -> None:
    page = (ROOT / "docs" / "mission.md").read_text(encoding="utf-8")
    named = {int(lesson) for _, lesson, *_ in ROW.findall(page)} | {int(n) for n in re.findall(r"run (\d+)", page)}
    assert {lesson.number for lesson in numbered()} - named == {13, 20, 21}, "the table itself, and all of it together"
