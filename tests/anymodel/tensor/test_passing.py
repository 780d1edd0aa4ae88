"""What passes a plan's sites is what a forward shows: other people's streams are predicted to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.anymodel.tensor import resolve_carried
from plait.anymodel.tensor.passing import PassingOf
from plait.comm import Comm
from plait.predict.cost import differences
from plait.predict.tensor import predict_tensor
from plait.referee.verify.record import predict
from plait.run.job.config import JobConfig
from plait.run.job.job import Job, make_job
from plait.step import Engine
from plait.table.mesh import Mesh
from plait.table.tensor_plan import everywhere

WIDTH, HIDDEN, VOCABULARY = 12, 30, 21


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Patches(nn.Module):
    """Images of which no dim of the batch is a length; one block runs twice."""

    tensor_plan: ClassVar = {"blocks.*.up": "column", "blocks.*.down": "row"}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Linear(16, WIDTH),
            nn.ModuleList([Block(), Block()]),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), -1, 16))
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        y: Tensor = self.head(x.mean(1))
        return y


class Frozen(Patches):
    """Nothing before the second block trains, so its input wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(requires_grad=False)
        self.blocks[0].requires_grad_(requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), -1, 16))
        y: Tensor = self.head(self.blocks[1](self.blocks[0](x)).mean(1))
        return y


class InPlace(Patches):
    """What a product returns is a view of its rows, and is written to."""

    tensor_plan: ClassVar = {"wide": "column", "narrow": "row"}

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), -1, 16))
        x = self.narrow(F.relu(self.wide(self.blocks[0](x)), inplace=True)).mul_(2)
        y: Tensor = self.head(self.blocks[1](x).mean(1))
        return y


class Latent(nn.Module):
    """Siblings that read activations of two widths; and a block of which only a number is kept."""

    tensor_plan: ClassVar = {
        "wide": "column",
        "narrow": "column",
        "down": "row",
        "aside.up": "column",
        "aside.down": "row",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.squeeze, self.head = nn.Linear(96, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 5)
        self.wide, self.narrow, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(6, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.aside = Block()

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1))
        self.seen = self.aside(x).detach().square().sum()
        y: Tensor = self.head(x + self.down(self.wide(x).tanh() * self.narrow(self.squeeze(x))))
        return y


class Cross(nn.Module):
    """Heads of 2, queries of one stream, keys and values of another; asks for a value, which meta tensors lack."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        made = self.query(x), self.key(other), self.value(other)
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in made)
        if not bool(other.isfinite().all()):
            raise FloatingPointError
        y: Tensor = x + self.output(((q @ k.mT).tanh() @ v).transpose(1, 2).flatten(2))
        return y


class TwoStreams(nn.Module):
    tensor_plan: ClassVar = {
        "read": "vocabulary",
        "write": "vocabulary",
        **{f"cross.{name}": "column by 2" for name in ("query", "key", "value")},
        "cross.output": "row by 2",
        "block.up": "column",
        "block.down": "row",
        "head": "vocabulary",
    }

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.block, self.cross, self.head = Block(), Cross(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        y: Tensor = self.head(self.cross(self.write(target), self.block(self.read(source))))
        return y


def images(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    return {"image": torch.randn(12, 12, 8, generator=random), "kind": torch.randint(5, (12,), generator=random)}


def pairs(step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    numbers = torch.randint(VOCABULARY, (12, 16), generator=random)
    return {"source": numbers[:, :9], "target": numbers[:, 9:15], "next": numbers[:, 10:]}


def of_image(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["kind"], reduction="sum")


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    return plait.cross_entropy_sum(model(batch["source"], batch["target"]), batch["next"])


def of_labels(model: Any, batch: Any) -> Tensor:
    """The model makes the loss itself, as most loops around transformers have it."""
    loss: Tensor = model(input_ids=batch["source"], labels=batch["source"]).loss * batch["source"][:, 1:].numel()
    return loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes))
    return model


JOBS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "patches": (Patches, of_image, images),
    "frozen": (Frozen, of_image, images),
    "latent": (Latent, of_image, images),
    "in place": (InPlace, of_image, images),
    "two streams": (TwoStreams, of_pair, pairs),
    "labels": (llama, of_labels, pairs),
}


def job_of(name: str, mesh: str) -> Job:
    build, loss_fn, batches = JOBS[name]
    if name == "labels":
        pytest.importorskip("transformers")
    return make_job(JobConfig(job=plait.UserJob(build, loss_fn, batches), dtype="fp64"))


@pytest.mark.filterwarnings("ignore:the model computes its own loss")
@pytest.mark.parametrize("mesh", ["tensor=2", "tensor=3", "shard=2 tensor=2"])
@pytest.mark.parametrize("name", JOBS)
def test_the_ledger_of_a_strangers_model_is_the_prediction(name: str, mesh: str) -> None:
    job = job_of(name, mesh)

    def body(comm: Comm) -> list[str]:
        model = job.build()
        engine = Engine(
            model, comm, strategy="zero2", optimizer=job.optimizer(model.parameters()), loss_fn=job.loss_fn,
            count_fn=job.count_fn,
        )  # fmt: skip
        found: list[str] = []
        for step in range(2):
            batches = job.microbatches(step, comm.mesh.data_rank(comm.rank), comm.mesh.data_size, 2)
            skipped = ("sanitize", "setup") if step == 0 else ("sanitize",)
            mark = len(comm.ledger)
            engine.step(batches)
            measured = [e for e in comm.ledger.since(mark) if e.note.phase not in skipped]
            found += differences(predict(engine, job, batches), measured)
        return found

    for found in plait.run_threads(mesh, body):
        assert not found, found[:4]


@pytest.mark.parametrize(
    ("model", "sequence"), [("gpt", False), ("gpt", True), ("llama", False), ("llama", True), ("mlp", False)]
)
def test_a_forward_shows_what_our_own_families_say(model: str, sequence: bool) -> None:
    if model == "llama":
        pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"width": 24, "layers": 4, "heads": 4, "kv_heads": 2, "batch": 5, "length": 7}
    job = make_job(JobConfig(model=model, **sizes))
    (batch,) = job.microbatches(0, 0, 1, 1)
    parallel = resolve_carried(job.build(), 2, sequence=sequence)
    seen, said = PassingOf(job.build, job.loss_fn)(batch, parallel), everywhere(parallel.sites, job.leading(batch))
    assert seen is not None
    one, other = (predict_tensor([p], Mesh(tensor=2), 4, sequence=sequence) for p in (seen, said))
    assert one == other


def test_a_model_on_meta_shows_the_same() -> None:
    job = job_of("patches", "tensor=2")
    (batch,), parallel = job.microbatches(0, 0, 1, 1), resolve_carried(job.build(), 2)
    assert PassingOf(lambda: job.build().to("meta"), job.loss_fn)(batch, parallel) == PassingOf(job.build, job.loss_fn)(
        batch, parallel
    )
