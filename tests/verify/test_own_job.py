"""A user's own job, compared with one process: from Python, from a file, over a matrix, and with mistakes."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.referee.verify.cases import cells_of_job
from plait.run.commands.main import main
from plait.run.config.settings import VerifyConfig


class Net(nn.Module):
    """A user's model: nested, tied nowhere, with dropout, a norm and a buffer, in no usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3, bias=False)
        self.body = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 12), nn.LayerNorm(12))
        self.register_buffer("scale", torch.rand(()) + 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x * self.scale))
        return out


def batch(step: int) -> tuple[Tensor, dict[str, Any]]:
    """13 samples, 11 in every third step; a weight per class goes to every microbatch."""
    generator, num = torch.Generator().manual_seed(step), 11 if step % 3 == 2 else 13
    x = torch.randn(num, 7, generator=generator)
    return x, {"y": torch.randint(3, (num,), generator=generator), "weights": torch.tensor([1.0, 2.0])}


def loss_sum(model: nn.Module, batch: Any) -> Tensor:
    x, rest = batch
    return F.cross_entropy(model(x), rest["y"], reduction="sum") * rest["weights"].sum()


JOB = plait.UserJob(Net, loss_sum, batch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))


def test_a_mean_where_a_sum_is_due_is_seen() -> None:
    mean = plait.UserJob(Net, lambda model, b: F.cross_entropy(model(b[0]), b[1]["y"]), batch)
    with pytest.raises(ValueError, match="the loss is a mean"):
        plait.verify(mean)
    hidden = replace(mean, loss_fn=lambda model, b: loss_sum(model, b) / len(b[0]))
    told = str(plait.verify(hidden, microbatches=2))
    assert "different\nfirst wrong: step 1, the loss, on all 2 ranks" in told and "DIFFERENT" in told


FILE = """
import torch, plait
from torch import nn

def late():
    from beside import layers
    return nn.Sequential(*layers())

def asks(something):
    return something

def batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(9, 4, generator=g), torch.randn(9, 2, generator=g)

def loss_sum(model, batch):
    return (model(batch[0]) - batch[1]).square().sum()

def build():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

job = plait.UserJob(build, loss_sum, batch, count_fn=lambda batch: batch[1].numel())
def made(): return job
later = plait.UserJob(late, loss_sum, batch)
number = 3
broken = plait.UserJob(lambda: 3, loss_sum, batch)
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("from torch import nn\ndef layers(): return [nn.Linear(4, 2)]\n")
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["job", "made", "later"])
def test_from_a_file(name: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--job", f"{place}:{name}", "--mesh", "shard=2", "--steps", "2", "--lr", "0.01"]) == 0
    assert "verdict: bitwise" in capsys.readouterr().out


def test_trained_and_compared(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--job", f"{place}:job", "--mesh", "shard=2", "--world", "thread", "--steps", "4", "--verify"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"{place}:job, 86 parameters, fp32, 9 samples a step" in out and "verdict: bitwise" in out


def test_a_matrix(place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every two settings meet; what is printed for a cell runs that cell."""
    config = VerifyConfig(job=f"{place}:job")
    cells = cells_of_job(config, "small")
    assert {cell.layout.strategy for cell in cells} == set(plait.TABLE)
    assert any("pipe=2" in cell.machine.mesh for cell in cells)
    some = cells[:: len(cells) // 4]
    monkeypatch.setattr("plait.referee.verify.matrix.cells_of_job", lambda *_: some)
    assert main(["verify", "--job", f"{place}:job", "--matrix", "small"]) == 0
    assert f"{len(some)} bitwise; all as due" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("{}:job --mesh shard=2 --workers 1", "made by the rank, so leave workers out"),
        ("{}:jib", "has no 'jib'; the jobs in it: job, later, broken"),
        ("{}:number", "is int: give a plait.UserJob"),
        ("{}:broken", "build returns int"),
        ("{}:asks", "is function: give a plait.UserJob, or a function that returns one"),
        ("{}", "give a file and a name in it, as in my_job.py:job"),
        ("no{}:job", "there is no file"),
        ("{}:job --batch 3", "batch 3 beside job, which has the data"),
        ("{}:job --model mlp", "model mlp beside job, which has the model"),
        ("{}:job --mesh shard=5 --microbatches 2", "a batch of 9 samples cannot fill"),
        ("{}:job --mesh tensor=2", "Sequential carries no tensor plan"),
        ("{}:job --epochs 2", "epochs is for text"),
    ],
)
def test_mistakes(words: str, told: str, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = "train" if "--workers" in words else "verify"
    assert main([command, "--job", *words.format(place).split()]) == 2
    err = capsys.readouterr().err
    assert told in err and err.count("\n") == 1


def test_a_layout_that_is_impossible_is_refused_in_python_too() -> None:
    with pytest.raises(ValueError, match="cannot fill 8 data ranks"):
        plait.verify(JOB, mesh="shard=8", microbatches=2)
    with pytest.raises(ValueError, match="lr 9 beside job, which has the optimizer"):
        plait.verify(JOB, lr=9)


def test_what_is_another_run_on_every_rank_is_refused() -> None:
    model, shared = Net(), nn.ReLU()
    drawn_elsewhere = lambda: nn.Linear(7, 3).apply(lambda m: nn.init.constant_(m.bias, random.random()))  # noqa: E731
    for build, told in (
        (lambda: model, "build returns the model itself twice"),
        (lambda: nn.Sequential(nn.Linear(7, 3), shared), "build returns 1 twice"),
        (drawn_elsewhere, "build gives 'bias' other values each time"),
        (lambda: None, "build returns NoneType"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            plait.verify(replace(JOB, build=build))
    with pytest.raises(ValueError, match="batches is empty"):
        plait.verify(replace(JOB, batches=[]))
    with pytest.raises(ValueError, match="batches gives other values for step 0"):
        plait.verify(replace(JOB, batches=lambda step: (torch.randn(8, 7), {"y": torch.zeros(8, dtype=torch.long)})))


def test_counts_are_whole_numbers() -> None:
    of_tensors = replace(JOB, count_fn=lambda batch: torch.tensor(len(batch[0])))
    assert plait.verify(of_tensors, microbatches=2).word == "bitwise"
    with pytest.raises(ValueError, match=r"a count of 6\.5: it is the number of terms"):
        plait.verify(replace(JOB, count_fn=lambda batch: 6.5))
