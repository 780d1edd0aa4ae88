"""Users' jobs: differences by rounding alone are not reported, and losses that are not sums are named."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from engine_cases import Made
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import plait
from plait.forward.tensor_parallel import StageAxis
from plait.referee.verify import run
from plait.referee.verify.observed import Record
from plait.table.tensor_plan import BACKWARD

WIDTH, CLASSES = 12, 5


def attention() -> nn.Module:
    """Three heads of four.  Softmax cancels the key's bias, so that its gradient is made of rounding alone."""

    def run(m: Any, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (m.query, m.key, m.value)]
        y: Tensor = x + m.output(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))
        return y

    return Made(run, **{name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value", "output")})


class Encoder(nn.Module):
    tensor_plan: ClassVar = {
        **{f"blocks.*.{name}": "column by 4" for name in ("query", "key", "value")},
        "blocks.*.output": "row",
    }

    def __init__(self, *, times: int = 1) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(3, WIDTH), nn.ModuleList([attention(), attention()])
        self.unused, self.head, self.times = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), times

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in [*self.blocks] * self.times:
            x = block(x)
        y: Tensor = self.head(x.mean(1))
        return y


class Pooled(Encoder):
    """A unit runs, and the loss does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        self.unused(x)
        y: Tensor = self.head(x.mean(1))
        return y


class Reading(Encoder):
    """The model's own code reads a weight of a unit inside of it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x.mean(1) @ self.embed.weight.T)[:, :CLASSES]


class Tied(nn.Module):
    """Embedding and head have one weight.  It is laid where it is written first: in the head, in CamemBERT, which runs
    last and lends it to what runs first."""

    def __init__(self, *, head_first: bool, frozen: bool) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.embed, self.blocks = nn.Embedding(CLASSES, WIDTH), nn.ModuleList([attention(), attention()])
        if not head_first:
            self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.embed.weight = self.head.weight
        self.head.requires_grad_(not frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x.mean(1))
        return y


def tokens(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randint(CLASSES, (12, 7), generator=random), torch.randint(CLASSES, (12,), generator=random)


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(12, 7, 3, generator=random), torch.randint(CLASSES, (12,), generator=random)


def loss_sum(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    features = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(features @ features.T, torch.arange(len(features)), reduction="sum")


JOB = plait.UserJob(Encoder, loss_sum, batch)


def flat(change: Callable[[nn.Linear], nn.Module]) -> plait.UserJob:
    return replace(JOB, build=lambda: nn.Sequential(nn.Flatten(), change(nn.Linear(21, 9)), nn.Linear(9, CLASSES)))


@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("mesh", ["shard=3", "tensor=3"])
def test_a_gradient_that_is_rounding_alone_is_no_difference(mesh: str, dtype: str) -> None:
    verdict = plait.verify(JOB, mesh, "zero3", dtype=dtype, steps=3)
    assert verdict.word == ("bitwise" if mesh == "shard=3" else "equal"), verdict
    excused = [f for f in (*verdict.tree, *verdict.plain) if f.asked == "8 spreads"]
    assert {f.name.split("[")[0] for f in excused if f.kind == "gradient"} <= {f"blocks.{i}.key.bias" for i in (0, 1)}
    assert bool(excused) is (mesh == "tensor=3"), "the floor has room for it, and not for later steps"
    assert verdict.looked in (range(1, 4) if excused and dtype != "bf16" else range(1)), "no more than it takes"
    assert plait.verify(JOB, mesh, "zero3", dtype=dtype, steps=3, spread=0).equal is not bool(excused)


def more_than_rounding(record: Record) -> None:
    record.gradients[0]["blocks.1.key.bias"][3] += 1e-6


def further_than_any(record: Record) -> None:
    """No honest run moves a parameter as far, though by less than a few units in its last place."""
    record.steps[-1].updated["head.weight"] *= 1.03


@pytest.mark.parametrize(
    ("harm", "settings", "place"),
    [
        (more_than_rounding, {}, ("sum", "blocks.1.key.bias")),
        (further_than_any, {"dtype": "bf16", "lr": 1e-5}, ("update", "head.weight")),
    ],
)
def test_rounding_excuses_nothing_else(
    harm: Callable[[Record], None], settings: dict[str, Any], place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = run.run_plain

    def wrong(*args: Any) -> Record:
        record = right(*args)
        harm(record)
        return record

    monkeypatch.setattr(run, "run_plain", wrong)
    verdict = plait.verify(JOB, "shard=3", "zero3", steps=3, **settings)
    assert verdict.word == "different" and verdict.first is not None
    assert (verdict.first.phase, verdict.first.name) == place


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (replace(JOB, loss_fn=contrastive), r"in 6 parts: does it compare samples with one another"),
        (flat(lambda linear: nn.Sequential(linear, nn.BatchNorm1d(9))), r"in 6 parts: '1.1' normalises over the"),
        (flat(spectral_norm), r"'1\.parametrizations\.weight\.0' changes its buffers in each .* so the 2 microbatches"),
    ],
)
def test_a_loss_that_is_no_sum_over_samples_is_named(job: plait.UserJob, told: str) -> None:
    verdict = plait.verify(job, "shard=3", "ddp", steps=2, microbatches=2)
    assert verdict.word == "different" and verdict.first is not None and verdict.first.step == 0
    assert re.search(rf"in plain PyTorch either.*{told}|{told}.* in plain PyTorch too$", verdict.first.cause)


def test_a_fault_of_the_tensor_axis_is_named_and_not_the_gradient_of_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward's sum over the axis is wrong in the first block; the second's key bias, before it, is rounding."""
    original = StageAxis.start_sum

    def wrong(self: StageAxis, x: Tensor, note: Any) -> Any:
        if (note.phase, note.unit) == (BACKWARD, "blocks.0") and self.index == 1:
            x = x * 1.001
        return original(self, x, note)

    monkeypatch.setattr(StageAxis, "start_sum", wrong)
    verdict = plait.verify(JOB, "tensor=3", "ddp", dtype="fp64", steps=2)
    assert verdict.word == "different" and verdict.first is not None
    assert "key.bias" not in verdict.first.name and verdict.first.phase == "backward", verdict
