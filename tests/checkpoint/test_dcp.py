"""Folders of torch.distributed.checkpoint, to plait and back, by one process and by FSDP2 on processes."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_folders as folders
import pytest
import torch
import torch.distributed.checkpoint as dcp
from disks import small_disk
from run_cases import LAYOUTS, Training, decoder, differences, optimizers_of
from safetensors.torch import load_file
from small_runs import processes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import plait
from plait.checkpoint.stored import Checkpoint
from plait.comm import Comm, run
from plait.run.commands.main import main
from plait.run.formats.dcp import export_dcp, import_dcp
from plait.run.formats.huggingface import write_folder
from plait.table.mesh import Mesh


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # torch warns that it is alone
        yield


class Plain:
    """The decoder and the optimizers of ``run_cases``, in plain torch, after two updates."""

    def __init__(self) -> None:
        self.model: Any = decoder()
        own = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = optimizers_of(self.model)
        torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3)  # groups get the keys that a schedule gives them
        for step in range(2):
            for number, parameter in enumerate(own):
                parameter.grad = torch.linspace(-1, number + step, parameter.numel()).view(parameter.shape)
            for optimizer in self.optimizers:
                optimizer.step()

    def optimizer_state(self, *, flat: bool = False) -> Any:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        return copy.deepcopy(get_optimizer_state_dict(self.model, self.optimizers, options=options))


def save(path: Path, state: Any) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def loaded(path: Path, where: str = "zero3") -> Any:
    def body(comm: Comm) -> Any:
        engine = Training.begin(comm, where, change=1).engine
        found = plait.load(path, engine)
        return found.extra, found.step, engine.full_state_dict(), engine.optimizer_state_dict()

    return run(Mesh.parse(LAYOUTS[where][0]), body, deadline=60)


EXTRA = {"epoch": 7, "t": torch.ones(2, 3)}
FORMS: dict[str, Callable[[Plain], Any]] = {
    "top": lambda p: {"model": p.model.state_dict(), "optim": p.optimizer_state()},
    "below": lambda p: {"app": {"model": p.model.state_dict(), "optimizer": p.optimizer_state()}},
    "flat": lambda p: {"model": p.model.state_dict(), "optim": p.optimizer_state(flat=True)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_run(form: str, tmp_path: Path) -> None:
    plain = Plain()
    theirs = save(tmp_path / "theirs", FORMS[form](plain) | EXTRA)
    folder = import_dcp(theirs, tmp_path / "run")
    assert not Checkpoint.find(folder).damages()
    for extra, step, model, optimizer in loaded(tmp_path / "run"):
        assert step == 2 and not differences(extra, EXTRA)
        assert not differences(model, dict(plain.model.state_dict()))
        assert not differences(optimizer, plain.optimizer_state())


def test_another_value_under_a_second_name_is_refused(tmp_path: Path) -> None:
    plain = Plain()
    state = plain.model.state_dict()
    state["head.weight"] = state["head.weight"].clone()
    state["head.weight"][3, 5] += 1
    save(tmp_path / "theirs", {"model": state, "optim": plain.optimizer_state()})
    import_dcp(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(ValueError, match=r"'head.weight' is 'embed.weight' in the model, and another value"):
        loaded(tmp_path / "run")


def test_what_is_not_understood_is_named_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Plain()
    state = {**FORMS["top"](plain), **EXTRA, "own": {"clock": complex(1, 2), "kept": 3}, "lr": slice(1)}
    theirs, words = save(tmp_path / "theirs", state), ["checkpoint", "import-dcp", str(tmp_path / "theirs")]
    assert main([*words, str(tmp_path / "run")]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "2 entries" in text and "'own.clock'" in text and "--without" in text
    more = ["--without", "own.clock", "lr", "t", "--step", "41", "--seed", "5"]
    assert main([*words, str(tmp_path / "run"), *more]) == 0
    saved = Checkpoint.find(tmp_path / "run")
    assert saved.manifest.step == 41 and theirs.exists()
    values = saved.values(saved.tensors)
    assert values["extra"] == {"epoch": 7, "own": {"kept": 3}} and values["run"]["seed"] == 5


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"weights": {"a": torch.ones(2)}, "n": 1}, "has the keys 'weights', 'n'"),
        ({"model": {"a": torch.ones(2), "b": 3}}, "are not tensors"),
        ({"model": {"a": torch.ones(2)}, "optim": {"lr": 3}}, "does not have the form"),
        ({"model": {"a": torch.ones(2)}, "optim": {"state": {"b": {"m": 1}}, "param_groups": [{"params": []}]}}, "'b'"),
        ({"model": {"a": torch.ones(2)}, "optim": {"state": {}, "param_groups": [{"params": ["b"]}]}}, "no names of"),
        ({"model": {"a": torch.ones(2).to(torch.float8_e5m2)}}, "which plait does not read"),
    ],
)
def test_other_folders_are_refused(state: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        import_dcp(save(tmp_path / "theirs", state), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_odd_tensors_and_values_come_and_go(tmp_path: Path) -> None:
    values = {"a": torch.arange(6).view(2, 3) * (1 + 2j), "b": torch.tensor(3j, dtype=torch.complex128)}
    values |= {"turned": torch.arange(12.0).view(3, 4).t(), "scalar": torch.tensor(2.5, dtype=torch.bfloat16)}
    values |= {"none": torch.empty(0, 3), "bools": torch.tensor([True, False, True])}
    values["zeros"] = torch.tensor([-0.0, torch.inf], dtype=torch.float64)
    pair = ("x", torch.arange(3))
    import_dcp(save(tmp_path / "theirs", {"model": values, "pair": pair}), tmp_path / "run")
    export_dcp(Checkpoint.find(tmp_path / "run"), tmp_path / "again")
    back = {"model": {name: torch.zeros_like(value) for name, value in values.items()}, "extra": {"pair": None}}
    dcp.load(back, checkpoint_id=tmp_path / "again", no_dist=True)
    assert not differences(back, {"model": values, "extra": {"pair": pair}}) and back["model"]["zeros"][0].signbit()


def test_a_full_disk_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save(tmp_path / "theirs", {"a": torch.zeros(40_000)})
    with small_disk(tmp_path / "small", "64k") as place:
        assert main(["checkpoint", "import-dcp", str(theirs), str(place / "run")]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and f"'{place}/run': No space left on device; need 16" in text


def test_a_model_alone_is_a_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 5)
    import_dcp(save(tmp_path / "theirs", model.state_dict()), tmp_path / "run")
    other = nn.Linear(3, 5)
    plait.run_threads("shard=2", lambda comm: plait.load(tmp_path / "run", plait.Engine(copy.deepcopy(other), comm)))
    saved = Checkpoint.find(tmp_path / "run")
    nothing = dict.fromkeys(["optimizer", "ema", "optimizer_classes", "extra"])
    run_state = {"step": 0, "seed": 0, "loss_scale": None}
    assert saved.manifest.step == 0 and saved.values(saved.tensors) == nothing | {"run": run_state}
    assert all(torch.equal(saved.kind("model")[name].read(tuple((0, n) for n in value.shape)), value)
               for name, value in model.state_dict().items())  # fmt: skip


def test_torch_reads_what_is_exported(tmp_path: Path) -> None:
    def body(comm: Comm) -> Any:
        training = Training.begin(comm, "pipe")
        training.go(0, 2)
        training.save(tmp_path / "run")
        return training.state()

    (model, ema, optimizer, step, schedule, decay), *_ = run(Mesh.parse(LAYOUTS["pipe"][0]), body, deadline=60)
    saved = Checkpoint.find(tmp_path / "run")
    export_dcp(saved, tmp_path / "theirs", ties={"head.weight": "embed.weight"})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run", "theirs"]
    schedule["milestones"] = {str(key): n for key, n in schedule["milestones"].items()}  # torch's keys are texts
    extra = {"schedule": schedule, "at": (1, None)}
    ema = {name: ema[name] for name in saved.kind("ema")}  # what trains
    wanted = {"model": model, "optim": optimizer, "ema": ema, "run": step, "extra": extra}

    def emptied(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)({key: emptied(one) for key, one in value.items()})
        if isinstance(value, list):
            return [emptied(one) for one in value]
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    read = emptied(wanted)
    dcp.load(read, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert not differences(read, wanted) and decay == 0.9
    import_dcp(tmp_path / "theirs", tmp_path / "again", without=["run", "ema", "extra"])
    for _, _, model_again, optimizer_again in loaded(tmp_path / "again", "psdp"):
        assert not differences((model_again, optimizer_again), (model, optimizer))


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------

RANKS = Path(__file__).with_name("fsdp2_ranks.py")


@pytest.mark.parametrize(("ranks", "where", "form"), [(3, "pipe", "app"), (2, "bf16", "flat")])
def test_what_fsdp2_saves_goes_on_in_any_layout(ranks: int, where: str, form: str, tmp_path: Path) -> None:
    processes(RANKS, ranks, "save", tmp_path / "theirs", tmp_path / "whole", form)
    wanted: dict[str, Any] = torch.load(tmp_path / "whole")
    folder = import_dcp(tmp_path / "theirs", tmp_path / "run")

    assert Checkpoint.find(folder).manifest.step == 2
    for extra, step, model, optimizer in loaded(tmp_path / "run", where):
        assert (step, extra["epoch"], extra["words"]) == (2, 7, ["a", ("b", None)])
        assert not differences(extra["rng"], torch.arange(9, dtype=torch.uint8))
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


# ---- folders of transformers ----------------------------------------------------------------------------------------

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
