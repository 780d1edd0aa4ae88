"""The engine's cost in Python calls per unit and step: without a clock, the same each time."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/overhead/calls.py"
spec = importlib.util.spec_from_file_location("calls", SCRIPT)
assert spec is not None and spec.loader is not None
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)


@pytest.mark.parametrize(("case", "most"), [("zero3, 1 rank", 22), ("1f1b", 43), ("zb_h1", 44)])
def test_a_unit_calls_few_functions_in_a_step(case: str, most: int) -> None:
    counted = calls.count(case)
    largest = sorted(counted.items(), key=lambda item: -item[1])[:20]
    assert calls.total(counted) <= most, largest
