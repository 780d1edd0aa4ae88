"""The cases of ``test_verdicts.py``: torch's engines, Accelerate and Trainer on gpt, llama and a ResNet."""

from pathlib import Path
from typing import Any

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
