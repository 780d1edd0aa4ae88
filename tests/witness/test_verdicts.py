"""Other engines on gpt, llama and a ResNet: docs/guide/judge-any-engine.md has the verdicts of these tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the ResNet is transformers'")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")

import engine_worlds

PAGE = Path(__file__).parents[2] / "docs/guide/judge-any-engine.md"
JOBS = Path(__file__).with_name("resnet_jobs.py")
TEXT = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "length": 6}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", **TEXT},
    "llama": {"model": "llama", **TEXT},
    "ResNet, BatchNorm": {"job": f"{JOBS}:with_batch_norm"},
    "ResNet, frozen": {"job": f"{JOBS}:with_frozen"},
    "ResNet, GroupNorm": {"job": f"{JOBS}:with_groups"},
}
EXAMPLES = Path(__file__).parents[2] / "examples/engines.py"
OTHERS = ("zero_redundancy", "accelerate", "trainer", "dtensor")
ENGINES = {"ddp": "ddp", "fsdp2": "fsdp2", **{name: f"{EXAMPLES}:{name}" for name in OTHERS}}
BY_HAND, NO_SUM = f"{JOBS}:by_hand", f"{JOBS}:no_sum"

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{engine}, {name}, {ranks} ranks": {
            "engine": ENGINES[engine], "mesh": f"{'tensor' if engine == 'dtensor' else 'shard'}={ranks}", **model
        }
        for engine in ENGINES
        for name, model in MODELS.items()
        for ranks in ((2, 3) if engine == "ddp" else (2,))
        if engine != "dtensor" or name in ("gpt", "llama")
    },
    "synchronised": {
        "engine": BY_HAND, "mesh": "shard=2", "job": f"{JOBS}:synchronised", "microbatches": 1, "clip": None
    },
    "synchronised, in parts": {"engine": BY_HAND, "mesh": "shard=2", "job": f"{JOBS}:synchronised", "clip": None},
    "nothing sent": {"engine": NO_SUM, "mesh": "shard=2", "job": f"{JOBS}:with_batch_norm", "clip": None},
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return engine_worlds.outcomes(CASES, tmp_path_factory.mktemp("verdicts"))


def test_the_table_of_the_guide_is_what_is_seen(found: Mapping[str, Any]) -> None:
    lines = [f"| | {' | '.join(MODELS)} |", "|---|" + "---|" * len(MODELS)]
    for engine in ENGINES:
        cells = []
        for model in MODELS:
            said = {found[name]["equal"] for name in found if name.startswith(f"{engine}, {model}, ")}
            cells.append("different" if False in said else "equal" if said else "no plan")
        lines.append(f"| `{engine}` | {' | '.join(cells)} |")
    assert "\n".join(lines) in PAGE.read_text(), "\n".join(lines)


@pytest.mark.parametrize("name", [name for name in CASES if "BatchNorm" in name])
def test_a_batch_norm_that_is_not_synchronised_is_called_so(found: Mapping[str, Any], name: str) -> None:
    said, own = found[name]["text"], 3 if "2 ranks" in name else 2
    assert f"over the samples of each forward, {own} of the step's 12, and nothing else is wrong" in said, said
    assert "synchronise it (nn.SyncBatchNorm)" in said, said


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("synchronised")])
def test_a_batch_norm_that_is_synchronised(found: Mapping[str, Any], name: str) -> None:
    said = found[name]["text"]
    if name == "synchronised":
        assert found[name]["equal"], said
    else:
        assert "over the samples of one forward on all ranks, 6 of the step's 12" in said, said


def test_another_fault_beside_a_batch_norm_is_that_fault(found: Mapping[str, Any]) -> None:
    assert "no all-reduce" in found["nothing sent"]["text"], found["nothing sent"]


@pytest.mark.parametrize("name", [name for name in CASES if "ranks" in name and "Batch" not in name])
def test_a_model_whose_samples_are_their_own_is_equal(found: Mapping[str, Any], name: str) -> None:
    assert found[name]["equal"] and found[name]["residual"] <= 1e-5, found[name]
