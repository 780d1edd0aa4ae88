"""Jobs of all kinds whose layouts equal one process: unusual modules, draws and dtypes."""

# ruff: noqa: E501 (a row is a line)

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from engine_cases import Made
from stock_nets import JOBS as STOCK
from test_own_job import JOB, batch, loss_sum
from test_strangers_jobs import JOB as ENCODER
from test_strangers_jobs import Encoder, Pooled, Reading, Tied, tokens
from test_strangers_jobs import loss_sum as cross_entropy
from torch import Tensor, nn

import plait
from plait.comm.operation import MismatchError


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9), nn.Dropout(0.1), nn.Linear(9, 3))


class Between(nn.Module):
    """A layer between the blocks: each stage of two has a copy, and one of them runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.between, self.head = nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x).tanh())
        out: Tensor = self.head(self.blocks[2](self.between(x).tanh()))
        return out


def block() -> nn.Module:
    """Two products, of which the first is cut by its outputs."""
    return Made(lambda m, x: m.down(m.up(x).tanh()), up=nn.Linear(7, 12), down=nn.Linear(12, 7))


class CutBetween(Between):
    tensor_plan: ClassVar = {"blocks.*.up": "column", "blocks.*.down": "row", "between": "gathered"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))


class InRow(nn.Sequential):
    """Columns that one module holds and that read different tensors: no siblings, wherever the chain is cut."""

    tensor_plan: ClassVar = {"0": "gathered", "2": "gathered", "4": "gathered"}

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))


def experts() -> nn.Module:
    """An embedding with padding, and three experts, of which a batch runs those that its tokens ask for."""

    def run(m: Any, tokens_BT: Tensor) -> Tensor:
        x_BTD: Tensor = m.embedding(tokens_BT)
        for number, expert in enumerate(m.experts):
            mine_BT = tokens_BT % 3 == number
            if mine_BT.any():
                x_BTD = torch.where(mine_BT[..., None], expert(x_BTD), x_BTD)
        return x_BTD

    each = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
    return Made(run, embedding=nn.Embedding(11, 5, padding_idx=0), experts=each, unused=nn.Linear(5, 5))


def sorted_tokens(step: int) -> Tensor:
    """Sorted by expert, so that some ranks run one of them and others another; the last step leaves one out."""
    tokens_B = torch.arange(10) + 1 if step < 2 else torch.tensor([1, 2, 4, 5, 7, 8, 10, 1, 2, 4])
    return tokens_B[(tokens_B % 3).argsort(stable=True)][:, None].repeat(1, 2) * torch.tensor([1, step % 2])


EXPERTS = plait.UserJob(experts, lambda model, tokens: model(tokens).square().sum(), sorted_tokens)


class InTime(nn.Module):
    """A stranger's tokens, which a tensor plan may cut in time."""

    tensor_plan: ClassVar[Any] = {
        **{"embed": "vocabulary", "norm": "sequence"},
        **{"up": "column", "down": "row", "head": "vocabulary"},
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out: Tensor = self.head(x + self.down(self.up(self.norm(x)).relu()))
        return out


CUT_TOKENS = torch.arange(36).view(4, 9) % 16
IN_TIME = plait.UserJob(InTime, lambda m, x: plait.cross_entropy_sum(m(x[:, :-1]), x[:, 1:]), [CUT_TOKENS])


def twice() -> nn.Module:
    shared = nn.Linear(6, 6)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), shared, nn.Tanh(), shared, nn.Dropout(0.1), nn.Linear(6, 6))


