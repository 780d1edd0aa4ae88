"""Torch's own checkpoints, made by FSDP2 on processes, are read exactly; ours are read by FSDP2 exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import LAYOUTS, Training, differences
from small_runs import processes

import plait
from plait.checkpoint.stored import Checkpoint
from plait.comm import Comm, run
from plait.run.formats.dcp import export_dcp, import_dcp
from plait.table.mesh import Mesh

RANKS = Path(__file__).with_name("fsdp2_ranks.py")


@pytest.mark.parametrize(("ranks", "where", "form"), [(3, "pipe", "app"), (2, "bf16", "flat")])
def test_what_fsdp2_saves_goes_on_in_any_layout(ranks: int, where: str, form: str, tmp_path: Path) -> None:
    processes(RANKS, ranks, "save", tmp_path / "theirs", tmp_path / "whole", form)
    wanted: dict[str, Any] = torch.load(tmp_path / "whole")
    folder = import_dcp(tmp_path / "theirs", tmp_path / "run")

    def body(comm: Comm) -> Any:
        engine = Training.begin(comm, where, change=1).engine
        loaded = plait.load(tmp_path / "run", engine)
        return loaded, engine.full_state_dict(), engine.optimizer_state_dict()

    for loaded, model, optimizer in run(Mesh.parse(LAYOUTS[where][0]), body, deadline=60):
        assert (str(loaded.path), loaded.step, loaded.extra["epoch"]) == (str(folder), 2, 7)
        assert not differences(loaded.extra["rng"], torch.arange(9, dtype=torch.uint8))
        assert loaded.extra["words"] == ["a", ("b", None)]
        assert not differences(model, {name: wanted["model"][name].to(model[name].dtype) for name in model})
        assert model.keys() == wanted["model"].keys(), "the tied head too"
        assert not differences(optimizer, wanted["optim"])


def test_what_plait_saves_is_read_by_fsdp2(tmp_path: Path) -> None:
    def body(comm: Comm) -> Any:
        training = Training.begin(comm, "pipe")
        training.go(0, 2)
        training.save(tmp_path / "run")
        return {"model": training.engine.full_state_dict(), "optim": training.engine.optimizer_state_dict()}

    whole, *_ = run(Mesh.parse(LAYOUTS["pipe"][0]), body, deadline=60)
    torch.save(whole, tmp_path / "whole")
    export_dcp(Checkpoint.find(tmp_path / "run"), tmp_path / "theirs", ties={"head.weight": "embed.weight"})
    assert "differences: []" in processes(RANKS, 3, "load", tmp_path / "theirs", tmp_path / "whole")
