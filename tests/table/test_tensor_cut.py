"""Tensor plans as text, and the cuts that they make."""

import re
from itertools import chain
from typing import Any

import pytest

from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import KINDS, Style, match_styles


def rows_of(cut: TensorCut, index: int) -> list[int]:
    return list(chain.from_iterable(range(start, stop) for start, stop in cut.ranges(index)))


CUTS = {
    "one part is one run of rows": (TensorCut((8, 4), 0, 2, (8,)), ["0:4", "4:8"]),
    "a row cut cuts the second dim": (TensorCut((3, 5), 1, 3, (5,)), ["0:2", "2:4", "4:5"]),
    "a bias has one dim": (TensorCut((5,), 0, 2, (5,)), ["0:3", "3:5"]),
    "five rows over four ranks": (TensorCut((5, 7), 0, 4, (5,)), ["0:2", "2:4", "4:5", "5:5"]),
    "one rank holds everything": (TensorCut((5, 7), 0, 1, (2, 3)), ["0:2 2:5"]),
    "each part by itself": (TensorCut((16, 4), 0, 2, (8, 4, 4), 2), ["0:4 8:10 12:14", "4:8 10:12 14:16"]),
    "parts without a grain": (TensorCut((8, 1), 0, 3, (5, 3)), ["0:2 5:6", "2:4 6:7", "4:5 7:8"]),
    "nothing to cut": (TensorCut((0, 2), 0, 2, (0,)), ["0:0", "0:0"]),
    "a grain keeps heads whole": (TensorCut((12, 2), 0, 2, (12,), 3), ["0:6", "6:12"]),
}


@pytest.mark.parametrize("name", CUTS)
def test_as_drawn(name: str) -> None:
    cut, drawn = CUTS[name]
    assert [" ".join(f"{a}:{b}" for a, b in cut.ranges(i)) for i in range(len(drawn))] == drawn
    for i in range(len(drawn)):
        shape = list(cut.shape)
        shape[cut.dim] = len(rows_of(cut, i))
        assert cut.local_shape(i) == tuple(shape)


SHARED = (
    "cannot be shared by tensor={} ranks, and a head cannot be parted: use {}, or make the number of heads a multiple"
)


@pytest.mark.parametrize(
    ("parts", "grain", "ways", "rows", "message"),
    [
        ((8, 2), 1, 2, 12, "the parts 8|2 add up to 10, not to 12"),
        ((12,), 5, 2, 12, "a part of 12 is no multiple of 5, the size of a head"),
        ((32,), 16, 4, 32, f"2 heads of 16 {SHARED.format(4, 'tensor=2')} of 4"),
        ((12,), 2, 4, 12, f"6 heads of 2 {SHARED.format(4, 'tensor=2 or 3 or 6')} of 4"),
        ((8, 4, 4), 2, 4, 16, f"2 heads of 2 {SHARED.format(4, 'tensor=2')} of 4"),
        ((7,), 7, 2, 7, f"1 heads of 7 {SHARED.format(2, 'no tensor axis')} of 2"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers_and_the_fix(
    parts: tuple[int, ...], grain: int, ways: int, rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorCut((rows, 3), 0, ways, parts, grain)


MODULES = ["", "embed", "blocks", *(f"blocks.{i}{m}" for i in range(11) for m in ("", ".up", ".down", ".norm")), "head"]
PARAMETERS = ["embed.weight", *(f"{m}.weight" for m in MODULES if m.endswith(("up", "down", "norm"))), "scale"]


def says(text: str) -> str:
    return re.escape(text)


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("column", Style("column")),
        ("  column  ", Style("column")),
        ("column by 16", Style("column", (), 16)),
        ("column 8|2|2 by 16", Style("column", (8, 2, 2), 16)),
        ("column 5|3", Style("column", (5, 3))),
        ("row by 8", Style("row", (), 8)),
        ("gathered", Style("gathered")),
    ],
)
def test_a_style_is_read(text: str, style: Style) -> None:
    assert Style.parse(text) == style


@pytest.mark.parametrize(
    "text", [*KINDS, "column by 16", "column 8|2|2 by 16", "column 5|3", "row by 8", "column in 2"]
)
def test_what_is_written_is_read_back(text: str) -> None:
    assert str(Style.parse(text)) == text


WITHOUT_SIZES = [kind for kind in KINDS if KINDS[kind].cut_dim is None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "cannot read the style|unknown style") for text in ("", "column by", "column by x", "Column")),
        *((text, "cannot read the style|unknown style") for text in ("column by 4 8|2", "column, row", "by 4")),
        ("colum", f"unknown style 'colum'.*did you mean column.*{', '.join(KINDS)}"),
        ("rows", f"unknown style 'rows'.*did you mean row.*{', '.join(KINDS)}"),
        ("vocab", "unknown style 'vocab'.*vocabulary"),
        *((f"{kind} {n}", "so only they have sizes") for kind in WITHOUT_SIZES for n in ("by 4", "8|2", "8|2 by 4")),
        *((f"{kind} 8|2 by 4", "only column has parts") for kind in ("row", "gathered", "vocabulary")),
        *((f"{text} in 2", "'in' is for column and row") for text in ("column by 4", "column 8|2", "gathered")),
    ],
)
def test_text_that_is_no_style_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Style.parse(text)


@pytest.mark.parametrize("plan", [[("head", "gathered")], "head", {3: "gathered"}, {"head": None}, {"head": 2}])
def test_what_is_no_mapping_of_texts_is_refused(plan: Any) -> None:
    with pytest.raises(TypeError, match=r"it maps names of modules to styles|in a tensor plan: write a text"):
        match_styles(plan, MODULES, PARAMETERS)


UP = {f"blocks.{i}.up": Style("column") for i in range(11)}


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ({}, {}),
        ({"blocks.*.up": "column", "head": Style("vocabulary")}, {**UP, "head": Style("vocabulary")}),
        ({"blocks.*.down.weight": "row"}, {f"blocks.{i}.down": Style("row") for i in range(11)}),
        ({"blocks.1.up": "column"}, {"blocks.1.up": Style("column")}),
        ({"blocks.0.up": "column", "blocks.*.up": "column"}, UP),  # named twice with one style
        ({"scale": "column"}, {"scale": Style("column")}),  # a parameter that is no weight or bias
    ],
    ids=["nothing", "a pattern", "parameters", "one layer", "twice", "itself"],
)
def test_a_plan_names_modules(plan: dict[str, str], found: dict[str, Style]) -> None:
    assert match_styles(plan, MODULES, PARAMETERS) == found


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("blocks.*.upp", "blocks.*.up"),
        ("layers.*.down", "blocks.*.down"),
        ("blocks.3.u", "blocks.*.up"),
        ("hea", "head"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=says(f"names {pattern!r}, which no module or parameter")) as raised:
        match_styles({pattern: "column"}, MODULES, PARAMETERS)
    listed = str(raised.value).split("the nearest names are ")[1].split(", ")
    assert nearest in listed and len(listed) <= 3, "layers count once"


def test_a_pattern_like_nothing_says_so() -> None:
    with pytest.raises(ValueError, match="the nearest names are none"):
        match_styles({"zzz": "column"}, MODULES, PARAMETERS)


def test_a_module_with_two_styles_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match=says("shards 'blocks.1.up' twice")) as raised:
        match_styles({"blocks.*.up": "column by 4", "blocks.1.*": "row"}, MODULES, PARAMETERS)
    assert "'blocks.*.up' says 'column by 4', 'blocks.1.*' says 'row'; keep one" in str(raised.value)
