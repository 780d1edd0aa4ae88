"""Programs that misuse plait; twins compare the error's type, and the names and numbers in its text.

Each entry of ``REFUSALS`` has a mesh and a program.  All ranks make the same mistake, or the other ranks wait for the
one that makes it, so that the first error is the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import adapter
import torch
import twin_models as models
from torch import Tensor, nn
from twin_rank import Rank

Program = Callable[[Rank], Any]


class Refusal(NamedTuple):
    """A mesh and a program that is refused on it."""

    mesh: str
    run: Program


REFUSALS: dict[str, Refusal] = {}


def build(rank: Rank, row: str = "zero3", optimizer: str = "adamw", kind: str = "mlp", **settings: Any) -> Any:
    """An engine of the usual model."""
    model = rank.model(model=kind)
    return rank.engine(model, rank.optimizer(optimizer), row=row, **settings)


def building(name: str, mesh: str = "shard=2", **settings: Any) -> None:
    """Engines with these settings are refused, or their first step is."""

    def run(rank: Rank) -> None:
        kind = settings.get("kind", "mlp")
        engine = build(rank, **settings)
        rank.step(engine, rank.batches(1, model=kind)[0], 2)

    REFUSALS[name] = Refusal(mesh, run)


def refusal(mesh: str = "shard=2") -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        REFUSALS[program.__name__] = Refusal(mesh, program)
        return program

    return add


def backward(rank: Rank, engine: Any, **settings: Any) -> None:
    batch = rank.local(1)[0]
    engine.backward(models.loss_sum(engine.model, batch), **({"count": models.count(batch)} | settings))


for wrong in ("pipes=2", "shard=0", "shard=2 shard=2", "shard", "shard=2 hosts=3", "shard=x"):
    REFUSALS[f"mesh {wrong}"] = Refusal(wrong, lambda rank: None)

ROWS = {
    "row of no such name": "zero4",
    "row of another engine": "full_shard",
    "row that cannot be read": "mine: full | full | full",
    "row that no sum finishes": "mine: full | full | full | full",
    "row with a reshuffle": "mine: replica | replica | shard, pending(replica) | shard",
    "row with a wide optimizer": "mine: shard | shard | shard, pending(replica) | full",
    "row of an unknown dtype": "mine: full int8 | full | full, pending(shard, replica) | full",
    "row on an unknown device": "mine: full | full | full, pending(shard, replica) | full @tpu",
}
for title, text in ROWS.items():
    building(title, row=text)

building("unknown setting", prefech=2)
building("negative prefetch", prefetch=-1)
building("negative bucket", bucket=-1)
building("unknown unit", units=("9",))
building("negative drift", check_drift=-1)
building("unknown recompute", recompute="all")
building("selective recompute without attention", recompute="selective")
building("unknown order", "pipe=2", schedule="2f2b")
building("order for one stage", schedule="zbv", split=(1, 2))
building("chunks of an order without", "pipe=2", schedule="1f1b", chunks=2)
building("too many stages", "pipe=4", schedule="interleaved", chunks=3)
building("split of another sum", "pipe=2", split=(1, 2))
building("split of other stages", "pipe=2", split=(2, 2, 2))
building("negative hold", "pipe=2", hold=-1)
building("plan of no module", "tensor=2", tensor_plan={"9": "column"})
building("plan of no style", "tensor=2", tensor_plan={"*.up": "colum"})
building("plan with two styles", "tensor=2", tensor_plan={"*.up": "column", "1.up": "row"})
building("plan that does not divide", "tensor=2", tensor_plan={"*.up": "column by 4", "*.down": "row by 4"})
building("plan that is a list", "tensor=2", tensor_plan=["column"])
building("tensor axis without a plan", "tensor=2")
building("more ranks than heads", "tensor=5", kind="gpt")
building(
    "fp16 without a scale, too narrow sums", row="mine: full fp32 | full fp32 | shard/replica bf16 | shard/replica"
)
REFUSALS["loss scale of zero"] = Refusal("shard=1", lambda rank: adapter.loss_scale(0.0))
REFUSALS["average with a wrong decay"] = Refusal("shard=2", lambda rank: adapter.average_of(build(rank), 9.99))


@refusal()
def step_without_backward(rank: Rank) -> None:
    build(rank)
    rank.last_optimizer.step()


@refusal()
def backward_without_count(rank: Rank) -> None:
    backward(rank, build(rank), count=None)


@refusal()
def backward_of_a_mean(rank: Rank) -> None:
    engine = build(rank)
    batch = rank.local(1)[0]
    engine.backward(engine.model(batch["x"]).square().mean(), count=4)


@refusal()
def backward_of_a_vector(rank: Rank) -> None:
    engine = build(rank)
    engine.backward(engine.model(rank.local(1, samples=12)[0]["x"]).square().sum(1), count=4)


@refusal()
def backward_with_a_negative_count(rank: Rank) -> None:
    backward(rank, build(rank), count=-3)


@refusal()
def backward_with_half_a_count(rank: Rank) -> None:
    backward(rank, build(rank), count=2.5)


@refusal()
def backward_that_keeps_its_graph(rank: Rank) -> None:
    backward(rank, build(rank), retain_graph=True)


@refusal()
def backward_without_an_optimizer(rank: Rank) -> None:
    backward(rank, rank.engine(rank.model(), None, row="zero3"))


@refusal("pipe=2")
def backward_in_a_pipeline(rank: Rank) -> None:
    engine = build(rank, "ddp")
    engine.backward(torch.zeros((), requires_grad=True), count=1)


@refusal()
def step_without_microbatches(rank: Rank) -> None:
    build(rank).step([])


@refusal()
def step_with_nothing_to_count(rank: Rank) -> None:
    engine = build(rank)
    batch = rank.local(1)[0]
    engine.step([batch | {"mask": torch.zeros_like(batch["mask"])}])


@refusal()
def step_without_gradients(rank: Rank) -> None:
    engine = build(rank)
    with torch.no_grad():
        engine.step(rank.local(1))


@refusal()
def step_with_other_numbers_of_microbatches(rank: Rank) -> None:
    build(rank).step(rank.local(1) * (1 + rank.comm.rank))


@refusal()
def step_without_a_loss_function(rank: Rank) -> None:
    rank.engine(rank.model(), rank.optimizer("sgd"), row="ddp", loss_fn=None).step(rank.local(1))


@refusal()
def loss_that_is_not_finite(rank: Rank) -> None:
    batch = rank.batches(1)[0]
    batch["x"][0, 0] = math.nan
    rank.step(build(rank), batch, 1)


@refusal()
def clip_twice(rank: Rank) -> None:
    engine = build(rank)
    backward(rank, engine)
    adapter.clip(engine, 1.0)
    adapter.clip(engine, 1.0)


@refusal()
def clip_in_two_ways(rank: Rank) -> None:
    engine = build(rank, clip=2.0)
    backward(rank, engine)
    adapter.clip(engine, 1.0)


@refusal()
def backward_after_the_clip(rank: Rank) -> None:
    engine = build(rank)
    backward(rank, engine)
    adapter.clip(engine, 1.0)
    backward(rank, engine)


@refusal()
def evaluate_in_a_step(rank: Rank) -> None:
    engine = build(rank)
    backward(rank, engine)
    engine.evaluate(rank.local(1))


@refusal()
def optimizer_of_other_parameters(rank: Rank) -> None:
    other = rank.model()
    rank.engine(rank.model(), models.optimizer_of("sgd", other), row="zero3")


@refusal()
def optimizer_that_has_made_steps(rank: Rank) -> None:
    model, optimizer = rank.model(), rank.optimizer("adamw")
    models.loss_sum(model, rank.batches(1)[0]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    rank.engine(model, optimizer, row="zero3")


@refusal()
def parameter_in_two_optimizers(rank: Rank) -> None:
    rank.engine(rank.model(), [rank.optimizer("sgd"), rank.optimizer("sgd")], row="zero3")


@refusal()
def optimizer_that_is_none(rank: Rank) -> None:
    rank.engine(rank.model(), "adamw", row="zero3")


@refusal()
def second_optimizer_that_comes_late(rank: Rank) -> None:
    build(rank).use(rank.optimizer("sgd"))


@refusal()
def optimizer_with_a_closure(rank: Rank) -> None:
    engine = build(rank)
    backward(rank, engine)
    rank.last_optimizer.step(lambda: 0.0)


@refusal()
def optimizer_that_is_not_element_wise(rank: Rank) -> None:
    model = rank.model()
    rank.engine(model, torch.optim.Adafactor(model.parameters()), row="zero3")


@refusal()
def optimizer_that_takes_a_closure(rank: Rank) -> None:
    model = rank.model()
    rank.engine(model, torch.optim.LBFGS(model.parameters()), row="ddp")


@refusal()
def ranks_with_other_seeds(rank: Rank) -> None:
    build(rank, seed=rank.comm.rank)


@refusal()
def ranks_with_other_rates(rank: Rank) -> None:
    model = rank.model()
    rank.engine(model, torch.optim.SGD(model.parameters(), lr=0.1 + rank.comm.rank), row="ddp")


@refusal()
def ranks_with_other_models(rank: Rank) -> None:
    model = nn.Linear(3, 2 + rank.comm.rank)
    rank.engine(model, torch.optim.SGD(model.parameters(), lr=0.1), row="ddp")


@refusal()
def ranks_with_other_rows(rank: Rank) -> None:
    build(rank, ("ddp", "zero3")[rank.comm.rank])


@refusal()
def model_without_parameters(rank: Rank) -> None:
    rank.engine(nn.ReLU(), None, row="zero3").step(rank.local(1))


@refusal()
def model_that_is_compiled(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    compiled = torch.compile(model, backend="eager")
    rank.engine(compiled, torch.optim.SGD(model.parameters(), lr=0.1), row="zero3")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x.abs().long().sum(1) % 7)
        return out


@refusal()
def sparse_gradients(rank: Rank) -> None:
    model = models.filled(Sparse())
    rank.step(rank.engine(model, torch.optim.SGD(model.parameters(), lr=0.1), row="ddp"), rank.batches(1)[0], 1)
