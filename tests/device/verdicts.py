"""A process of ``test_stand_in.py``: ``plait verify`` on the stand-in, for right layouts and a wrong one.

``python verdicts.py <the compiled device>`` prints one JSON object a case: the verdict in a word, and its text.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import stand_in
import torch

from plait.referee.verify.kernels import repeatable
from plait.referee.verify.record import in_threads
from plait.referee.verify.run import Verdict, judge, placed, references
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import make_job
from plait.step import reduce

CASES: dict[str, dict[str, Any]] = {
    "mlp, zero3": {"model": "mlp", "mesh": "shard=3", "strategy": "zero3", "microbatches": 2},
    "gpt, hsdp": {"model": "gpt", "mesh": "replica=2 shard=2", "strategy": "hsdp", "steps": 2},
    "gpt, pipeline": {"model": "gpt", "mesh": "pipe=2", "schedule": "1f1b", "microbatches": 2, "steps": 2},
    "mlp, tensor": {"model": "mlp", "mesh": "tensor=2", "strategy": "zero3", "dtype": "fp64"},
}


def judged(settings: dict[str, Any]) -> Verdict:
    config = VerifyConfig().with_flags(device=stand_in.NAME, **settings)
    validate(config)
    job = make_job(config.task, config.dtypes)
    with repeatable(stand_in.NAME):
        ranks = in_threads(job, config)
        both = references(job, config, ranks)
        return placed(judge(job, config, ranks, *both), job, config, ranks, both)


def main() -> None:
    stand_in.load(Path(sys.argv[1]))
    torch.set_num_threads(1)
    for name, settings in CASES.items():
        verdict = judged(settings)
        print(json.dumps({"case": name, "word": verdict.word, "told": str(verdict)}), flush=True)
    clip_factor = reduce.clip_factor
    reduce.clip_factor = lambda norm, limit: clip_factor(norm, limit) ** 2
    verdict = judged({"model": "mlp", "mesh": "shard=2", "clip": 1e-3, "steps": 2})
    print(json.dumps({"case": "clipped twice", "word": verdict.word, "told": str(verdict)}), flush=True)
    os._exit(0)  # torch's threads of the device would outlive it


if __name__ == "__main__":
    main()
