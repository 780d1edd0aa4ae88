"""``plait checkpoint export``: the folder that a run would have written, from its checkpoint alone."""

from __future__ import annotations

from pathlib import Path

import hf_folders as folders
import pytest
import torch
from safetensors.torch import load_file

import plait
from plait.comm import Comm
from plait.run.commands.main import main
from plait.run.formats.huggingface import write_folder

pytest.importorskip("transformers")


def call(*words: str | Path) -> int:
    return main(["checkpoint", "export", *map(str, words)])


@pytest.mark.parametrize(("kind", "tie"), [("llama", True), ("qwen2", False)])
def test_it_is_what_the_run_would_have_written(
    kind: str, tie: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folders.write(tmp_path / "model", kind, tie=tie)
    tokens = torch.arange(2 * 16).view(2, 16) * 5 % 259

    def body(comm: Comm) -> dict[str, torch.Tensor]:
        engine = folders.engine_of(folder, comm, "zero3", 0.1)
        ema = plait.EMA(engine, 0.5)
        mine = slice(comm.data_rank, comm.data_rank + 1)
        engine.step([{"tokens": tokens[mine], "targets": tokens.roll(-1, 1)[mine]}])
        ema.update()
        extra = {"config": {"model": f"hf:{folder}"}}
        plait.save(tmp_path / "run", engine, ema=ema, extra=extra)
        write_folder(tmp_path / "wanted", engine, folder)
        return ema.full_state_dict()

    average, *_ = plait.run_threads("shard=2", body)
    assert call(tmp_path / "run", tmp_path / "out") == 0
    capsys.readouterr()
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in (tmp_path / "wanted").iterdir()}
    for file in (tmp_path / "wanted").iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    ours, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "wanted"))
    assert ours.keys() == wanted.keys() and all(torch.equal(ours[name], wanted[name]) for name in wanted)
    read = folders.load(tmp_path / "out").state_dict()
    assert all(torch.equal(read[name], value) for name, value in ours.items())
    assert ("lm_head.weight" in ours) != tie and "lm_head.weight" in read

    more = ("--source", folder, "--ema", "--dtype", "bf16")
    assert call(tmp_path / "run", tmp_path / "average", *more) == 0
    ours = load_file(tmp_path / "average" / "model.safetensors")
    assert all(torch.equal(ours[name], average[name].bfloat16()) for name in ours)
    assert folders.load(tmp_path / "average").config.dtype in (torch.float32, torch.bfloat16)

    other = folders.write(tmp_path / "other", kind, tie=tie, num_hidden_layers=2)
    capsys.readouterr()
    for words, says in (
        ((tmp_path / "run", tmp_path / "out"), "exists already"),
        ((tmp_path / "run", tmp_path / "new", "--source", other), "is not of the model in"),
    ):
        assert call(*words) == 2
        shown = capsys.readouterr().err
        assert says in shown and shown.count("\n") == 1
    assert not (tmp_path / "new").exists()
