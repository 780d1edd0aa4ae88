"""A device that is not the CPU trains as the CPU does, under rows, pipelines and loops of one's own.

No GPU is at hand where this runs: the stand-in beside this file refuses what CUDA would (CPU tensors beside others).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rows import CASES, MICROBATCHES
from stand_in import build

pytestmark = pytest.mark.timeout(1200)  # g++ reads all headers of torch: two minutes on a busy machine
HERE = Path(__file__).parent
BESIDE = 6
"""Waits of a step beside one for each loss: two agreements, the norm, whether gradients are finite."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if shutil.which("g++") is None:
        pytest.skip("the stand-in is compiled, and there is no g++")
    module = build(tmp_path_factory.mktemp("device"))
    command = [sys.executable, str(HERE / "rows.py"), str(module)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return {line["case"]: line for line in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_cpu_does(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["losses"] < 1e-12
    assert found[case]["state"] < 1e-9


def test_no_layer_makes_the_host_wait(found: dict[str, dict[str, Any]]) -> None:
    """Dropout's keys, gathers and sums go on without it, so more layers cost no more waits."""
    few, many = (found[f"{layers} layers"]["waited"] for layers in (2, 5))
    assert few == many <= MICROBATCHES + BESIDE
