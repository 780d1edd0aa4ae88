"""A witness only watches, and its record is bounded; its folder is held against itself and against the job."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Made
from loops import RATE, Net, batch, loss_sum, run, terms, the_job
from safetensors.torch import load_file, save_file
from torch import nn

import plait
from plait.referee.values import storable
from plait.referee.witness.judge import judge
from plait.referee.witness.stored import read_witnessed
from plait.run.commands.main import main


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        whole = batch(step)
        (loss_sum(model, whole) / terms(whole)).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            loss_sum(model, batch(step + 7))  # an evaluation
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def fresh() -> Net:
    torch.manual_seed(3)
    return Net()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def loop() -> tuple[Net, torch.optim.Optimizer]:
    model = fresh()
    return model, sgd(list(model.parameters()))


def layered() -> tuple[Net, list[torch.optim.Optimizer]]:
    """An optimizer for each layer."""
    model = fresh()
    return model, [sgd(list(layer.parameters())) for layer in (model.up, model.down)]


def test_the_run_is_the_same_to_the_bit_and_no_hook_is_left(tmp_path: Path) -> None:
    (plain, own), (seen, optimizer) = loop(), loop()
    train(plain, [own], 3)
    with plait.witness(seen, optimizer, tmp_path / "w"):
        train(seen, [optimizer], 3)
    for one, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not seen._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    files = sorted(path.name for path in (tmp_path / "w/rank-00000").iterdir())
    train(seen, [optimizer], 1)
    assert files == sorted(path.name for path in (tmp_path / "w/rank-00000").iterdir())


def test_so_many_steps_are_written_and_no_more(tmp_path: Path) -> None:
    model, optimizer = loop()
    with plait.witness(model, optimizer, tmp_path / "w", steps=2) as seen:
        train(model, [optimizer], 5)
    assert seen.step == 2 and read_witnessed(tmp_path / "w").steps == 2
    found = judge(the_job(), tmp_path / "w")
    assert found.equal and found.text.startswith("2 steps of 1 rank:"), found


def test_a_model_in_a_wrapper_and_an_optimizer_for_each_layer(tmp_path: Path) -> None:
    model, optimizers = layered()
    wrapped = Made(lambda m, x: m.module(x), module=model)
    with plait.witness(wrapped, optimizers, tmp_path / "w"):
        train(wrapped, optimizers, 2)
    assert judge(the_job(), tmp_path / "w").equal


def test_mistakes_are_refused_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer = loop()
    with pytest.raises(ValueError, match="4 of the optimizer's tensors are not parameters of the model"):
        plait.witness(fresh(), optimizer, tmp_path / "w")
    with pytest.raises(ValueError, match="rank 2 of 2: ranks go from 0 to 1"):
        plait.witness(model, optimizer, tmp_path / "w", rank=2, ranks=2)
    with pytest.raises(ValueError, match="steps is 0: give a whole number from 1"):
        plait.witness(model, optimizer, tmp_path / "w", steps=0)
    with pytest.raises(ValueError, match=r"pieces has .* for 'up.bias', which has the shape \(7,\) on this rank"):
        plait.witness(model, optimizer, tmp_path / "w", pieces={"up.bias": ((0, 3),)})
    with plait.witness(model, optimizer, tmp_path / "w"):
        pass
    again = plait.witness(model, optimizer, tmp_path / "w")
    with pytest.raises(ValueError, match="is not empty: give a new folder"), again:
        pass


def test_one_of_two_optimizers_steps_twice(tmp_path: Path) -> None:
    model, optimizers = layered()
    with plait.witness(model, optimizers, tmp_path / "w"):
        train(model, [optimizers[0], *optimizers], 1)
    found = judge(the_job(), tmp_path / "w")
    assert (found.step, found.phase) == (0, "update") and "applied twice" in found.cause, found


JOB = "from loops import user_job\njob = user_job()\nother = user_job('adamw')\n"


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right") / "w"
    run(folder)
    return folder


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "jobs.py").write_text(JOB)
    return f"{tmp_path / 'jobs.py'}:job"


def test_the_command_says_it_and_writes_it(
    witnessed: Path, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told.json"
    assert main(["judge", str(witnessed), "--job", job, "--json", str(told)]) == 0
    assert capsys.readouterr().out.startswith("equal: 3 steps of 2 ranks: the run of a single process")
    assert json.loads(told.read_text())["equal"] is True
    run(tmp_path / "wrong", "sum")
    assert main(["judge", str(tmp_path / "wrong"), "--job", job, "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["phase"], found["step"], found["ranks"], round(found["factor"])) == ("gradient", 0, [0, 1], 18)
    assert main(["judge", str(witnessed), "--job", job.replace(":job", ":other")]) == 1
    assert "lr is 0.1" not in capsys.readouterr().out


def change(folder: Path, kind: str, dtype: torch.dtype) -> None:
    file = folder / "rank-00001/step-000001.safetensors"
    tensors = {key: t.to(dtype) if key.startswith(kind) else t for key, t in load_file(file).items()}
    save_file(storable(tensors), file, {"plait": read(file, 1)})


def read(path: Path, step: int) -> str:
    """The JSON of a step, as if it were another step's."""
    data = path.read_bytes()
    told = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["plait"])
    return json.dumps({**told, "step": step})


