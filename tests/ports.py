"""A port for processes of a test: out of the range that the kernel gives away, and no other worker's."""

from __future__ import annotations

import os
import random
import socket

FIRST, LAST, WORKERS = 20_000, 32_000, 100
"""Linux gives away ports from 32768 on."""


def free_port() -> int:
    """A port that nobody listens on; workers of one run draw from ports that leave different remainders."""
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
