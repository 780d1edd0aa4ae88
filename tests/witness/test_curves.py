"""Would the curve have told?  What docs/silent-bugs.md says of loss curves is measured again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import curve_ranks
import pytest
from ports import free_port, spawn
from silent_bugs import BUGS, RIGHT

PAGE = Path(__file__).parents[2] / "docs/silent-bugs.md"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Each engine's curve and those of one process, by a world of two processes."""
    path = tmp_path_factory.mktemp("curves")
    spawn(curve_ranks.rank_main, 2, 2, free_port(), str(path))
    curves: dict[str, Any] = json.loads((path / "found.json").read_text())
    return curves


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(one, other, strict=True))


def rows() -> list[list[str]]:
    """The cells of the page's table, a row for each bug in their order."""
    table = PAGE.read_text().split("| thread | told |")[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_right_engines_have_the_curve_of_one_process(found: Mapping[str, Any]) -> None:
    for bug in RIGHT:
        said = found[bug.adapter.__name__]
        assert apart(said["curve"], said["seeds"][0]) < 5e-4, bug.adapter.__name__


def test_the_column_is_what_is_seen(found: Mapping[str, Any]) -> None:
    for row, bug in zip(rows(), BUGS, strict=True):
        said = found[bug.adapter.__name__]
        seen, told = 100 * apart(said["curve"], said["seeds"][0]), float(row[-1].removesuffix("%"))
        assert seen == pytest.approx(told, rel=0.1, abs=0.1), (bug.adapter.__name__, seen, told)


def test_the_spread_of_seeds_is_what_is_seen(found: Mapping[str, Any]) -> None:
    spread = {name: [100 * apart(seed, said["seeds"][0]) for seed in said["seeds"][1:]] for name, said in found.items()}
    text = [value for bug in BUGS if not bug.mesh.startswith("pipe") for value in spread[bug.adapter.__name__]]
    pipes = [value for bug in BUGS if bug.mesh.startswith("pipe") for value in spread[bug.adapter.__name__]]
    told = f"by {min(text):.0f} to {max(text):.0f} % at some step (pipelines: {min(pipes):.0f} to {max(pipes):.0f} %)"
    assert told in PAGE.read_text(), told


def test_the_counts_of_the_page(found: Mapping[str, Any]) -> None:
    curves = [found[bug.adapter.__name__] for bug in BUGS]
    seen = [apart(said["curve"], said["seeds"][0]) for said in curves]
    outside = [
        s > max(apart(seed, c["seeds"][0]) for seed in c["seeds"][1:]) for s, c in zip(seen, curves, strict=True)
    ]
    assert (sum(outside), sum(s > 0.05 for s in seen), sum(s < 0.001 for s in seen)) == (2, 8, 9)