START, STEPS = (
    "rank-00000/start.safetensors",
    [f"rank-0000{r}/step-00000{n}.safetensors" for r in (0, 1) for n in (0, 1)],
)
FIRST, SECOND, OTHER, LAST = STEPS


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def other_sizes(folder: Path) -> None:
    save_file({"gradient/up.bias": torch.ones(2)}, folder / SECOND, {"plait": read(folder / FIRST, 1)})


HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no rank 1": (lambda w: shutil.rmtree(w / "rank-00001"), "has 1 of 2 ranks, and rank 1 is missing"),
    "cut": (lambda w: (w / LAST).write_bytes((w / LAST).read_bytes()[:-8]), "step-000001.safetensors' is damaged"),
    "garbage": (lambda w: (w / START).write_bytes(b"\x80\x04nothing of ours" * 9), "start.safetensors' is damaged"),
    "empty": (lambda w: (w / OTHER).write_bytes(b""), "step-000000.safetensors' is damaged"),
    "strange": (
        lambda w: save_file({"weight": torch.ones(3)}, w / SECOND, {"plait": "[]"}),
        "step-000001.safetensors' is damaged, it is not what a witness writes",
    ),
    "other sizes": (other_sizes, "is not a piece that this rank has"),
    "moved": (lambda w: shutil.copy(w / FIRST, w / SECOND), "it is not a step of a witness"),
    "two runs": (
        lambda w: shutil.copytree(w / "rank-00001", w / "rank-00002"),
        "has a rank 2, and the run had 2 ranks: it holds two runs",
    ),
    "no step": (lambda w: (w / OTHER).unlink(), "rank 1 has no whole step"),
    "a folder": (lambda w: become_a_folder(w / START), "it is no plain file"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_harm_is_refused(
    witnessed: Path, job: str, tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(witnessed, tmp_path / "w")
    harms, says = HARMS[harm]
    harms(tmp_path / "w")
    assert main(["judge", str(tmp_path / "w"), "--job", job]) == 2
    shown = capsys.readouterr().err
    assert says in shown and shown.count("\n") == 1, shown


DTYPES = [torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gradient", "after", "before"])
def test_tensors_of_another_dtype_are_judged_or_refused(
    witnessed: Path, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    shutil.copytree(witnessed, tmp_path / "w")
    change(tmp_path / "w", kind, dtype)
    if kind == "before" or (kind, dtype) == ("gradient", torch.float64):
        assert judge(the_job(), tmp_path / "w").equal
        return
    with pytest.raises(ValueError, match="is not a piece that this rank has"):
        judge(the_job(), tmp_path / "w")


def test_no_folder_and_another_job(
    witnessed: Path, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        ([str(tmp_path / "none"), "--job", job], "there is no such folder"),
        ([str(tmp_path / ("n" * 300)), "--job", job], "File name too long; give the one that"),
        ([str(tmp_path / "jobs.py"), "--job", job], "Not a directory; give the one that"),
        ([str(tmp_path), "--job", job], "has no rank-00000"),
        (
            [str(witnessed), "--model", "mlp", "--layers", "2", "--width", "5"],
            "is of another job: it has not '0.linear.bias'",
        ),
        ([str(witnessed), "--job", job, "--dtype", "fp64"], "give --dtype"),
        ([str(witnessed), "--job", job, "--dtype", "bf16-mixed"], "a judgement is of one dtype"),
        (["--job", job], "folder is empty"),
    ):
        assert main(["judge", *words]) == 2, words
        shown = capsys.readouterr().err
        assert says in shown and shown.count("\n") == 1, (words, shown)


def test_no_bit_of_a_gradient_is_believed(tmp_path: Path) -> None:
    """A number that was changed in the folder is a wrong gradient, or a wrong update, of that very parameter."""
    run(tmp_path / "w")
    file = tmp_path / "w/rank-00001/step-000001.safetensors"
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for name, phase in (("gradient/down.weight", "gradient"), ("after/down.weight", "update")):
        changed = bytearray(data)
        changed[8 + size + header[name]["data_offsets"][0] + 2] ^= 0x40  # a high bit of the first element's fraction
        file.write_bytes(changed)
        found = judge(the_job(), tmp_path / "w")
        assert (found.step, found.phase, found.name, found.ranks) == (1, phase, "down.weight", (1,)), found
