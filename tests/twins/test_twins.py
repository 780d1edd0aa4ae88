"""This tree against a frozen plait, cell by cell; skipped where PLAIT_TWIN names no python of one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
from signed import SIGNED
from twin_cells import cells, digest_of


@pytest.mark.parametrize("which", ["quick", "full"])
@pytest.mark.timeout(3600)
def test_every_cell_is_that_of_the_frozen_plait(which: str, tmp_path: Path, capsys: Any) -> None:
    python = compare.twin()
    if python is None:
        pytest.skip("PLAIT_TWIN names no python of a frozen plait")
    some = compare.chosen(which)
    old = compare.frozen(python, some)
    compare.run(sys.executable, some, tmp_path)
    differ, _ = compare.report(some, old, tmp_path)
    assert not differ, capsys.readouterr().out


@pytest.mark.parametrize("which", ["quick", "full"])
def test_cells_have_names_of_their_own(which: str) -> None:
    found = cells(which)
    assert len({cell["name"] for cell in found}) == len({digest_of(cell) for cell in found}) == len(found)


@pytest.mark.parametrize("of, what, reason", SIGNED)
def test_a_signed_difference_has_a_reason(of: str, what: str, reason: str) -> None:
    assert re.compile(of) and re.compile(what) and reason


def result(**changes: Any) -> dict[str, Any]:
    """The notes of one rank."""
    notes = {"tensors": {"w": torch.ones(3)}, "values": '{"loss": 1.5}', "ledger": '{"step": [["a", 1], ["b", 2]]}'}
    return {"ranks": [notes | changes]}


def error(**changes: Any) -> dict[str, Any]:
    told = {"type": "ValueError", "names": ["w"], "numbers": ["3"], "text": "'w' has 3", "where": "", "own": False}
    return {"error": compare.json.dumps(told | changes)}


def wrong() -> Iterator[tuple[str, Any, Any, str]]:
    bit = torch.tensor([1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)), 1.0])
    yield "a bit", result(), result(tensors={"w": bit}), "rank 0 tensor w: 1 of 3 elements, first 1: 1.0 -> 1.0000001"
    yield "a dtype", result(), result(tensors={"w": torch.ones(3).half()}), "float32 [3] -> torch.float16 [3]"
    yield "a tensor", result(), result(tensors={}), "tensor w: only the frozen side"
    yield "a zero's sign", result(tensors={"w": -torch.zeros(1)}), result(tensors={"w": torch.zeros(1)}), "-0.0 -> 0.0"
    yield "a value", result(), result(values='{"loss": 1.6}'), "rank 0 loss: 1.5 -> 1.6"
    yield "a message", result(), result(ledger='{"step": [["a", 1]]}'), "ledger step -1 b 2"
    yield "an order", result(), result(ledger='{"step": [["b", 2], ["a", 1]]}'), "ledger step order, line 0: a 1 -> b 2"
    yield "an error", result(), error(), "only the new side raises ValueError"
    yield "no error", error(), result(), "only the frozen side raises ValueError"
    yield "a type", error(), error(type="KeyError"), "error type: ValueError -> KeyError"
    yield "a culprit", error(), error(names=[], text="it has 3"), "error names: w are gone"
    yield "a number", error(), error(numbers=[], text="'w'"), "error numbers: 3 are gone"
    yield "a fault", error(own=True), error(own=True), "fault of the twins themselves"
    yield "nothing", result(), None, "no result from the new side"


@pytest.mark.parametrize("old, new, words", [pytest.param(*case[1:], id=case[0]) for case in wrong()])
def test_a_difference_is_named(old: Any, new: Any, words: str) -> None:
    (found,) = compare.differences(old, new, ledger=True)
    assert words in found


def test_twins_that_are_the_same_have_no_difference() -> None:
    assert not [*compare.differences(result(), result(), ledger=True)]
    assert not [*compare.differences(error(), error(text="of 'w' there are 3, and 4 of 'x'"), ledger=True)]
