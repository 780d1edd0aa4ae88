"""A rank of one contestant, in a separate process: trains when its turn comes, and sleeps between.

    RANK=0 WORLD_SIZE=2 ... python worker.py deepspeed-zero3 mlp4 FD        one line of standard input is one command

    losses    the global losses of the first steps
    turn      seconds of a step, the slowest rank's, as in the other benchmarks

Each answer is a line of JSON on the descriptor FD, because engines print on standard output.  Only torch and the
engine of the contestant are needed, so that the interpreter may be one of another environment.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "data_parallel"))

import torch
import torch.distributed as dist
from harness.turns import checked_losses, seconds_per_step
from models import WORKLOADS
from ours import rows
from peers import PEERS
from zero import STAGES

NUM_BATCHES = 4


def main(name: str, model: str, descriptor: int) -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    workload = WORKLOADS[model]
    batches = [workload.batch(step, rank, ranks) for step in range(NUM_BATCHES)]
    contestant = {**PEERS, **rows()[0], **STAGES}[name](workload, ranks)
    acts = {
        "losses": lambda: checked_losses(contestant, batches),
        "turn": lambda: seconds_per_step(contestant, batches, workload.steps_per_round),
    }
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        for line in sys.stdin:
            print(json.dumps(acts[line.strip()]()), file=answers, flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as harness/groups.py does, for its reason


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
