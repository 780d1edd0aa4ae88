"""What is refused before any process starts, and how files and flags make a config."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config import RunConfig, TrainConfig, VerifyConfig, from_toml, resolve_device, validate


@pytest.mark.parametrize("config", [TrainConfig(), VerifyConfig(), VerifyConfig(model="mlp", layers=3)])
def test_the_defaults_are_valid(config: RunConfig) -> None:
    validate(config)


def test_the_smallest_batch_that_fills_all_parts_is_valid() -> None:
    validate(TrainConfig(mesh="replica=2 shard=3", microbatches=2, batch=12))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mesh": "shards=4"}, ["unknown mesh axis 'shards'", "replica"]),
        ({"mesh": "shard=0"}, ["shard=0", "from 1"]),
        ({"mesh": "pipe=2", "schedule": "1f1c"}, ["unknown order '1f1c'", "1f1b"]),
        ({"mesh": "pipe=2", "schedule": "no/such.txt"}, ["cannot read the schedule 'no/such.txt': No such file"]),
        ({"mesh": "pipe=2", "chunks": 2}, ["2 chunks", "only interleaved"]),
        ({"mesh": "pipe=2", "schedule": "interleaved", "chunks": 1}, ["1 stages per rank", "from 2"]),
        ({"mesh": "pipe=2", "split": "3 2 2"}, ["3 stages", "the pipeline has 2"]),
        ({"mesh": "pipe=2", "split": "5 -2"}, ["split '5 -2'", "measured"]),
        ({"split": "3 4"}, ["there is one stage"]),
        ({"mesh": "pipe=2", "hold": -1}, ["hold is -1"]),
        ({"sequence_parallel": True, "model": "mlp", "mesh": "tensor=2"}, ["mlp", "in time"]),
        ({"strategy": "zero4"}, ["unknown strategy 'zero4'", "zero3"]),
        ({"strategy": "mine: full | full"}, ["cannot read the strategy"]),
        ({"batch": 7, "mesh": "replica=2 shard=2", "microbatches": 2}, ["7 samples", "4", "2", "8 parts"]),
        ({"microbatches": 0}, ["microbatches is 0", "from 1"]),
        ({"steps": 0}, ["steps is 0"]),
        ({"prefetch": -1}, ["prefetch is -1", "from 0"]),
        ({"log_every": 0}, ["log_every is 0"]),
        ({"lr": 0.0}, ["lr is 0.0", "above 0"]),
        ({"lr": float("nan")}, ["lr is nan"]),
        ({"clip": -1.0}, ["clip is -1.0"]),
        ({"deadline": 0.0}, ["deadline is 0.0"]),
        ({"dropout": 1.0}, ["dropout is 1.0"]),
        ({"heads": 3, "kv_heads": 2, "width": 96}, ["3 heads", "2 key/value"]),
        ({"width": 100, "heads": 8}, ["width 100", "multiple of 16"]),
        ({"layers": 0}, ["num_layers is 0"]),
        ({"port": 70000}, ["port 70000"]),
        ({"epochs": 0}, ["epochs is 0", "from 1"]),
        ({"epochs": 2, "model": "mlp"}, ["epochs is for text", "mlp"]),
        ({"pack": True, "model": "mlp"}, ["pack is for text", "mlp"]),
        ({"workers": -1}, ["workers is -1", "from 0"]),
        ({"data": "/no/such/place"}, ["/no/such/place", "check the path"]),
        ({"out": __file__}, ["is a file", "give a folder"]),
    ],
)
def test_a_mistake_is_refused_with_its_numbers(changes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        validate(replace(TrainConfig(), **changes))
    for words in says:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here_is_refused() -> None:
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match="sees no CUDA device"):
        validate(TrainConfig(device="cuda"))


def test_more_process_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    validate(TrainConfig(device="cuda", mesh="shard=2"))
    validate(TrainConfig(device="cuda", mesh="shard=4", world="thread"))
    with pytest.raises(ValueError, match="4 ranks on 2 CUDA devices"):
        validate(TrainConfig(device="auto", mesh="shard=4"))


def test_every_field_says_what_it_is() -> None:
    source = Path(RunConfig.__module__.replace(".", "/"))
    text = (Path(__file__).parent.parent / "src" / source).with_suffix(".py").read_text()
    for kind in (RunConfig, TrainConfig, VerifyConfig):
        for field in fields(kind):
            after = text.split(f"    {field.name}: ", 1)[1].splitlines()[1]
            assert after.strip().startswith('"""'), f"{field.name} has no line of explanation"


def write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_a_file_gives_values_and_the_rest_keeps_its_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, 'mesh = "replica=2 shard=2"\nlr = 1\nlayers = 2\nragged = true\nclip = 0.5\n')
    config = from_toml(VerifyConfig, path)
    want = VerifyConfig(mesh="replica=2 shard=2", lr=1.0, layers=2, ragged=True, clip=0.5)
    assert config == want
    assert type(config.lr) is float


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("microbatch = 2", ["unknown key 'microbatch'", "did you mean microbatches"]),
        ("zzz = 2", ["unknown key 'zzz'", "the keys are", "strategy"]),
        ('config = "other.toml"', ["unknown key 'config'"]),
        ("mesh = 4", ["mesh", "4, a int", "give str"]),
        ('steps = "many"', ["'many'", "give int"]),
        ("steps = true", ["True", "give int"]),
        ("steps = 1.5", ["1.5", "give int"]),
        ('optimizer = "lion"', ["'lion'", "adamw, adam"]),
        ("mesh =", ["is no TOML", "Invalid value"]),
        ("out = 3", ["give str"]),
        ("steps = 9\nepochs = 2", ["steps = 9 and epochs = 2", "leave one of them out"]),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        from_toml(TrainConfig, path)
    for words in [*says, path]:
        assert words in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the config .*No such file"):
        from_toml(TrainConfig, str(tmp_path / "none.toml"))
