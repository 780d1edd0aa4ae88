"""What processes do for ``test_verdicts.py``: torch's engines, Accelerate and Trainer on gpt, llama and a ResNet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_ranks import become, config_of

from plait.comm.process import ProcessComm
from plait.config import validate
from plait.witness.run import run_engine, with_engine

JOBS = Path(__file__).with_name("resnet_jobs.py")
TEXT = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "length": 6}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", **TEXT},
    "llama": {"model": "llama", **TEXT},
    "ResNet, BatchNorm": {"job": f"{JOBS}:with_batch_norm"},
    "ResNet, frozen": {"job": f"{JOBS}:with_frozen"},
    "ResNet, GroupNorm": {"job": f"{JOBS}:with_groups"},
}
ENGINES = ("ddp", "fsdp2", "zero-redundancy", "accelerate", "trainer", "dtensor")
BY_HAND, NO_SUM = f"{JOBS}:by_hand", f"{JOBS}:no_sum"

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{engine}, {name}, {ranks} ranks": {
            "engine": engine, "mesh": f"{'tensor' if engine == 'dtensor' else 'shard'}={ranks}", **model
        }
        for engine in ENGINES
        for name, model in MODELS.items()
        for ranks in (2, 3)
        if engine != "dtensor" or (name in ("gpt", "llama") and ranks == 2)
    },
    "synchronised": {
        "engine": BY_HAND, "mesh": "shard=2", "job": f"{JOBS}:synchronised", "microbatches": 1, "clip": None
    },
    "synchronised, in parts": {"engine": BY_HAND, "mesh": "shard=2", "job": f"{JOBS}:synchronised", "clip": None},
    "nothing sent": {"engine": NO_SUM, "mesh": "shard=2", "job": f"{JOBS}:with_batch_norm", "clip": None},
}  # fmt: skip


def rank_main(rank: int, ranks: int, port: int, path: str) -> None:
    """Runs the cases for so many ranks; rank 0 writes what became of each."""
    become(rank, ranks, port)
    found = {}
    for name, case in CASES.items():
        config = config_of(case)
        if config.parsed_mesh.size != ranks:
            continue
        validate(config)
        config = with_engine(config)
        comm = ProcessComm.from_env(config.parsed_mesh)
        judgement = run_engine(config, comm)
        if judgement is not None:
            found[name] = {"equal": judgement.equal, "text": judgement.text, "residual": judgement.residual}
        comm.close()
    if rank == 0:
        Path(path).write_text(json.dumps(found))
