"""Cases of stock models: the models, as their users build them, and a layout held against one process.

    bitwise(gpt2(), "pipe=2 shard=2", "zero3", schedule="zb_h1")

Only GPT-2's ``pipeline_links`` is written for plait, because GPT-2 names none itself.  Batches are ragged in two
ways: sample numbers do not divide over microbatches, and masks leave different numbers of targets in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.referee.verify.compare import Finding, against_tree
from plait.referee.verify.observed import RankRecord
from plait.referee.verify.record import record_layout
from plait.referee.verify.reference import run_reference
from plait.run.data.batches import Batches
from plait.run.job.job import Job
from plait.run.models import hf
from plait.step import empty_parameters
from plait.table.additions import additions
from plait.table.cells import find_strategy
from plait.table.mesh import Mesh
from plait.table.parallelism import Parallelism

Batch = dict[str, Tensor]
IGNORED = -100
LENGTH = 6
_SEEDING = threading.Lock()


class Given(Batches):
    """Global batches, dealt in parts of which later ones are larger; the first may be empty.

    Args:
        least: samples that every part gets at least.
    """

    def __init__(self, steps: list[Batch], least: int = 1) -> None:
        self.steps, self.least = steps, least

    def samples(self, step: int, first: int, count: int, global_batch: int) -> Batch:
        return {name: whole[first : first + count] for name, whole in self.steps[step].items()}

    def microbatches(
        self, step: int, data_rank: int, num_data_ranks: int, num_microbatches: int, global_batch: int
    ) -> list[Batch]:
        parts = num_data_ranks * num_microbatches
        rest = global_batch - parts * self.least
        assert rest >= 0, "too few samples"
        bounds = [i * self.least + rest * i * i // parts**2 for i in range(parts + 1)]
        mine = range(data_rank * num_microbatches, (data_rank + 1) * num_microbatches)
        return [self.samples(step, bounds[i], bounds[i + 1] - bounds[i], global_batch) for i in mine]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


# ---- text ---------------------------------------------------------------------------------------------------------


def text(samples: int = 13, vocabulary: int = 32) -> list[Batch]:
    """Tokens and targets, int64 [samples, LENGTH]; sample i has a target up to some place, sample 1 none at all."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(3):
        tokens_BT = torch.randint(vocabulary, (samples, LENGTH), generator=generator)
        targets_BT = torch.randint(vocabulary, (samples, LENGTH), generator=generator)
        ends_B = torch.randint(1, LENGTH + 1, (samples,), generator=generator)
        ends_B[1] = 0
        targets_BT[torch.arange(LENGTH) >= ends_B[:, None]] = IGNORED
        made.append({"tokens": tokens_BT, "targets": targets_BT})
    return made


def causal(build: Callable[[], nn.Module], width: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Job:
    """A causal language model's job."""
    functions = build, hf.loss_sum, hf.token_count
    job = Job(*functions, Given(text()), adamw, 13, dtype, 0, lambda batch: tuple(batch["tokens"].shape), width)
    return replace(job, **changes)


def gpt2_model(layers: int = 2, **changes: Any) -> nn.Module:
    """``GPT2LMHeadModel`` as it comes: dropout 0.1 in three places, the head tied to the embedding."""
    sizes: dict[str, Any] = {"vocab_size": 32, "n_positions": 8, "n_embd": 12, "n_layer": layers, "n_head": 2}
    with hf.BUILDING, empty_parameters():
        from transformers import GPT2Config, GPT2LMHeadModel  # the first import, too, is no work for two threads

        config = GPT2Config(**(sizes | {"bos_token_id": None, "eos_token_id": None, "use_cache": False} | changes))
        model: nn.Module = GPT2LMHeadModel(config).train()
    return model


def gpt2_links(model: nn.Module) -> list[str]:
    """The two embeddings are two links: GPT-2's own forward adds them, on the stage that has the second."""
    blocks = [f"transformer.h.{i}" for i in range(model.config.n_layer)]  # type: ignore[union-attr]
    return ["transformer.wte", "transformer.wpe", "transformer.drop", *blocks, "transformer.ln_f", "lm_head"]


def gpt2(layers: int = 2, **changes: Any) -> Job:
    def build() -> nn.Module:
        model = gpt2_model(layers, **changes)
        model.pipeline_links = partial(gpt2_links, model)  # type: ignore[assignment]
        return model

    return causal(build, 12)


def llama(kind: str = "llama", layers: int = 2, tie: bool = False, dropout: float = 0.1) -> Job:
    sizes = hf.HFConfig(32, layers, 16, 4, 2, 20, LENGTH, dropout, kind=kind, tie=tie)  # type: ignore[arg-type]

    def build() -> nn.Module:
        with empty_parameters():
            return hf.build(sizes).train()

    return causal(build, 16)


# ---- images -------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with norms and a shortcut, as in ResNet."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or fan_in != fan_out:
            self.downsample = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + shortcut)
        return out


