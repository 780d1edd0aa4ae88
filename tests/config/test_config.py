"""Settings and numbers that are refused before any process starts, and configs made of files and flags."""

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.files.reading import memory
from plait.run.commands.main import COMMANDS, kind_of
from plait.run.config.bounds import BOUNDS, LONGEST, check_values
from plait.run.config.check import validate
from plait.run.config.file import FileConfig, from_toml
from plait.run.config.layout import LayoutConfig
from plait.run.config.machine import MachineConfig, idle_devices, resolve_device
from plait.run.config.room import _needs, check_fits, check_room
from plait.run.config.settings import ComparisonConfig, CourseConfig, OutputConfig, TrainConfig, VerifyConfig
from plait.run.job.config import DataConfig, JobConfig
from plait.run.job.families import ModelConfig
from plait.run.job.optimizer import OptimizerConfig
from plait.run.job.sections import flag_hints, is_section
from plait.run.measure.comm import BenchConfig
from plait.schedule.actions import MOST_PASSES, parse_schedule
from plait.schedule.check import check


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
        ({"mesh": "pipe=2", "split": "5 -2"}, ["split '5 -2'", 'as in "5 4"']),
        ({"split": "3 4"}, ["there is one stage"]),
        ({"model": "hf:folder", "layers": 5}, ["layers 5 beside model 'hf:folder'", "leave it out"]),
        ({"model": "hf:folder", "dropout": 0.0}, ["dropout 0.0 beside model 'hf:folder'"]),
        ({"sequence_parallel": True, "model": "mlp", "mesh": "tensor=2"}, ["mlp", "in time"]),
        ({"strategy": "fsdp"}, ["unknown strategy 'fsdp': did you mean zero3?"]),
        ({"strategy": "mine: full | full"}, ["cannot read the strategy"]),
        ({"dropout": 1.0}, ["dropout is 1.0"]),
        ({"vocab": 100}, ["the data has token 226", "vocabulary ends at 99: give --vocab 227"]),
        ({"epochs": 2, "model": "mlp"}, ["epochs is for text", "mlp"]),
        ({"pack": True, "model": "mlp"}, ["pack is for text", "mlp"]),
        ({"optimizer": "adamx"}, ["unknown optimizer 'adamx'", "did you mean adam"]),
        ({"optimizer": "lion"}, ["unknown optimizer 'lion'", "adamw, adam, sgd"]),
        ({"model": "lama"}, ["unknown model 'lama'", "did you mean llama"]),
        ({"out": __file__}, [f"{__file__}' is no folder", "give another place"]),
        ({"eval_every": 2, "model": "mlp"}, ["has a held-out part; mlp reads none"]),
        ({"warmup": 9, "steps": 8}, ["a warmup of 9 steps in a run of 8"]),
        ({"tensorboard": True}, ["tensorboard without out: give --out"]),
        ({"eval_steps": 5}, ["eval_steps without eval_every: give --eval-every"]),
        ({"mesh": "shard=2", "steps": 10, "inject": ("kill@rank=1,step=20",)}, ["in step 20, but the run has 10"]),
        ({"model": "mlp", "data": "nope"}, ["no file or folder at data 'nope'"]),
        ({"dtype": "bf16", "strategy": "x: full bf16|full bf16|full, pending(shard, replica)|full"}, ["names dtypes"]),
        ({"dtype": "fp16-mixed", "loss_scale": 0.0}, ["loss_scale is 0.0: give a number above 0"]),
        ({"model": "mlp", "recompute": "selective"}, ["selective is for attention, which mlp lacks"]),
        # sizes
        ({"mesh": "tensor=3"}, ["4 heads of 32", "tensor=3", "use tensor=2"]),
        ({"mesh": "tensor=4"}, ["2 heads of 32", "tensor=4", "use tensor=2"]),
        ({"mesh": "tensor=2", "kv_heads": 1}, ["1 heads of 32", "tensor=2", "use no tensor axis"]),
        ({"mesh": "tensor=2", "model": "mlp", "layers": 3}, ["tensor=2", "more layers", "4"]),
        ({"mesh": "pipe=8", "layers": 4}, ["8 stages", "7 links", "at most 7"]),
        ({"mesh": "pipe=4", "schedule": "interleaved", "layers": 4}, ["8 stages", "7 links"]),
        ({"mesh": "pipe=2", "split": "3 3", "layers": 4}, ["3 + 3 = 6 links", "has 7"]),
        ({"mesh": "pipe=2", "split": "0 7", "layers": 4}, ["0 + 7", "at least one"]),
        ({"mesh": "shard=7", "batch": 6}, ["6 samples", "7 data ranks", "7 parts"]),
        ({"width": 130}, ["130", "4 heads", "multiple of 8"]),
        ({"width": 6, "heads": 2, "kv_heads": 1}, ["width 6 over 2 heads", "3 each", "multiple of 4"]),
        ({"heads": 3, "kv_heads": 2, "width": 96}, ["3 heads", "2 key/value heads", "divisor of 3"]),
        ({"kv_heads": 8}, ["4 heads", "8 key/value heads", "divisor of 4"]),
        ({"batch": 100_000}, ["a batch of 100000", "batch <= "]),
        ({"length": 3_000_000}, ["length 3000000", "6000002 tokens", "at most 1499999"]),
        ({"epochs": 1, "warmup": 10**6}, ["a warmup of 1000000 steps", "give a warmup of at most"]),
        ({"mesh": "shard=2000"}, ["2,000 ranks", "at most 1,024"]),
        ({"mesh": "pipe=1000", "microbatches": 1000, "batch": 1000}, ["1,000 stages x 1,000 microbatches", "65,536"]),
        ({"model": "mlp", "width": 1 << 17, "layers": 1000}, ["4 ranks need at least", "this machine has", "GiB"]),
    ],
)
def test_a_mistake_is_refused_with_its_numbers(changes: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        validate(TrainConfig(**changes))
    for words in says:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_here_is_refused() -> None:
    assert resolve_device(TrainConfig().machine) == "cpu"
    with pytest.raises(ValueError, match="sees no CUDA device"):
        validate(TrainConfig(device="cuda"))


MACHINES: Any = [("shard=4", "auto"), ("shard=2", "auto"), ("shard=4", "thread")]


def test_more_process_ranks_than_gpus_are_refused_or_compute_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    validate(TrainConfig(device="cuda", mesh="shard=2"))
    validate(TrainConfig(device="cuda", mesh="shard=4", world="thread"))
    with pytest.raises(ValueError, match="4 ranks on 2 CUDA devices"):
        validate(TrainConfig(device="cuda", mesh="shard=4"))
    several, few, threads = (TrainConfig(mesh=m, world=w) for m, w in MACHINES)
    assert [resolve_device(one.machine) for one in (several, few, threads)] == ["cpu", "cuda", "cuda"]
    assert "2 GPUs of this host are idle: 4 ranks need one each" in idle_devices(several.machine)
    assert not idle_devices(few.machine) and not idle_devices(replace(several.machine, device="cpu"))
    assert resolve_device(VerifyConfig().machine) == "cpu"  # a proof is of the layout


LAUNCHED = {"RANK": "9", "WORLD_SIZE": "16", "MASTER_ADDR": "n1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "8"}
SRUN = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "9", "SLURM_GTIDS": "8,9,10,11,12,13,14,15", "SLURM_LOCALID": "1"}
SRUN |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("variables", [LAUNCHED, SRUN], ids=["torchrun", "srun"])
def test_a_host_has_gpus_for_its_own_ranks(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Of 16 ranks on two hosts; a launcher may also show each rank one GPU, its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    validate(TrainConfig(device="cuda", mesh="shard=16"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with monkeypatch.context() as own:
        own.setenv("CUDA_VISIBLE_DEVICES", "3")
        validate(TrainConfig(device="cuda", mesh="shard=16"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="8 ranks on 4 CUDA devices of this host"):
        validate(TrainConfig(device="cuda", mesh="shard=16"))


SECTIONS = (FileConfig, MachineConfig, LayoutConfig, OptimizerConfig, DataConfig, ModelConfig)


@pytest.mark.parametrize("kind", [*SECTIONS, CourseConfig, OutputConfig, ComparisonConfig, BenchConfig])
def test_every_field_says_what_it_is(kind: type) -> None:
    """A line below it, or one that is made of a table."""
    source = inspect.getsource(kind).splitlines()
    for name, hint in inspect.get_annotations(kind).items():
        (line,) = (n for n, text in enumerate(source) if text.startswith(f"    {name}: "))
        inherited = any(name in inspect.get_annotations(base) for base in kind.__mro__[1:])
        below = line + 1 < len(source) and source[line + 1].strip().startswith('"""')
        made = "help=" in str(hint) or "for_text(" in str(hint)
        assert made or below or inherited, f"{name} has no line of explanation"


def test_the_sections_are_values_and_make_the_whole() -> None:
    config = TrainConfig(mesh="pipe=2", layers=3, batch=9, lr=0.5, cut="tensor", deadline=7.0)
    assert config.layout == LayoutConfig(cut="tensor")
    assert config.task == JobConfig(layers=3, batch=9, lr=0.5)
    assert config.task.network == ModelConfig(layers=3)
    assert replace(config, lr=0.5, mesh="pipe=2") == config != replace(config, lr=0.25)
    assert config.with_flags(lr=0.25).task.update == OptimizerConfig(lr=0.25)
    with pytest.raises(TypeError, match="TrainConfig has no setting mush"):
        TrainConfig(mush="shard=2")
    for kind in (TrainConfig, VerifyConfig):
        names = [field.name for field in every_field(kind)]
        assert sorted(names) == sorted(set(names)), "two sections or flags have the same name"


def every_field(kind: Any) -> Iterator[Any]:
    """All sections and flags of a config's class."""
    for field in fields(kind):
        yield field
        if is_section(field):
            yield from every_field(type(field.default))


WHOLE = re.compile(
    r"^\s*(?:def .*|\w+)?\w+: (?:Run|Train|Verify)Config\b|[(,] *\w+: (?:Run|Train|Verify)Config\b", re.MULTILINE
)


def test_few_files_are_passed_the_whole_config() -> None:
    """Functions take the section that they read."""
    source = Path(inspect.getfile(validate)).parents[2]
    taking = [str(path.relative_to(source)) for path in source.rglob("*.py") if WHOLE.search(path.read_text())]
    assert len(taking) <= 13, sorted(taking)


def test_what_follows_from_a_config_is_computed_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0B0\n1F0 1B0\n")
    config = TrainConfig(mesh="pipe=2", schedule=str(path), width=64, split="3 4")

    def follows() -> list[object]:
        return [config.pipeline, config.parallelism, config.row, config.task.sizes, config.task.family, config.dtypes]

    first = follows()
    path.unlink()
    assert all(a is b for a, b in zip(first, follows(), strict=True))
    assert config.parallelism.split == (3, 4) and config.parallelism.schedule == config.pipeline.order
    assert config == replace(config) and hash(config) == hash(replace(config)), "what is kept is no part of the value"
    with pytest.raises(ValueError, match="cannot read the schedule"):
        assert replace(config).pipeline


def write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def test_a_file_gives_values_and_the_rest_keeps_its_defaults(tmp_path: Path) -> None:
    """Some editors begin a file with a byte order mark."""
    path = write(tmp_path, '\ufeffmesh = "replica=2 shard=2"\nlr = 1\nlayers = 2\nragged = true\nclip = 0.5\n')
    config = from_toml(VerifyConfig, path)
    want = VerifyConfig(mesh="replica=2 shard=2", lr=1.0, layers=2, ragged=True, clip=0.5)
    assert config == want
    assert type(config.task.update.lr) is float


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("microbatch = 2", ["unknown key 'microbatch'", "did you mean microbatches"]),
        ("zzz = 2", ["unknown key 'zzz'", "the keys are", "strategy"]),
        ('config = "other.toml"', ["unknown key 'config'"]),
        ("mesh = 4", ["mesh", "4, a int", "give str"]),
        ('steps = "many"', ["'many'", "give int"]),
        ('dtype = "fp8"', ["'fp8'", "fp32"]),
        ("steps = true", ["True", "give int"]),
        ("steps = 1.5", ["1.5", "give int"]),
        ("mesh =", ["is not TOML", "Invalid value"]),
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


def numbers(kind: Any, seen: set[str]) -> set[str]:
    """The names of all settings that are numbers, those of subcommands among them."""
    for one in getattr(kind, "__args__", ()):
        numbers(one, seen)
    for name, hint in flag_hints(kind).items() if is_dataclass(kind) else ():
        seen |= {name} if {int, float} & {*getattr(hint, "__args__", (hint,))} else set()
    return seen


def test_every_number_has_bounds_and_every_bound_a_number() -> None:
    found: set[str] = set()
    for name in COMMANDS:
        numbers(kind_of(name), found)
    assert found == {*BOUNDS}
    validate(VerifyConfig(deadline=1e6, seed=-5, clip=math.inf, threads=1024))  # within them


@pytest.mark.parametrize("name", sorted(set(BOUNDS) & {*flag_hints(TrainConfig)}))
def test_what_is_past_them_is_refused_with_the_number(name: str) -> None:
    least, most, above = BOUNDS[name]
    hint = str(flag_hints(TrainConfig)[name])
    past: list[Any] = [math.nan, -1e308, -math.inf] if "float" in hint else [-(2**63) - 1, 2**64, 10**400]
    past += [least] if above else []
    past += [math.inf, 1e308] if "float" in hint and most < 1e308 else []
    for value in past:
        with pytest.raises(ValueError, match=rf"{name} is .*: give a (whole )?number (from|above) ") as caught:
            validate(replace(TrainConfig(), **{name: value}))
        assert len(str(caught.value)) < 200
    check_values(replace(TrainConfig(), **{name: least if not above else 1.0}))


@pytest.mark.parametrize(
    "text", ["", "\x1b[31m", "a\nb", "a\tb", "a\u202eb", "\x9b", "x" * (LONGEST + 1), "a\0b", "\udcff"]
)
@pytest.mark.parametrize("name", ["mesh", "strategy", "model", "data", "out", "json", "resume", "split", "schedule"])
def test_texts_that_cannot_be_meant(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        validate(replace(TrainConfig(), **{name: text}))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_a_schedule_that_names_giant_numbers_is_not_counted_to() -> None:
    for text in (f"{10**15}F0 0B0", f"0F{10**15} 0B0"):
        with pytest.raises(ValueError, match=f"and a product of at most {MOST_PASSES:,}"):
            check(parse_schedule(text))


def test_as_many_threads_as_may_be_given_do_not_crash_torch() -> None:
    torch.set_num_threads(int(BOUNDS["threads"].most))
    assert float(torch.ones(300, 300).matmul(torch.ones(300, 300)).sum()) == 300.0**3  # the fixture takes them back


@pytest.mark.parametrize(
    "text", ["a\u00a0b", "\u3000", "Bildschirmfoto 14.02\u202fUhr", "\U0001f468\u200d\U0001f469", "ä b"]
)
def test_names_that_people_give_are_taken(text: str) -> None:
    check_values(TrainConfig(out=text))


@pytest.mark.parametrize(
    ("model", "mesh", "needs"),  # 16,640 parameters of 16 bytes; 4 samples, held twice; the activations of 2 of them
    [
        ("mlp", "pipe=2 shard=2", (16_640 * 16 // 2, 2 * 4 * 64 * 4, 2 * 64 * 4)),
        ("mlp", "tensor=2 shard=2", (16_640 * 16 // 2, 2 * 4 * 64 * 4, 2 * 64 * 4 // 2)),
        ("gpt", "pipe=2 shard=2", (213_568 * 16 // 2, 2 * 4 * (2 * 8 * 32), 1_052_290)),
    ],
)
def test_what_a_rank_needs_is_refused_only_above_what_there_is(model: str, mesh: str, needs: tuple[int, ...]) -> None:
    sizes = {"width": 64, "layers": 4, "heads": 4, "length": 32, "batch": 8, "microbatches": 2}
    config = TrainConfig(model=model, mesh=mesh, strategy="ddp", **sizes)
    assert tuple(_needs(config).values()) == needs
    check_fits(config, 3, 3 * sum(needs), "a host")
    with pytest.raises(ValueError, match="3 ranks need at least"):
        check_fits(config, 3, 3 * sum(needs) - 1, "a host")


def test_ranks_that_are_started_by_hand_are_not_all_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.run.config.room.memory", lambda processes=1: 600 << 20)
    config = TrainConfig(mesh="shard=64", strategy="ddp", batch=64, width=512, layers=8, heads=8)
    with pytest.raises(ValueError, match="64 ranks need at least"):
        check_room(config)
    monkeypatch.setenv("WORLD_SIZE", "64")
    check_room(config)


def test_a_limit_of_a_process_is_not_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (1 << 20, 1 << 20))
    assert memory(3) - memory(1) == 2 << 20