def one_block() -> nn.Module:
    """As ALBERT's layers: the same block four times, after a separate embedding."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        for block in m.blocks:
            x = x + block(x)
        return x

    block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU())
    return Made(run, first=nn.Linear(6, 6), blocks=nn.ModuleList([block] * 4))


def sines(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(13, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def reused(build: Any) -> plait.UserJob:
    """One module under several names, on several stages: its gradient is summed stage by stage."""
    return plait.UserJob(build, lambda model, b: (model(b[0]) - b[1]).square().sum(), sines)


def drawing(draw: Any) -> nn.Module:
    """A model whose forward draws random numbers between two layers."""
    return Made(lambda m, x: m.down(draw(m.up(x))), up=nn.Linear(7, 6), down=nn.Linear(6, 3))


def without_grad(h: Tensor) -> Tensor:
    with torch.no_grad():
        noise = torch.randn_like(h) * F.dropout(torch.ones_like(h), 0.5)
    return h + noise


DRAWS = {
    "hard gumbel": lambda h: F.gumbel_softmax(h, hard=True),
    "two gumbels": lambda h: F.gumbel_softmax(h) + F.gumbel_softmax(h, tau=0.5),
    "Bernoulli.sample": lambda h: h * torch.distributions.Bernoulli(probs=torch.full_like(h, 0.7)).sample(),
    "no_grad": without_grad,
}


def numbers(step: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=dtype)


def complex_job(dtype: torch.dtype) -> plait.UserJob:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = (model(batch) - batch[:, :2]).abs().square().sum()
        return value

    batches = partial(numbers, shape=(12, 3), dtype=dtype)
    return plait.UserJob(lambda: nn.Linear(3, 2, dtype=dtype), loss, batches, optimizer=JOB.optimizer)


def sharing() -> plait.UserJob:
    """Two forwards under one autocast, whose casts threads share."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            one, other = model(batch[:, :8]), model(batch[:, 8:])
        value: Tensor = (one.float() - 1).square().sum() + (one.float() * other.float()).sum()
        return value

    build = lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))  # noqa: E731
    return replace(JOB, build=build, loss_fn=loss, batches=partial(numbers, shape=(24, 16), dtype=torch.float32))


def penalised(model: nn.Module, batch: Any) -> Tensor:
    out = model(x := batch[0].clone().requires_grad_())
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return slope.square().sum() + out.square().sum()


def tied(**settings: bool) -> plait.UserJob:
    return plait.UserJob(lambda: Tied(**settings), cross_entropy, tokens)


