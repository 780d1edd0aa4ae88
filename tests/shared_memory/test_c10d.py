"""torch's own programs on shared memory, beside the same ones on gloo: real processes (``c10d_ranks.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = Path(__file__).with_name("c10d_ranks.py")
SCENES = ("collectives", "ddp", "fsdp2", "dtensor", "pipelining", "checkpoint")
BITWISE = ("pipelining",)
"""Scenes in which gloo has nothing to add; its order of additions is another."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="anonymous files are Linux's")


def play(folder: Path, backend: str, size: int) -> None:
    processes = []
    for rank in range(size):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(RANKS), ",".join(SCENES), backend, str(folder)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(command, env=env, **pipes))
    try:
        for process in processes:
            said = process.communicate(timeout=200)[0]
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.wait()


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def test_torchs_own_programs_come_to_what_they_come_to_on_gloo(tmp_path: Path) -> None:
    for backend in ("gloo", "plait_shm"):
        play(tmp_path, backend, 3)
    for scene in SCENES:
        for rank in range(3):
            gloo, shared = (
                list(leaves(torch.load(tmp_path / f"{scene}-{backend}-{rank}.pt", weights_only=False)))
                for backend in ("gloo", "plait_shm")
            )
            assert len(gloo) == len(shared) > 1
            for i, (a, b) in enumerate(zip(gloo, shared, strict=True)):
                where = f"{scene}, rank {rank}, {i}"
                if not isinstance(a, (torch.Tensor, float)):
                    assert a == b, where
                    continue
                bits = scene in BITWISE
                torch.testing.assert_close(b, a, rtol=0 if bits else 1e-5, atol=0 if bits else 1e-6, msg=where)
