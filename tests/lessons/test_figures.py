"""Figures agree with the table, a run and the schedules, and each is a picture that a page can hold."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

from figures import PIECES, carried, collective, figures, flat_unit, kept, mesh_for, nested, row, sent

from plait.sharded.layout import Layout, region
from plait.table.cells import TABLE

PAGES = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", figures())
def test_each_is_a_picture_with_a_name_and_is_on_the_page(name: str) -> None:
    root = ET.fromstring(figures()[name]())
    assert root.get("role") == "img" and root.get("viewBox") and root.findtext(f"{SVG}title")
    pages = (PAGES / "guide" / "pictures.md").read_text() + (PAGES / "index.md").read_text()
    assert f"{{drawn}} {name}\n" in pages


OWN = [[(r, i) for i in range(4)] for r in range(4)]
SUMS = [[(r, i) for r in range(4)] for i in range(4)]


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("broadcast", [[[(0, i)] for i in range(4)]] * 4),
        ("scatter", [[[(0, r)]] for r in range(4)]),
        ("gather", [[[(r, 0)] for r in range(4)], [[(1, 0)]], [[(2, 0)]], [[(3, 0)]]]),
        ("all_gather", [[[(r, 0)] for r in range(4)]] * 4),
        ("reduce", [SUMS, *([[one] for one in OWN[r]] for r in (1, 2, 3))]),
        ("all_reduce", [SUMS] * 4),
        ("reduce_scatter", [[SUMS[r]] for r in range(4)]),
        ("all_to_all", [[[(s, r)] for s in range(4)] for r in range(4)]),
    ],
)
def test_a_collective_is_drawn_as_it_ran(kind: str, after: list[list[list[tuple[int, int]]]]) -> None:
    assert [found for _, found in carried(kind)] == after
    strips = len([part for rank in carried(kind) for cells in rank for cell in cells for part in cell])
    assert sum(collective(kind).count(f'fill="{colour}"') for colour in PIECES) == strips


@pytest.mark.parametrize("name", TABLE)
def test_a_row_shows_the_pieces_of_the_table(name: str) -> None:
    mesh, strategy = mesh_for(name), TABLE[name]
    for cell in (strategy.params, strategy.kept, strategy.grads, strategy.optim):
        for rank in range(4):
            start, stop = region(Layout((cell.split,)), (4,), mesh, rank)[0]
            assert kept(cell, mesh, rank) == range(start, stop)
    assert all(line in row(name) for line in sent(name))


def test_messages_of_rows() -> None:
    assert sent("ddp") == ["at the step: all_reduce over shard"]
    assert sent("zero3") == [
        "forward: all_gather over shard",
        "backward: all_gather over shard",
        "after each microbatch: reduce_scatter over shard",
    ]
    assert "at the step: all_reduce over replica" in sent("hsdp")


def test_a_unit_is_cut_without_a_gap_and_a_mesh_has_every_rank_once() -> None:
    assert re.findall(r"weight\[\d+:\d+\]|bias\[\d+:\d+\]", flat_unit()) == [
        "weight[0:32]",
        "weight[32:64]",
        "weight[64:91]",
        "bias[0:7]",
    ]
    drawn = nested("pipe=2 replica=2 shard=2")
    assert re.findall(r'text-anchor="middle"[^>]*>(\d+)<', drawn) == list("01234567")
    assert drawn.count("pipe 1") == 1 and drawn.count("replica 1") == 2 and drawn.count("shard 1") == 4
