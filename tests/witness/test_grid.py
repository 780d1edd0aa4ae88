"""Which size a factor grows with, from what is seen on smaller layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import engine_ranks
import pytest
from loops import run

from plait.referee.witness.grid import cells_up_to, growth, told_factor
from plait.run.commands.main import main
from plait.table.mesh import Mesh


def test_the_layouts_of_a_grid_begin_with_one_rank() -> None:
    shown = [str(cell) for cell in cells_up_to(Mesh.parse("tensor=4"), 2)]
    assert shown == [f"tensor={n}, microbatches={m}" for n, m in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2))]
    assert {cell.mesh for cell in cells_up_to(Mesh.parse("shard=2 tensor=3"), 1)} == {
        *("shard=1", "shard=2", "tensor=2", "tensor=3", "shard=2 tensor=2", "shard=2 tensor=3")
    }
    assert len(cells_up_to(Mesh.parse("shard=6"), 1)) == 4


@pytest.mark.parametrize(
    ("law", "says"),
    [
        (lambda n, m: 1.0, ""),
        (lambda n, m: n, "the factor is 2 where shard=2, 2 where shard=2 microbatches=2, 3 where shard=3, 3"),
        (lambda n, m: n, "it grows as the shard axis"),
        (lambda n, m: m, "it grows as the number of microbatches"),
        (lambda n, m: 1 / n, "it grows as one over the shard axis"),
        (lambda n, m: n * m, "it grows as the shard axis and as the number of microbatches"),
        (lambda n, m: n * n / m, "as the shard axis squared and as one over the number of microbatches"),
        (lambda n, m: 5.0, "the factor is 5 on every layout: it depends on no size"),
        (lambda n, m: 1.0 if n < 3 else 7.0, "it follows no product of the sizes"),
        (lambda n, m: None if n == 2 else 1.0, "different on 2 of 6 layouts, not by a factor: first on shard=2, micro"),
    ],
)
def test_how_a_factor_grows(law: Callable[[int, int], float | None], says: str) -> None:
    cells = cells_up_to(Mesh.parse("shard=3"), 2)
    found = growth(cells, [law(cell.sizes["shard"], cell.sizes["microbatches"]) for cell in cells])
    assert (says in found) if says else not found, found


def test_what_is_wrong_by_a_factor_of_one_is_wrong() -> None:
    assert told_factor(None, equal=True) == 1.0 and told_factor(2.0, equal=False) == 2.0
    assert told_factor(1.0, equal=False) is None and told_factor(None, equal=False) is None


def test_a_wrong_engine_on_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = "verify --model mlp --layers 2 --width 5 --dropout 0 --clip None --steps 1 --mesh shard=2 --grid --engine"
    assert main([*words.split(), f"{engine_ranks.__file__}:summing"]) == 1
    shown = capsys.readouterr().out
    assert "shard=1, microbatches=1" in shown and "shard=2, microbatches=1" in shown, shown
    assert "the factor is 2 where shard=2: it grows as the shard axis" in shown, shown


def test_a_grid_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--grid"]) == 2
    assert "grid without engine" in capsys.readouterr().err
    assert main(["verify", "--grid", "--engine", "ddp", "--json", "-"]) == 2
    assert "json - beside grid" in capsys.readouterr().err


def test_witnessed_runs_of_one_loop_say_how_a_factor_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "jobs.py").write_text("from loops import user_job\njob = user_job()\n")
    folders = []
    for ranks, calls in ((1, 1), (2, 1), (1, 2), (2, 3)):
        folders.append(str(tmp_path / f"{ranks}-{calls}"))
        run(Path(folders[-1]), "not divided", ranks=ranks, calls=calls)
    words = ["--job", f"{tmp_path / 'jobs.py'}:job"]
    assert main(["judge", *folders, *words, "--json", str(tmp_path / "told.json")]) == 1
    law = "the factor is 2 where microbatches=2, 3 where ranks=2 microbatches=3: it grows as the number of microbatches"
    assert law in capsys.readouterr().out
    found = json.loads((tmp_path / "told.json").read_text())
    assert [row["layout"] for row in found["layouts"]][-1] == "ranks=2, microbatches=3" and law in found["growth"]
    assert found["command"].startswith("plait judge ")
    assert main(["judge", *folders[:2], *words]) == 0
    assert "equal on 2 layouts" in capsys.readouterr().out
    assert main(["judge", folders[0], str(tmp_path / "none"), *words]) == 2
