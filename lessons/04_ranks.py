"""Lesson 4: ranks, world size, torchrun, ping-pong.

The idea.  The same program is started n times.  Each copy is a *rank*: it learns its number and the *world size* from
its environment, finds the others through a meeting place (an address and a port), and does its part.  Nothing else
makes the copies different, so "if rank == 0" lets one of them print, save, or lead.  A rank is usually a
process, because threads of one Python process take turns (the GIL) and processes do not.  torch releases the GIL
inside its operators, so threads are not as bad as Python loops make them look.  Here processes
talk over sockets (gloo); on one host plait can also use shared memory.  For learning, threads are better: they start in
a millisecond and share one debugger.  plait runs the same body on both.

Predict before you run it:
  1. Four ranks each add their number to a token and pass it on.  What does rank 3 hold at the end?
  2. Ranks as threads, ranks as processes: how many process ids do four ranks have?
  3. A ping-pong message grows from 4 bytes to 4 KB, a thousandfold.  How much longer does it take?
  4. Two threads count at the same time, in a loop of Python.  Is that faster than one after the other?

    plait lesson run 4
    torchrun --nproc-per-node 4 lessons/04_ranks.py
"""

import os
import statistics
import subprocess
import sys
import time

import torch

import plait

MESH = "pipe=4"
RANKS, WHY = range(2, 9), "ping-pong needs two ranks, and the lesson starts each as a process"
SIZES = (4, 4096, 4 * 2**20)


# 1. Who am I?  And who are my neighbours on the line 0 - 1 - 2 - 3?


def get_next_rank(comm: plait.Comm) -> int | None:
    return comm.rank + 1 if comm.rank + 1 < comm.world_size else None


def get_prev_rank(comm: plait.Comm) -> int | None:
    return comm.rank - 1 if comm.rank > 0 else None


def body(comm: plait.Comm) -> int:
    """Passes a token down the line; each rank adds its number."""
    before, after = get_prev_rank(comm), get_next_rank(comm)
    token = torch.zeros(1)
    if before is not None:
        comm.recv(token, before).wait()
    token += comm.rank
    if after is not None:
        comm.send(token, after)
    return int(token)


# 2. The GIL: threads of one process run Python in turns, so two take the time of one after the other.


def count(comm: plait.Comm | None = None) -> float:
    """The seconds that this rank takes to count; all start together."""
    if comm is not None:
        comm.barrier(("pipe",))
    start, number = time.perf_counter(), 0
    while number < 300_000:
        number += 1
    return time.perf_counter() - start


# 3. Ping-pong: rank 0 sends, rank 1 sends it back.  Half of a round trip is the time of one message.


def ping_pong(comm: plait.Comm, size: int, rounds: int = 30) -> float:
    ball, seconds = torch.zeros(size // 4), []
    for _ in range(rounds):
        comm.barrier(("pipe",))
        start = time.perf_counter()
        if comm.rank == 0:
            comm.send(ball, 1).wait()
            comm.recv(ball, 1).wait()
        elif comm.rank == 1:
            comm.recv(ball, 0).wait()
            comm.send(ball, 0).wait()
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds[5:])  # the first rounds warm up


def report(comm: plait.Comm) -> dict[str, object]:
    me = {"rank": comm.rank, "process": os.getpid(), "token": body(comm)}
    me["seconds"] = [ping_pong(comm, size) for size in SIZES]
    return me


def show(me: dict, world: str) -> None:
    cells = [f"{size:>8} bytes {1e6 * s:8.1f} us" for size, s in zip(SIZES, me["seconds"], strict=True)]
    print(f"measured here, {world} {' | '.join(cells)}")


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    found = plait.run_threads(f"pipe={ranks}", report)

    # Prediction 1: 0 + 1 + 2 + 3 = 6.  Each rank holds the sum of the numbers up to its own.
    print("token, rank by rank:", [me["token"] for me in found])
    assert [me["token"] for me in found] == [sum(range(rank + 1)) for rank in range(ranks)]

    # Prediction 2: one id for threads, four for processes.
    print("threads:   process ids", len({me["process"] for me in found}))
    assert {me["process"] for me in found} == {os.getpid()}
    show(found[0], "threads:  ")
    started = torchrun(ranks)
    print(*started, sep="\n")
    assert len({line.split()[3] for line in started if line.startswith("rank")}) == ranks

    # Prediction 3: hardly any.  Small messages cost the latency, large ones their bytes.
    small, middle, large = found[0]["seconds"]
    print(f"measured here: 4 KB takes {middle / small:.1f} times as long as 4 bytes, 4 MB {large / small:.0f} times")

    # Prediction 4: no.  Each waits for the other's turns.  Two processes do not, if there are enough cores.
    alone, both = count(), max(plait.run_threads("pipe=2", count))
    print(f"measured here: a count takes {1e3 * alone:.0f} ms, two at once on threads {1e3 * both:.0f} ms")

    # A message of another shape is an error that names both sides, not a hang.
    try:
        plait.run_threads("pipe=2", mismatch)
        raise AssertionError("the shapes differ")
    except RuntimeError as error:
        print(f"and a mismatch says: {str(error).split(':')[0]}")
        assert "rank 1 receives float32 (3,) from rank 0, which sent float32 (2,)" in str(error)


def mismatch(comm: plait.Comm) -> None:
    if comm.rank == 0:
        comm.send(torch.ones(2), 1)
    else:
        comm.recv(torch.ones(3), 0).wait()


def torchrun(ranks: int) -> list[str]:
    """Runs this file again, with each rank a process; returns the lines that it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def one_of_many() -> None:
    """Runs the same body on a rank that torchrun has started, over sockets.  Rank 0 reports for all."""
    comm = plait.join(f"pipe={os.environ['WORLD_SIZE']}")
    me, everyone = report(comm), torch.empty(2 * comm.world_size, dtype=torch.int64)
    comm.all_gather(everyone, torch.tensor([me["process"], me["token"]]), ("pipe",)).wait()
    if comm.rank == 0:
        lines = [f"rank {r} process {p} token {t}" for r, (p, t) in enumerate(everyone.view(-1, 2).tolist())]
        print("\n".join(lines))
        show(me, "processes:")
    comm.close()


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        one_of_many()
    else:
        main()
