"""A device other than the CPU trains as the CPU does, under rows, pipelines and a user's own loops.

No GPU is needed: the stand-in next to this file refuses what CUDA would refuse (CPU tensors mixed with others).
"""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rows import CASES
from stand_in import build
from verdicts import CASES as VERIFIED

pytestmark = pytest.mark.timeout(1200)  # g++ reads all headers of torch: two minutes on a busy machine
HERE = Path(__file__).parent
WAITS = {"step/reduce.py": 1}
"""Waits of the host in a step, by file: losses, norm and the check of the gradients are read together."""

FUSED = ("fused AdamW", "fused Adam", "fused SGD")
"""On one rank the host does not wait for these: they leave a bad step out on the device."""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("the stand-in is compiled, and there is no g++")
    return build(tmp_path_factory.mktemp("device"))


def lines(script: str, device: Path) -> dict[str, dict[str, Any]]:
    """The output of a script of this folder, by case."""
    ran = subprocess.run([sys.executable, str(HERE / script), str(device)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return {line["case"]: line for line in map(json.loads, ran.stdout.splitlines())}


@pytest.fixture(scope="module")
def found(device: Path) -> dict[str, dict[str, Any]]:
    return lines("rows.py", device)


@pytest.fixture(scope="module")
def one_rank(device: Path) -> dict[str, dict[str, Any]]:
    return lines("one_rank.py", device)


@pytest.fixture(scope="module")
def verdicts(device: Path) -> dict[str, dict[str, Any]]:
    return lines("verdicts.py", device)


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_cpu_does(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["losses"] < 1e-12
    assert found[case]["state"] < 1e-9


def test_no_layer_makes_the_host_wait(found: dict[str, dict[str, Any]]) -> None:
    """Dropout's keys, gathers and sums go on without it, so more layers cost no more waits."""
    few, many = (found[f"{layers} layers"]["waited"] for layers in (2, 5))
    assert few == many == 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_one_rank_has_the_memory_of_plain_torch(one_rank: dict[str, dict[str, Any]], strategy: str) -> None:
    """No buffer for gradients: autograd's own tensors are the sums."""
    ours, right = (one_rank[f"memory, {name}"]["peak"] for name in (strategy, "torch"))
    assert ours <= 1.001 * right


@pytest.mark.parametrize("case", ["plain", "clipped", "3 microbatches", *FUSED])
def test_every_wait_of_a_step_is_known(one_rank: dict[str, dict[str, Any]], case: str) -> None:
    places = one_rank[f"waits, {case}"]["waits"]
    assert Counter(place.partition(":")[0] for place in places) == ({} if case in FUSED else WAITS), places


@pytest.mark.parametrize("case", FUSED)
def test_a_bad_step_changes_nothing_and_is_told_by_the_next(one_rank: dict[str, dict[str, Any]], case: str) -> None:
    found = one_rank[f"late, {case}"]
    ((number, message),) = found["told"]
    assert number == 4 and message.startswith("step 3 (counted from 0) is not finite: the loss of microbatch 0 on rank")
    assert found["apart"] == 0 and found["same"]


def test_a_bad_step_is_told_by_every_look_and_by_one_save(one_rank: dict[str, dict[str, Any]]) -> None:
    assert [len(one_rank[f"looks, {look}"]["told"]) for look in ("loss", "made", "save")] == [2, 2, 1]


def test_a_loop_that_reduces_is_told_at_once_and_its_results_keep_nothing(one_rank: dict[str, dict[str, Any]]) -> None:
    assert one_rank["a loop's reduction"]["found"] == [[3], False]


def test_a_collective_between_two_devices_is_refused(one_rank: dict[str, dict[str, Any]]) -> None:
    assert "bring both to one device first" in one_rank["two devices"]["told"]


@pytest.mark.parametrize("case", VERIFIED)
def test_verify_calls_a_right_layout_right_there(verdicts: dict[str, dict[str, Any]], case: str) -> None:
    assert verdicts[case]["word"] == ("equal" if "tensor" in case else "bitwise"), verdicts[case]["told"]


def test_the_first_wrong_tensor_is_found_there(verdicts: dict[str, dict[str, Any]]) -> None:
    found = verdicts["clipped twice"]
    assert found["word"] == "different" and "first wrong: step 1, the clipped gradient of" in found["told"], found[
        "told"
    ]