class ResNet(nn.Module):
    """Stem, two stages of blocks, pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(3, momentum=None)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(3, 3, 1), Residual(3, 3, 1))
        self.layer2 = nn.Sequential(Residual(3, 5, 2), Residual(5, 5, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))
        return out


def resnet_links(model: nn.Module) -> list[str]:
    layers = [f"layer{i}.{j}" for i in (1, 2) for j in range(2)]
    return ["conv1", "bn1", "relu", "maxpool", *layers, "avgpool", "fc"]


def sequential_net() -> nn.Module:
    """The same as an ``nn.Sequential`` of parts."""
    stem = (nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    blocks = (Residual(3, 3, 1), Residual(3, 5, 2), Residual(5, 5, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(5, 3))


def classified(*shape: int, seed: int) -> list[Batch]:
    """fp32 [samples, ...] of three steps, and classes, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(3):
        y_B = torch.randint(3, shape[:1], generator=generator)
        y_B[torch.rand(shape[:1], generator=generator) < 0.3] = IGNORED
        made.append({"x": torch.randn(*shape, generator=generator), "y": y_B})
    return made


def images() -> list[Batch]:
    return classified(19, 2, 9, 9, seed=6)


def classes_sum(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum", ignore_index=IGNORED)


def classes_count(batch: Batch) -> int:
    return int((batch["y"] != IGNORED).sum())


def valued(build: Callable[[], nn.Module], seed: int = 3) -> Callable[[], nn.Module]:
    """The same model with values every time, for ranks that build at the same time (some nets refuse to be copied)."""

    def made() -> nn.Module:
        with _SEEDING, torch.random.fork_rng():
            torch.manual_seed(seed)
            return build().train()

    return made


def job_of(
    build: Callable[[], nn.Module],
    batches: list[Batch],
    loss: Callable[[nn.Module, Any], Tensor] = classes_sum,
    count: Callable[[Any], int] = classes_count,
    *,
    width: int = 0,
    least: int = 1,
) -> Job:
    """Any model's job; ``width`` 0: what goes from stage to stage is not foretold."""

    def leading(batch: Any) -> tuple[int, ...]:
        return (len(next(iter(batch.values()))),)

    dtype = next(build().parameters()).dtype
    return Job(build, loss, count, Given(batches, least), adamw, *leading(batches[0]), dtype, 0, leading, width)


# ---- the question -------------------------------------------------------------------------------------------------


@dataclass
class Held:
    """A layout's run, and what is not to the bit the single process's."""

    ranks: list[RankRecord]
    findings: list[Finding]

    @property
    def different(self) -> list[str]:
        return [f"{f.kind} {f.name}: {f.max_rel:.1e}" for f in self.findings if not f.bitwise]


def hold(
    job: Job,
    mesh: str,
    row: str = "zero3",
    *,
    microbatches: int = 2,
    steps: int = 2,
    clip: float | None = 0.3,
    foretold: bool = True,
    **engine: Any,
) -> Held:
    """Train on thread ranks and in one process that adds in the row's order.

    Args:
        foretold: whether every message must be the predicted one as well.
    """
    shape, strategy = Mesh.parse(mesh), find_strategy(row)
    parallelism = Parallelism.of(strategy=strategy, **engine)

    def body(comm: Comm) -> RankRecord:
        return record_layout(job, comm, parallelism, microbatches, steps, clip)

    ranks = sorted(run(shape, body, deadline=20), key=lambda record: record.rank)
    pieces = [record.norm_pieces for record in ranks]
    how: dict[str, Any] = {"clip": clip, "norm_pieces": pieces, "ties": ranks[0].ties}
    single = run_reference(job, replace(shape, pipe=1), microbatches, additions(strategy), steps, **how)
    if foretold:
        assert not [line for record in ranks for line in record.ledger_differences]
    return Held(ranks, against_tree(ranks, single))


def bitwise(job: Job, mesh: str, row: str = "zero3", **settings: Any) -> Held:
    """Every loss, gradient, norm, parameter, buffer and optimizer state to the bit, and nothing left out."""
    held = hold(job, mesh, row, **settings)
    assert not held.different, held.different[:5]
    assert {f.kind for f in held.findings} >= {"loss", "gradient", "norm", "parameter", "optimizer"}
    return held
