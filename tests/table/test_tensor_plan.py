"""A tensor plan as text: styles are read, patterns are matched, and every mistake is named with its fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from plait.table.tensor_plan import KINDS, Style, match_styles

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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_and_written(kind: str) -> None:
    assert str(Style.parse(kind)) == kind


@pytest.mark.parametrize(
    "text",
    ["column", "column by 16", "column 8|2|2 by 16", "column 5|3", "row by 8", "column in 2", "experts 2", "shared 64"],
)
def test_what_is_written_is_read_back(text: str) -> None:
    assert str(Style.parse(text)) == text


@pytest.mark.parametrize("text", ["", "column by", "column by x", "Column", "column by 4 8|2", "column, row", "by 4"])
def test_text_that_is_no_style_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read the style|unknown style"):
        Style.parse(text)


@pytest.mark.parametrize("plan", [[("head", "gathered")], "head", {3: "gathered"}, {"head": None}, {"head": 2}])
def test_what_is_no_mapping_of_texts_is_refused(plan: Any) -> None:
    with pytest.raises(TypeError, match=r"it maps names of modules to styles|in a tensor plan: write a text"):
        match_styles(plan, MODULES, PARAMETERS)


@pytest.mark.parametrize(
    ("text", "hint"), [("colum", "did you mean column"), ("rows", "did you mean row"), ("vocab", "vocabulary")]
)
def test_an_unknown_style_names_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=says(f"unknown style {text!r}")) as raised:
        Style.parse(text)
    assert hint in str(raised.value) and ", ".join(KINDS) in str(raised.value)


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k].cut_dim is None])
@pytest.mark.parametrize("sizes", ["by 4", "8|2", "8|2 by 4"])
def test_sizes_for_a_style_that_cuts_nothing_are_refused(kind: str, sizes: str) -> None:
    with pytest.raises(ValueError, match="so only they have sizes"):
        Style.parse(f"{kind} {sizes}")


@pytest.mark.parametrize("kind", ["row", "gathered", "vocabulary"])
def test_parts_are_for_column_alone(kind: str) -> None:
    with pytest.raises(ValueError, match="only column has parts"):
        Style.parse(f"{kind} 8|2 by 4")


@pytest.mark.parametrize("text", ["column by 4 in 2", "column 8|2 in 2", "gathered in 2"])
def test_in_goes_with_no_other_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="'in' is for column and row"):
        Style.parse(text)


def test_a_parameter_that_is_no_weight_or_bias_stands_for_itself() -> None:
    found = match_styles({"attention.sinks": "column"}, ["attention"], ["attention.sinks"])
    assert found == {"attention.sinks": Style("column")}


def test_a_pattern_names_modules_of_all_layers() -> None:
    found = match_styles({"blocks.*.up": "column", "head": Style("vocabulary")}, MODULES, PARAMETERS)
    assert found == {**{f"blocks.{i}.up": Style("column") for i in range(11)}, "head": Style("vocabulary")}


def test_a_pattern_of_parameters_stands_for_their_modules() -> None:
    found = match_styles({"blocks.*.down.weight": "row"}, MODULES, PARAMETERS)
    assert found == {f"blocks.{i}.down": Style("row") for i in range(11)}


def test_one_layer_alone_can_be_named() -> None:
    assert match_styles({"blocks.1.up": "column"}, MODULES, PARAMETERS) == {"blocks.1.up": Style("column")}


def test_an_empty_plan_names_nothing() -> None:
    assert match_styles({}, MODULES, PARAMETERS) == {}


def test_a_module_named_twice_with_one_style_is_fine() -> None:
    found = match_styles({"blocks.0.up": "column", "blocks.*.up": "column"}, [*MODULES[:11], "head"], PARAMETERS)
    assert found == {"blocks.0.up": Style("column"), "blocks.1.up": Style("column")}


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