TWO, FOUR = "shard=2", "replica=2 shard=2"
ALONE = (("shard=1", "ddp"), (TWO, "zero3"))
OFTEN = {"blocks.0": 3, "blocks.1": 3, "unused": 0}
COMPLEX = {"clip": 0.1, "spread": 2}
JOBS: list[tuple[str, plait.UserJob, tuple[tuple[str, str], ...], dict[str, Any], dict[str, float]]] = [
    # name, job, meshes and rows, settings, units that do not run once in each forward
    ("own", JOB, tuple((mesh, row) for mesh in ("shard=3", FOUR) for row in ("ddp", "zero3")), {}, {}),
    ("chain", plait.UserJob(chain, loss_sum, [batch(0), batch(1)]), (("pipe=2 shard=2", "zero3"),), {"microbatches": 3, "optimizer": "sgd", "lr": 0.1, "warmup": 2}, {}),
    ("meta", replace(JOB, build=lambda: nn.Linear(7, 3, device="meta")), ((TWO, "zero3"),), {}, {}),
    ("a layer between blocks", replace(JOB, build=Between), tuple((mesh, "zero2") for mesh in ("pipe=2", "pipe=3", "pipe=2 shard=2")), {"steps": 3}, {}),
    ("columns in a row", replace(JOB, build=InRow), (("tensor=3", "zero2"), ("pipe=2 tensor=2", "zero2")), {"steps": 2}, {}),
    ("cut in time", IN_TIME, (("tensor=2", "ddp"),), {"sequence_parallel": True, "microbatches": 1}, {}),
    ("experts", EXPERTS, ((FOUR, "ddp"), (FOUR, "zero1"), (FOUR, "zero2")), {"steps": 4, "lr": 0.01}, {}),
    ("often, whole", replace(ENCODER, build=lambda: Encoder(times=3)), (("shard=3", "ddp"), ("shard=3", "zero2")), {"steps": 2}, {}),
    ("often", replace(ENCODER, build=lambda: Encoder(times=3)), (("shard=3", "zero3"), ("shard=3", "zero3_keep")), {"steps": 2}, OFTEN),
    ("head first", tied(head_first=True, frozen=False), ((FOUR, "zero3"), (FOUR, "hpz"), (FOUR, "zero3_keep")), {"steps": 2}, {}),
    ("frozen and tied", tied(head_first=False, frozen=True), tuple((FOUR, row) for row in ("zero3", "hsdp", "zero3_keep", "hpz")), {"steps": 2}, {}),
    ("not used by the loss", replace(ENCODER, build=Pooled), (("shard=3", "zero3"), ("shard=3", "zero2"), ("pipe=2 shard=2", "zero3")), {"steps": 2}, {}),
    ("read from around", replace(ENCODER, build=Reading), (("shard=3", "zero3"),), {"steps": 2}, {"embed": 1, "unused": 0}),
    ("a penalty on gradients", replace(JOB, loss_fn=penalised), ((FOUR, "psdp"),), {"steps": 2}, dict.fromkeys(("body.0", "body.3", "body.4", "head"), 1)),
    ("weights of attention", STOCK["attention"], ALONE, {"steps": 2}, {}),
    *((f"{build.__name__}, {order}", reused(build), (("pipe=2", "zero1"),), {"microbatches": 3, "schedule": order, "steps": 2}, {}) for build in (twice, one_block) for order in ("1f1b", "zbv")),
    ("a block under several names", reused(one_block), ((FOUR, "hpz"),), {"steps": 2}, {"blocks.0": 4}),
    *((name, replace(JOB, build=lambda draw=draw: drawing(draw)), ALONE, {"steps": 2}, {}) for name, draw in DRAWS.items()),
    ("complex64", complex_job(torch.complex64), ALONE, COMPLEX, {}),
    ("complex128", complex_job(torch.complex128), ALONE, COMPLEX | {"dtype": "fp64"}, {}),
    ("one autocast, whole", sharing(), (("shard=4", "ddp"),), {"steps": 2, "locate": False}, {}),
    ("one autocast", sharing(), (("shard=4", "zero3"),), {"steps": 2, "locate": False}, dict.fromkeys("012345", 2)),
]  # fmt: skip


def cases() -> Iterator[Any]:
    for name, job, layouts, settings, irregular in JOBS:
        for mesh, row in layouts:
            yield pytest.param(job, mesh, row, settings, irregular, id=f"{name}, {row} on {mesh}")


@pytest.mark.parametrize(("job", "mesh", "row", "settings", "irregular"), [*cases()])
def test_a_layout_is_the_run_of_one_process(
    job: plait.UserJob, mesh: str, row: str, settings: dict[str, Any], irregular: dict[str, float]
) -> None:
    verdict = plait.verify(job, mesh, row, **{"microbatches": 2} | settings)
    assert verdict.word == ("equal" if "tensor" in mesh else "bitwise"), verdict
    assert verdict.irregular == irregular
    assert torch.is_autocast_cache_enabled()


def test_its_messages_over_the_tensor_axis_are_not_predicted() -> None:
    job = replace(JOB, build=CutBetween)
    verdict = plait.verify(job, mesh="pipe=2 tensor=2", strategy="zero2", microbatches=2, steps=2)
    assert verdict.word == "equal" and not verdict.ledger and verdict.unpredicted, verdict


def test_units_that_only_some_ranks_gather_are_named() -> None:
    with pytest.raises(
        MismatchError, match=r"unit 'experts.\d' .*in all_gather of unit 'experts.\d'.*every layer runs on every rank"
    ):
        plait.verify(EXPERTS, "replica=2 shard=2", "zero3", microbatches=2, steps=4, lr=0.01)
