"""Processes of a test, and a port for them: out of the range that the kernel gives away, and no other worker's."""

import os
import random
import socket
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

FIRST, LAST, WORKERS = 20_000, 32_000, 100
"""Linux gives away ports from 32768 on."""


def free_port() -> int:
    """An unused port; workers of one run draw from ports that leave different remainders."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(FIRST, LAST, WORKERS) + worker
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def spawn(rank_main: Callable[..., None], num_ranks: int, *args: Any) -> None:
    """Runs ``rank_main(rank, *args)`` in processes of one thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        mp.spawn(rank_main, args, nprocs=num_ranks)
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        os.environ.update({} if before is None else {"OMP_NUM_THREADS": before})
