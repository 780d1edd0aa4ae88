"""``plait.verify_resume`` on two ranks of FSDP2 and torch.distributed.checkpoint: right, and every fault named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ports import free_port

RANKS = Path(__file__).with_name("resume_ranks.py")
SAID = {
    "right": "the run that was stopped is the run that was not, to the bit",
    "moments": "after the load of step 2, the exp_avg of '0.weight' in program.optimizer is not there: it is fresh",
    "parameter": "after the load of step 2, the parameter '3.bias' of program.model differs by up to",
    "one rank's random numbers": "rank 1: after the load of step 2, the state of torch's random numbers (CPU) is anoth",
    "again": "step 3 trained on the samples of step 2 again",
}


def test_fsdp2_by_torch_distributed_checkpoint(tmp_path: Path) -> None:
    port, processes = free_port(), []
    for rank in range(2):
        where = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        env = os.environ | {key: str(value) for key, value in where.items()}
        command = [sys.executable, "-W", "ignore", str(RANKS), str(tmp_path / "all")]
        processes.append(
            subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.keys() == SAID.keys()
        for name, words in SAID.items():
            assert said[name].replace("rank 0: ", "").startswith(words), (name, said[name])
