"""Ranks of two agents on one host; in the first round they wait until one agent is gone.  Run by test_elastic.py."""

import os
import sys
import time
from pathlib import Path

import torch

import plait

FOLDER = Path(sys.argv[1])

torch.set_num_threads(1)
comm = plait.join(deadline=40)
total = torch.ones(1)
comm.all_reduce(total, ("shard",)).wait()
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
name = FOLDER / f"attempt{comm.attempt}-rank{comm.rank}"
name.with_suffix(".new").write_text(f"{int(total)} {count}")
name.with_suffix(".new").rename(name)
comm.barrier(("shard",))
while comm.attempt == 0:
    comm.barrier(("shard",))  # fails when the other is gone
    time.sleep(0.05)
comm.close()
