"""Processes: cells of the matrix, where messages may arrive late, and ``plait.verify_resume`` on torch's FSDP2."""

import importlib
import json
from pathlib import Path

import torch
from ports import free_port, spawn
from small_runs import processes


def test_processes_are_one_process_too(tmp_path: Path) -> None:
    ranks = importlib.import_module("process_ranks")
    spawn(ranks.rank_main, ranks.RANKS, free_port(), str(tmp_path / "found.pt"))
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert len(found) > 10
    assert not any(found.values()), "\n".join(f"{shown}\n{told}" for shown, told in found.items() if told)


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
