"""A long run of ``plait train`` that measures its own memory: ``soak_ranks.py STEPS FLAG...``, one JSON line a rank.

blocks   allocated by Python: objects, with any owner
heap     bytes allocated by malloc, in all arenas: torch, gloo, glibc itself
rss      anonymous memory of the process, in bytes
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

from plait.comm import Comm, Observer
from plait.run.commands.main import parse
from plait.run.config.settings import TrainConfig
from plait.run.launch.local import launch
from plait.run.train.run import run_train


class Mallinfo(ctypes.Structure):
    """As in malloc.h of glibc 2.33 and later."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def memory() -> dict[str, int]:
    gc.collect()
    of_libc = ctypes.CDLL(None).mallinfo2
    of_libc.restype = Mallinfo
    heap = of_libc()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rss = int(status["RssAnon"].split()[0]) * 1024
    return {"blocks": sys.getallocatedblocks(), "heap": heap.uordblks + heap.hblkhd, "rss": rss}


class Meter(Observer):
    """Looks at the memory ten times in a run."""

    def __init__(self, steps: int) -> None:
        self.steps, self.seen = steps, list[dict[str, int]]()

    def begin_step(self, number: int) -> None:
        if (number + 1) % (self.steps // 10) == 0:
            self.seen.append({"step": number} | memory())


def main(steps: int, words: list[str]) -> int:
    config = parse(["train", *words, "--steps", str(steps), "--log-every", str(steps)])
    assert isinstance(config, TrainConfig)

    def body(comm: Comm) -> int:
        meter = Meter(steps)
        comm.observers += (meter,)
        code = run_train(config, comm)
        if config.machine.world == "process" or not comm.rank:  # threads are one process
            print(json.dumps(meter.seen), file=sys.stderr, flush=True)
        return code

    return launch(config.machine, body, [__file__, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
