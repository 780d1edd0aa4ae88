"""Runs a function on one thread per rank, as in ``run(Mesh(shard=2), lambda comm: work(comm))``.

The result is one for each rank, or the first error.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from plait.comm.base import Comm
from plait.comm.rendezvous import AbortedError
from plait.comm.thread import ThreadWorld
from plait.messages.ended import to_its_end
from plait.table.mesh import Mesh

Result = TypeVar("Result")

STOPPING = 10.0
"""Seconds that an interrupted run waits for its threads to reach their next operation."""


def _join(threads: list[threading.Thread], seconds: float) -> None:
    """Waits until the threads are gone, but at most for so many seconds.

    Python's join returns when a thread has left Python.  torch's objects in it (the nodes of a backward that raised)
    are destroyed later and may need the interpreter; if that ends first, the process dies with "terminate called
    without an active exception".  Linux knows which threads exist.
    """
    give_up = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
        task = Path(f"/proc/self/task/{thread.native_id}")
        while not thread.is_alive() and task.exists() and time.monotonic() < give_up:
            time.sleep(0.0005)


def settle_vector_math() -> None:
    """Calls, in one thread, functions that torch's libraries set up on their first call: threads that made a process's
    first calls of ``cos`` or ``exp`` at the same time were seen to get values that were off by 1e-9."""
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(0.1, 0.9, 64, dtype=dtype)
        for function in (torch.cos, torch.sin, torch.tan, torch.exp, torch.log, torch.tanh, torch.erf, torch.sqrt):
            function(x)
        x.pow(1.5)


def run(
    mesh: Mesh,
    fn: Callable[[Comm], Result],
    *,
    deadline: float = 30.0,
    deterministic: bool = True,
    device: torch.device | str = "cpu",
) -> list[Result]:
    """Runs ``fn(comm)`` on one thread per rank and returns the results in rank order.

    When a rank raises, the others stop at their next operation, and the *first* failure is raised here.
    """
    world = ThreadWorld(mesh, deadline, deterministic, device)
    settle_vector_math()
    results: dict[int, Result] = {}
    failures: list[tuple[int, BaseException]] = []  # in the order of occurrence

    def rank_main(rank: int) -> None:
        world.begin(rank)
        torch.get_num_threads()  # sets MKL in this thread; otherwise products change their bits when torch does
        torch.set_autocast_cache_enabled(False)  # all threads share its casts, and the first one to leave drops them
        try:
            # torch has one thread for the backwards of a GPU, in which a rank would wait for one that comes later
            with to_its_end(), torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(world.comm(rank))
        except BaseException as error:
            failures.append((rank, error))
            world.abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            world.end(rank)

    ranks = range(mesh.size)
    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive() and not failures:
                thread.join(0.05)
        # After a failure the others end at their next operation; one that never reaches it is abandoned.
        _join(threads, deadline)
    except BaseException:
        world.abort("the calling thread was interrupted")
        _join(threads, min(deadline, STOPPING))  # a thread that computes while the interpreter ends would crash it
        raise
    if failures:
        rank, error = next((f for f in failures if not isinstance(f[1], AbortedError)), failures[0])
        error.add_note(f"(raised on rank {rank} of {mesh.size}, mesh {mesh})")
        raise error
    return [results[rank] for rank in ranks]
