"""``plait.verify_resume`` on two ranks of FSDP2 and torch.distributed.checkpoint: right, and every fault named."""

from __future__ import annotations

import json
from pathlib import Path

from small_runs import processes

RANKS = Path(__file__).with_name("resume_ranks.py")
SAID = {
    "right": "the run that was stopped is the run that was not, to the bit",
    "moments": "after the load of step 2, the exp_avg of '0.weight' in program.optimizer is not there: it is fresh",
    "parameter": "after the load of step 2, the parameter '3.bias' of program.model differs by up to",
    "one rank's random numbers": "rank 1: after the load of step 2, the state of torch's random numbers (CPU) is anoth",
    "again": "step 3 trained on the samples of step 2 again",
}


def test_fsdp2_by_torch_distributed_checkpoint(tmp_path: Path) -> None:
    processes(RANKS, 2, tmp_path / "all")
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.keys() == SAID.keys()
        for name, words in SAID.items():
            assert said[name].replace("rank 0: ", "").startswith(words), (name, said[name])
