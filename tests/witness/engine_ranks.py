"""Processes of ``engine_worlds.py``: jobs under torch's engines, one after the other.

``plait verify --engine`` loads this file too, in ranks that know nothing of the tests' folders.
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

import plait
from plait.comm.process import ProcessComm
from plait.referee.witness.run import run_engine, with_engine
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig, with_job

SEQUENTIAL = f"{__file__}:sequential"
MLP = {"model": "mlp", "layers": 4, "width": 7}
GPT = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "length": 6}
EXAMPLES = Path(__file__).parents[2] / "examples"

ENGINES = f"{EXAMPLES}/engines.py"

CASES: dict[str, dict[str, Any]] = {
    **{
        f"{engine.rpartition(':')[2]} {name} of {ranks}": {"engine": engine, "mesh": f"shard={ranks}", **model}
        for engine in ("plait", "ddp", "fsdp2", f"{ENGINES}:zero_redundancy")
        for name, model, ranks in (("mlp", MLP, 3), ("gpt", GPT, 2))
    },
    "ddp in double precision": {"engine": "ddp", "mesh": "shard=3", "dtype": "fp64", **MLP},
    "fsdp2 on layers that are blocks": {"engine": "fsdp2", "mesh": "shard=2", "job": SEQUENTIAL},
    "plait hybrid": {"engine": "plait", "mesh": "replica=2", **MLP},
    "fsdp2 hybrid": {"engine": "fsdp2", "mesh": "replica=2", **MLP},
    "dtensor": {"engine": f"{ENGINES}:dtensor", "mesh": "tensor=2", **GPT, "kv_heads": 2},
    "torch-pipelining": {"engine": f"{ENGINES}:torch_pipelining", "mesh": "pipe=2", "clip": None, **MLP},
    "accelerate": {"engine": f"{ENGINES}:accelerate", "mesh": "shard=2", **MLP},
    "deepspeed": {"engine": f"{ENGINES}:deepspeed", "mesh": "shard=2", **MLP},
    "deepspeed gpt": {"engine": f"{ENGINES}:deepspeed", "mesh": "shard=3", **GPT},
    "by hand": {"engine": f"{EXAMPLES}/my_engine.py:by_hand", "mesh": "shard=3", **MLP},
}


sequential = plait.UserJob(
    build=lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    loss_fn=lambda model, batch: model(batch).square().sum(),
    batches=[torch.arange(27.0).view(9, 3).sin(), torch.arange(21.0).view(7, 3).cos()],
)


Cases: TypeAlias = Mapping[str, dict[str, Any] | VerifyConfig]


def installed(case: dict[str, Any] | VerifyConfig) -> bool:
    """True if there is the package of an engine that is not torch's."""
    if isinstance(case, VerifyConfig):
        return True
    needed = {f"{ENGINES}:{name}": name for name in ("accelerate", "deepspeed")}
    return case["engine"] not in needed or find_spec(needed[case["engine"]]) is not None


def config_of(case: dict[str, Any] | VerifyConfig) -> VerifyConfig:
    if isinstance(case, VerifyConfig):
        return case
    own = {} if "job" in case else {"dropout": 0.0, "batch": 12}
    return with_job(VerifyConfig(**{"steps": 2, "microbatches": 2, "clip": 0.05, **own, **case}))


def become(rank: int, ranks: int, port: int) -> None:
    """This process is a rank, as torchrun would say it."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)


def rank_main(rank: int, ranks: int, port: int, path: str, cases: Cases) -> None:
    """Runs the cases for so many ranks; rank 0 writes what became of each."""
    become(rank, ranks, port)
    found = {}
    for name, case in cases.items():
        config = config_of(case)
        if config.machine.parsed_mesh.size != ranks or not installed(case):
            continue
        validate(config)
        config = with_engine(config)
        comm = ProcessComm.from_env(config.machine.parsed_mesh)
        judgement = run_engine(config, comm)
        if judgement is not None:
            found[name] = asdict(judgement) | {"equal": judgement.equal}
        comm.close()
    if rank == 0:
        Path(path).write_text(json.dumps(found))
