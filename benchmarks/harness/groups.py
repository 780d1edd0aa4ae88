"""Process groups on demand: ``launch(task, ranks, ...)`` runs it on every rank, returns rank 0's answer.

Each rank gets one compute thread and torchrun's environment variables, so anything that reads them
(``init_process_group``, plait's ``ProcessComm.from_env``) works unchanged. One call is one process group
from birth to death: timing uses one for all contestants, memory one per contestant.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 42), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc keeps freed memory instead of faulting it in anew: what plait gives its own ranks, here for all contestants."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _rank_main(
    rank: int, ranks: int, port: int, answers: Any, task: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    answer = task(*arguments)
    dist.barrier()
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    sys.stdout.flush()
    # Not by way of the interpreter's end: torch's functional collectives keep finished works in statics, whose
    # destruction now and then aborts a rank ("terminate called without an active exception") after all is done.
    os._exit(0)


def launch(task: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Runs ``task(*arguments)`` on ``ranks`` new processes; one that raises ends all, with its traceback."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, value in MEMORY.items():
        os.environ.setdefault(name, value)
    answers = mp.get_context("spawn").SimpleQueue()
    spawn: Any = mp.spawn  # type: ignore[attr-defined]
    spawn(_rank_main, (ranks, free_port(), answers, task, arguments), nprocs=ranks)
    return answers.get()
