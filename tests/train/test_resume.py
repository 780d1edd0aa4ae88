"""``plait train --save-every --resume``: a resumed run equals an uninterrupted one, or is refused."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import train_cases
from train_cases import MADE, made, metrics, write_text

from plait.checkpoint.folder import checkpoints
from plait.run.commands.main import main
from plait.run.job.own import load_job

SIZES = [*train_cases.SIZES, "--batch", "7"]
RATES = ["--lr-schedule", "cosine", "--warmup", "3", "--weight-decay", "0.3", "--lr", "0.01"]
Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory, 90)


@pytest.fixture
def train(text: str, tmp_path: Path) -> Train:
    """Runs ``plait train`` on threads into a folder, and gives what its steps have made."""

    def run(folder: str, *words: str, code: int = 0) -> list[dict[str, Any]]:
        out = tmp_path / folder
        flags = ["--world", "thread", *SIZES, *RATES, "--data", text, "--out", str(out)]
        assert main(["train", *flags, *words]) == code
        return made(out)

    return run


def cut_off(whole: Path, part: Path, step: int) -> None:
    """The folder of a run that ended after its checkpoint of a step: in the middle of a line of metrics."""
    shutil.copytree(whole, part)
    for folder in checkpoints(part / "checkpoints"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (part / "summary.json").unlink()
    lines = (part / "metrics.jsonl").read_text().splitlines(keepends=True)
    (part / "metrics.jsonl").write_text("".join(lines[: step + 2]) + lines[step + 2][:20])


@pytest.mark.parametrize(
    "layout",
    [
        "--mesh shard=3 --strategy zero3 --microbatches 2",
        "--mesh shard=2 --strategy zero1 --cut tensor --optimizer sgd",
        "--mesh pipe=2 --strategy zero2 --microbatches 2 --workers 1",
    ],
)
def test_it_is_the_run_that_was_never_stopped_to_the_bit(
    layout: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*layout.split(), "--steps", "9", "--save-every", "2"]
    whole = train("whole", *words)
    cut_off(tmp_path / "whole", tmp_path / "part", 4)
    capsys.readouterr()
    assert train("part", *words, "--resume", "auto", "--verify") == whole
    shown = capsys.readouterr().out
    assert "resumed at step 4" in shown and "verdict: bitwise" in shown and "steps 5 to 9" in shown
    names = [[folder.name for folder in checkpoints(tmp_path / run / "checkpoints")] for run in ("whole", "part")]
    assert names[0] == names[1] == [f"step-{step:06d}" for step in (2, 4, 6, 8, 9)]
    last = [(tmp_path / run / "checkpoints/step-000009") for run in ("whole", "part")]
    assert main(["train", "--world", "thread", *words, "--out", str(tmp_path / "part")]) == 2, "metrics are there"
    files = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in last]
    assert files[0] == files[1]
    for name in files[0]:
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()


def test_three_resumes_in_an_epoch_each_in_another_layout(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With workers that had read ahead, and an epoch whose last step is smaller."""
    words = ["--epochs", "2", "--batch", "19", "--workers", "1", "--save-every", "3"]
    whole = train("whole", "--mesh", "shard=3", *words)
    assert len({line["tokens"] for line in whole}) > 1 and len(whole) > 16
    before = tmp_path / "whole"
    for number, (step, layout) in enumerate([(3, "shard=2"), (6, "pipe=2 --microbatches 3"), (9, "replica=2")]):
        cut_off(before, tmp_path / str(number), step)
        strategy = ["--strategy", "ddp"] * (layout == "replica=2")
        again = train(str(number), "--mesh", *layout.split(), *strategy, *words, "--resume", "auto")
        assert [line["tokens"] for line in again] == [line["tokens"] for line in whole]
        for ours, theirs in zip(again, whole, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        assert "another layout: was zero3" in capsys.readouterr().out
        before = tmp_path / str(number)


def test_another_learning_rate_is_taken_where_it_is_named(train: Train, tmp_path: Path) -> None:
    words = ["--mesh", "shard=2", "--steps", "10", "--save-every", "2"]
    whole = train("whole", *words)
    cut_off(tmp_path / "whole", tmp_path / "part", 4)
    other = train("part", *words, "--resume", "auto", "--lr", "0.02", "--change", "lr")
    assert other[:5] == [*whole[:4], whole[4] | {"lr": 2 * whole[4]["lr"]}]
    assert [line["lr"] for line in other[4:]] == [2 * line["lr"] for line in whole[4:]]
    assert other[6]["loss"] != whole[6]["loss"]
    cut_off(tmp_path / "part", tmp_path / "again", 6)  # the same command, in a queue that starts it again
    assert train("again", *words, "--resume", "auto", "--lr", "0.02", "--change", "lr", "dropout") == other


SAME = ["--mesh", "shard=2", "--steps", "6", "--save-every", "2"]


@pytest.fixture(scope="module")
def finished(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "whole"
    assert main(["train", "--world", "thread", *SIZES, *RATES, *SAME, "--data", text, "--out", str(out)]) == 0
    return out


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "whole")
    cut_off(finished, tmp_path / "part", 2)
    return tmp_path / "part"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--resume auto --lr 0.02", "lr was 0.01 and is 0.02. Give the settings of that run, or --change lr"),
        ("--resume auto --lr 0.02 --clip 3 --change lr", "clip was 1.0 and is 3.0"),
        ("--resume auto --steps 9", "steps was 6 and is 9"),
        ("--resume auto --seed 3 --change seed", "seed was 0 and is 3, which cannot change within a run"),
        ("--resume auto --optimizer sgd --change optimizer", "optimizer was 'adamw' and is 'sgd', which cannot"),
        ("--resume auto --dropout 0.2 --width 32", "width was 16 and is 32; dropout was 0.1 and is 0.2"),
        ("--resume auto --change lr-schedule", "change lr-schedule: no such setting decides a run: did you mean lr_s"),
        ("--resume auto --change mesh lr", "change mesh: no such setting decides a run: layout and places may differ"),
        ("--resume auto --verify --lr 0.02 --change lr", "verify beside change"),
        ("--resume nowhere", "there is no checkpoint in 'nowhere'"),
        ("--resume {whole} --steps 6", "has made 6 steps, and the run ends at 6"),
        ("--resume {whole}/checkpoints/step-000004", "the metrics of a run other than the one to go on with"),
        ("--resume {part}/checkpoints/step-000001", "is no whole checkpoint"),
    ],
)
def test_another_run_is_refused_field_by_field(
    words: str, message: str, stopped: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words.format(part=stopped, whole=stopped.with_name("whole"))
    files = {path: path.read_bytes() for path in sorted(stopped.rglob("*")) if path.is_file()}
    capsys.readouterr()
    given = ["train", "--world", "thread", *SIZES, *RATES, "--data", text, *SAME, "--out", str(stopped)]
    assert main([*given, *words.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and "Traceback" not in shown.err and shown.err.count("\n") == 1
    assert {path: path.read_bytes() for path in sorted(stopped.rglob("*")) if path.is_file()} == files


def test_another_text_is_another_run(
    stopped: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that was moved is the same one; one that was changed is not."""
    moved, changed = tmp_path / "moved", tmp_path / "changed"
    moved.write_text(Path(text).read_text())
    changed.write_text(Path(text).read_text().replace("7 squared", "8 squared"))
    given = ["train", "--world", "thread", *SIZES, *RATES, *SAME, "--out", str(stopped), "--resume", "auto"]
    assert main([*given, "--data", str(changed)]) == 2
    assert "data was" in capsys.readouterr().err
    assert main([*given, "--data", str(moved)]) == 0


def test_auto_begins_where_there_is_nothing_and_ends_where_nothing_is_left(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SAME, "--resume", "auto"]
    whole = train("run", *words)
    capsys.readouterr()
    assert train("run", *words) == whole
    assert "nothing is left to do" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run/checkpoints")  # as if it had been ended before it saved
    assert main(["train", "--world", "thread", *SIZES, *words, "--out", str(tmp_path / "run")]) == 2, "it was finished"
    (tmp_path / "run/summary.json").unlink()
    assert train("run", *words) == whole


def test_epochs_that_are_finished_are_known_before_the_text_is_read(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--mesh", "shard=2", "--epochs", "1", "--batch", "40", "--save-every", "2"]
    whole = train("run", *words)
    assert train("run", *words, "--resume", "auto") == whole
    assert "nothing is left to do" in capsys.readouterr().out
    train("run", *words, "--resume", "auto", "--epochs", "2", code=2)
    assert "epochs was 1 and is 2" in capsys.readouterr().err
    longer = train("run", *words, "--resume", "auto", "--epochs", "2", "--change", "epochs")
    assert longer[: len(whole)] == whole and len(longer) == 2 * len(whole)


JOB = """
import torch
import plait

job = plait.UserJob(
    build=lambda: torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1)),
    loss_fn=lambda model, batch: (model(batch["x"]) - batch["y"]).square().sum(),
    batches=lambda step: {"x": torch.full((4, 3), step + SHIFT), "y": torch.ones(4, 1)},
    optimizer=lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=DECAY),
)
"""


@pytest.mark.parametrize(
    ("shift", "decay", "says"),
    [("0.5", "0.0", None), ("0.5", "0.2", "weight_decay of group 0 of the optimizer was 0.0 and is 0.2"),
     ("0.75", "0.0", "data was 'digest ")],
)  # fmt: skip
def test_a_job_that_was_edited_is_another_run(
    shift: str, decay: str, says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    for number, (own_shift, own_decay) in enumerate([("0.5", "0.0"), (shift, decay)]):
        file = tmp_path / "job.py"
        file.write_text(JOB.replace("SHIFT", own_shift).replace("DECAY", own_decay))
        load_job.cache_clear()  # another process would read it anew
        words = ["--job", f"{file}:job", "--mesh", "shard=2", "--world", "thread", "--save-every", "2"]
        steps = ["--steps", str(4 + 2 * number), "--resume", "auto", "--out", str(tmp_path / "out")]
        codes.append(main(["train", *words, *steps]))
    assert codes == [0, 2 if says else 0]
    shown = capsys.readouterr()
    assert says is None or says in shown.err


def test_overwrite_takes_the_checkpoints_of_an_earlier_run_away(train: Train, tmp_path: Path) -> None:
    train("run", *SAME)
    (tmp_path / "run/checkpoints/step-000099").mkdir()
    again = train("run", "--mesh", "shard=2", "--steps", "3", "--save-every", "2", "--overwrite")
    names = [folder.name for folder in checkpoints(tmp_path / "run/checkpoints")]
    assert names == ["step-000002", "step-000003"] and len(again) == 3


LAYOUTS = {
    **{row: f"--mesh shard=3 --strategy {row}" for row in ("ddp", "zero1", "zero2", "zero3", "psdp")},
    "hsdp": "--mesh replica=2,shard=2 --strategy hsdp",
    "hpz": "--mesh replica=2,shard=2 --strategy hpz",
    "tensors": "--mesh shard=3 --strategy zero3 --cut tensor",
    "tensor": "--mesh tensor=2,shard=2 --strategy zero3 --kv-heads 2",
    "pipe": "--mesh pipe=2,shard=2 --microbatches 2 --schedule interleaved --layers 4",
    "zbv": "--mesh pipe=2 --microbatches 4 --schedule zbv --strategy ddp --layers 4",
    "bf16": "--mesh shard=2 --dtype bf16-mixed",
    "fp16": "--mesh shard=3 --dtype fp16-mixed --loss-scale 1e9",
    "offload": "--mesh shard=2 --offload --workers 1",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_any_step_it_is_the_uninterrupted_run_over_fifty_steps(
    layout: str, text: str, tmp_path: Path
) -> None:
    """A process with all ranks is ended by SIGKILL five times in a row, at steps that are drawn."""
    flags = ["train", "--world", "thread", *SIZES, *RATES, "--data", text, "--steps", "50", "--save-every", "4"]
    given = [*flags, *(word.replace(",", " ") for word in LAYOUTS[layout].split())]
    drawn = random.Random(layout)
    kills = sorted(drawn.sample(range(1, 49), 5))
    script = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), json.dumps(kills), json.dumps(given)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    whole, part = (metrics(tmp_path / run) for run in ("whole", "part"))
    names = (*MADE, "loss_scale", "made")
    both = [[{name: line.get(name) for name in names} for line in run] for run in (whole, part)]
    assert both[0] == both[1] and len(whole) == 50
    if layout == "fp16":
        assert len({line["loss_scale"] for line in whole}) > 1, "the loss scale is live"
    last = [sorted((tmp_path / run / "checkpoints/step-000050").glob("*.safetensors")) for run in ("whole", "part")]
    assert [path.read_bytes() for path in last[0]] == [path.read_bytes() for path in last[1]]
