"""A long run takes no more memory than a short one: the leftovers of each step, counted and not timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("soak_ranks.py")
SMALL = ["--model", "mlp", "--layers", "1", "--width", "8", "--batch", "4"]


def grown(steps: int, *flags: str) -> dict[str, float]:
    """A step leaves so much on a rank (in the thread world: on all of them), after the first half of a run."""
    command = [sys.executable, str(RANKS), str(steps), *SMALL, *flags]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    worst: dict[str, float] = {"blocks": 0, "heap": 0, "rss": 0}
    for line in done.stderr.splitlines():
        if line.startswith("[{"):
            seen = json.loads(line)
            half, last = seen[len(seen) // 2], seen[-1]
            for name in worst:
                worst[name] = max(worst[name], (last[name] - half[name]) / (last["step"] - half["step"]))
    print(worst)
    return worst


def test_a_step_leaves_no_object_behind() -> None:
    """Two threads; one dict of metrics a step would be a dozen blocks on each."""
    assert grown(2500, "--world", "thread", "--mesh", "shard=2", "--check-drift", "5")["blocks"] < 1


@pytest.mark.parametrize(
    "layout", ["--mesh shard=2 --strategy zero3", "--mesh replica=2 --strategy ddp", "--mesh pipe=2 --microbatches 2"]
)
@pytest.mark.parametrize("world", ["process", "thread"])
def test_five_thousand_steps(world: str, layout: str) -> None:
    words = layout.split() if "pipe" not in layout else [*layout.split(), "--layers", "2"]
    left = grown(5000, "--world", world, *words)
    assert left["blocks"] < 1 and left["heap"] < 20 and left["rss"] < 60, left
