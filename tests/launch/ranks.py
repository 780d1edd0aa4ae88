"""Two ranks that behave or misbehave as the first word says; run by test_local.py."""

import os
import signal
import sys
import time
from pathlib import Path

from plait.comm.base import Comm
from plait.run.launch.failure import guarded
from plait.run.launch.local import launch
from plait.run.measure.comm import BenchConfig
from plait.table.mesh import AXES

HOW, REST = sys.argv[1], sys.argv[2:]


def body(comm: Comm) -> int:
    if HOW == "speak":
        print(f"rank {comm.rank} of {comm.mesh.size} heard {REST}")
        print(*(f"{n}={os.environ.get(n)}" for n in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PLAIT_LAUNCHER")))
        return 0
    if HOW == "code":
        if comm.rank == 0:
            time.sleep(2)
            print("rank 0 had to the end")
        return 7
    if HOW == "sleep":
        (Path(REST[0]) / f"rank{comm.rank}.pid").write_text(str(os.getpid()))
        time.sleep(60)
    if HOW == "pause":
        if comm.rank == 0:
            Path(REST[0]).touch()
        else:
            while not Path(REST[0]).exists():
                time.sleep(0.1)
            for _ in range(15):
                time.sleep(0.1)
    if comm.rank == 1:
        if HOW == "raise":
            raise RuntimeError("the matter is here")
        if HOW == "stop":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGSTOP)
    comm.barrier(AXES)
    return 0


if __name__ == "__main__":
    config = BenchConfig(
        deadline={"stop": 5, "pause": 8}.get(HOW, 20), world="process" if "over gloo" in REST else "auto"
    )
    sys.exit(guarded(lambda: launch(config, body, sys.argv)))
