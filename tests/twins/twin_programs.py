"""Whole programs of the twins: each runs on every rank, and notes values and tensors under names.

A program takes a ``Rank``, which builds engines and takes notes.  ``PROGRAMS`` has them by name with their layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import adapter
import torch
import torch.nn.functional as F
import twin_models as models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twin_rank import Rank

Program = Callable[[Rank], None]
Layout = tuple[str, str]

LAYOUTS: list[Layout] = [
    ("zero3", "shard=3"),
    ("ddp", "shard=2"),
    ("hsdp", "replica=2 shard=2"),
    ("zero1", "replica=2"),
    ("hpz", "replica=2 shard=2"),
    ("zero2", "shard=2"),
    ("psdp", "replica=2 shard=2"),
    ("zero3_keep", "shard=2"),
]
STAGES: list[Layout] = [
    ("zero3", "pipe=2 shard=2"),
    ("ddp", "pipe=2"),
    ("zero1", "pipe=2 replica=2"),
    ("hsdp", "pipe=3"),
]
CUT: list[Layout] = [("ddp", "tensor=2"), ("zero3", "shard=2 tensor=2"), ("hsdp", "replica=2 tensor=2")]

PROGRAMS: dict[str, tuple[Program, list[Layout]]] = {}


def on(layouts: list[Layout]) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        PROGRAMS[program.__name__] = program, layouts
        return program

    return add


def kind_of(rank: Rank) -> str:
    """The model that the rank's mesh can cut."""
    return "gpt" if "tensor" in rank.cell["mesh"] else "mlp"


def loop(rank: Rank, model: nn.Module, engine: Any, optimizer: Any, batches: list[Any]) -> None:
    """A plain loop of one backward a step."""
    for batch in batches:
        engine.backward(models.loss_sum(model, batch), count=models.count(batch))
        optimizer.step()
        rank.note("last", adapter.last_result_of(engine))


@on(LAYOUTS)
def mean_loop_with_a_schedule(rank: Rank) -> None:
    model, optimizer = rank.model(dropout=0.1), rank.optimizer("sgd")
    engine = rank.engine(model, optimizer)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for batch in rank.batches(3):
        for part in models.deal(batch, rank.comm, 2):
            mean = models.loss_sum(model, part) / max(1, models.count(part))
            engine.backward(mean, models.count(part), reduction="mean")
        optimizer.step()
        rate.step()
        rank.note("last", adapter.last_result_of(engine))
    rank.finish(engine)


@on(LAYOUTS)
def two_optimizers(rank: Rank) -> None:
    model = rank.model()
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    both = [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.02, eps=1e-4)]
    engine = rank.engine(model, both)
    for batch in rank.batches(2):
        rank.step(engine, batch, 2)
    rank.finish(engine)


@on(LAYOUTS)
def an_optimizer_that_comes_late(rank: Rank) -> None:
    model = rank.model()
    engine = rank.engine(model, None)
    engine.use(models.optimizer_of("groups", model))
    for batch in rank.batches(2):
        rank.step(engine, batch, 1)
    rank.finish(engine)


@on(LAYOUTS)
def clip_by_a_call(rank: Rank) -> None:
    model, optimizer = rank.model(), rank.optimizer("adamw")
    engine = rank.engine(model, optimizer)
    for batch in rank.local(2):
        engine.backward(models.loss_sum(model, batch), count=models.count(batch))
        rank.note("norm", adapter.clip(engine, 0.2))
        optimizer.step()
    rank.finish(engine)


@on([*LAYOUTS, *STAGES])
def evaluate_between_steps(rank: Rank) -> None:
    engine = rank.engine(rank.model(dropout=0.2), rank.optimizer("adamw"))
    for batch in rank.batches(2):
        rank.step(engine, batch, 2)
        with rank.section("evaluate"):
            result = engine.evaluate(models.deal(batch, rank.comm, 3))
        rank.note("evaluation", [float(result.loss), int(result.count)])
    rank.finish(engine)


@on(LAYOUTS)
def read_and_write_gathered(rank: Rank) -> None:
    model, optimizer = rank.model(), rank.optimizer("sgd")
    engine = rank.engine(model, optimizer)
    for batch in rank.local(2):
        loop(rank, model, engine, optimizer, [batch])
        with rank.section("gathered"), engine.gathered():
            rank.note("sum", [float(p.detach().double().sum()) for p in model.parameters()])
        with rank.section("modified"), engine.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
    rank.finish(engine)


@on(LAYOUTS)
def an_average(rank: Rank) -> None:
    engine = rank.engine(rank.model(), rank.optimizer("adamw"))
    average = adapter.average_of(engine, 0.5)
    for batch in rank.batches(2):
        rank.step(engine, batch, 1)
        average.update()
    rank.keep("average", average.full_state_dict())
    with average.swapped():
        result = engine.evaluate(models.deal(batch, rank.comm, 1))
    rank.note("evaluation", float(result.loss))
    rank.finish(engine)


@on([*LAYOUTS, *STAGES])
def a_state_enters_another_row(rank: Rank) -> None:
    first = rank.engine(rank.model(), rank.optimizer("adamw"))
    rank.step(first, rank.batches(1)[0], 2)
    state, moments = first.full_state_dict(), first.optimizer_state_dict()
    for row in ("zero3", "ddp", "zero1"):
        engine = rank.engine(rank.model(weights=5), rank.optimizer("adamw"), row=row)
        engine.load_full_state_dict(state)
        engine.load_optimizer_state_dict(moments)
        engine.load_step_state(first.step_state())
        rank.step(engine, rank.batches(2)[1], 2)
        rank.finish(engine, f"{row} ")


@on([*LAYOUTS, *STAGES, *CUT])
def save_and_load(rank: Rank) -> None:
    kind = kind_of(rank)
    engine = rank.engine(rank.model(model=kind), rank.optimizer("adamw"))
    rank.step(engine, rank.batches(1, model=kind)[0], 2)
    with rank.section("save"):
        adapter.save(rank.folder, engine, extra={"epoch": 3})
    for row in ("zero3", "zero2"):
        other = rank.engine(rank.model(model=kind, weights=5), rank.optimizer("adamw"), row=row)
        with rank.section("load"):
            loaded = adapter.load(rank.folder, other)
        rank.note("extra", loaded)
        rank.step(other, rank.batches(2, model=kind)[1], 2)
        rank.finish(other, f"{row} ")


@on([*LAYOUTS, *STAGES, *CUT])
def initial_values_of_a_seed(rank: Rank) -> None:
    kind = kind_of(rank)
    with torch.device("meta"):
        model = models.MODELS[kind](dropout=0.1)
    engine = rank.engine(model, models.optimizer_of("adamw", model), seed=5)
    rank.keep("initial", adapter.whole_state_of(engine))
    rank.step(engine, rank.batches(1, model=kind)[0], 2)
    rank.finish(engine)


class Norms(nn.Module):
    """Batch norm, whose statistics are of all ranks, and a buffer that the forward changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 6), nn.SyncBatchNorm(6), nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        out: Tensor = self.down(self.norm(self.up(x)))
        return out


@on(LAYOUTS)
def batch_norm_and_buffers(rank: Rank) -> None:
    model = models.filled(Norms())
    engine = rank.engine(model, models.optimizer_of("sgd", model))
    for batch in rank.batches(2):
        rank.step(engine, batch, 1)
    rank.finish(engine)


@on(LAYOUTS)
def a_step_that_is_not_finite(rank: Rank) -> None:
    engine = rank.engine(rank.model(), rank.optimizer("adamw"), nonfinite="skip", clip=0.5)
    for number, batch in enumerate(rank.batches(3)):
        if number == 1:
            batch["x"][0, 0] = torch.inf
        rank.step(engine, batch, 2)
    rank.finish(engine)


@on(LAYOUTS)
def a_loss_scale_that_is_too_large(rank: Rank) -> None:
    engine = rank.engine(
        rank.model(), rank.optimizer("adamw"), dtype="fp16-mixed", loss_scale=adapter.loss_scale(2.0**24)
    )
    for batch in rank.batches(5, dtype="fp16-mixed"):
        rank.step(engine, batch, 2)
    rank.note("state", repr(engine.step_state()))
    rank.finish(engine)


@on([*LAYOUTS, *STAGES])
def sums_of_metrics(rank: Rank) -> None:
    engine = rank.engine(rank.model(), rank.optimizer("sgd"))
    rank.step(engine, rank.batches(1)[0], 2)
    place, _ = adapter.data_place(rank.comm)
    with rank.section("metrics"):
        rank.note("sum", {k: float(v) for k, v in engine.sum({"a": place + 1, "b": torch.tensor(0.1 * place)}).items()})
        rank.keep("gathered", {"rows": engine.gather(torch.arange(3.0).repeat(place + 1, 1) * (place + 1))})
    rank.finish(engine)


@on(LAYOUTS)
def freeze_and_thaw(rank: Rank) -> None:
    model, optimizer = rank.model(), rank.optimizer("adamw")
    engine = rank.engine(model, optimizer)
    for number, batch in enumerate(rank.local(3)):
        for name, parameter in model.named_parameters():
            if "2." in name:
                parameter.requires_grad_(number != 1)
        loop(rank, model, engine, optimizer, [batch])
    rank.finish(engine)


@on(LAYOUTS)
def units_by_name(rank: Rank) -> None:
    engine = rank.engine(rank.model(), rank.optimizer("adamw"), units=("1", "3", "4.up"), bucket=0)
    for batch in rank.batches(2):
        rank.step(engine, batch, 2)
    rank.finish(engine)


@on(LAYOUTS)
def gradients_thrown_away(rank: Rank) -> None:
    model, optimizer = rank.model(dropout=0.2), rank.optimizer("adamw")
    engine = rank.engine(model, optimizer)
    for number, batch in enumerate(rank.local(3)):
        engine.backward(models.loss_sum(model, batch), count=models.count(batch))
        if number == 1:
            optimizer.zero_grad()
        else:
            optimizer.step()
            optimizer.zero_grad()
            rank.note("last", adapter.last_result_of(engine))
    rank.finish(engine)


@on(LAYOUTS)
def forwards_without_gradients(rank: Rank) -> None:
    model, optimizer = rank.model(dropout=0.2), rank.optimizer("adamw")
    engine = rank.engine(model, optimizer)
    for batch in rank.local(2):
        model.eval()
        with torch.no_grad(), rank.section("forward"):
            rank.note("loss", float(models.loss_sum(model, batch)))
        model.train()
        loop(rank, model, engine, optimizer, [batch])
    rank.finish(engine)


@on(LAYOUTS)
def a_penalty_of_whole_parameters(rank: Rank) -> None:
    model, optimizer = rank.model(), rank.optimizer("sgd")
    engine = rank.engine(model, optimizer)
    _, ranks = adapter.data_place(rank.comm)
    for batch in rank.local(2):
        loss = models.loss_sum(model, batch)
        with engine.gathered():
            loss = loss + sum((p.square().sum() for p in model.parameters()), torch.zeros(())) / ranks
            engine.backward(loss, count=models.count(batch))
        optimizer.step()
    rank.finish(engine)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.out(F.dropout(z.tanh(), 0.3, self.training))
        return out


class Drawing(nn.Module):
    """Draws by functions in its forward, and runs a part of it again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.decode = nn.Linear(5, 6), nn.Linear(5, 6), Decoder()

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.mean(x), self.spread(x)
        z = mean + spread * torch.randn_like(spread)
        out: Tensor = checkpoint(self.decode, z, use_reentrant=False)
        return out


@on(LAYOUTS)
def draws_in_a_forward(rank: Rank) -> None:
    model = models.filled(Drawing())
    engine = rank.engine(model, models.optimizer_of("adamw", model))
    for batch in rank.batches(2):
        rank.step(engine, batch, 2)
    rank.finish(engine)


@on([*LAYOUTS, *STAGES])
def ranks_without_samples(rank: Rank) -> None:
    engine = rank.engine(rank.model(dropout=0.1), rank.optimizer("adamw"), clip=0.3)
    for batch in rank.batches(2, samples=3):
        rank.step(engine, batch, 2)
    rank.finish(engine)


@on([*LAYOUTS, *STAGES, *CUT])
def drift_is_looked_for(rank: Rank) -> None:
    kind = kind_of(rank)
    engine = rank.engine(rank.model(model=kind), rank.optimizer("adamw"), check_drift=1)
    for batch in rank.batches(2, model=kind):
        rank.step(engine, batch, 1)
    rank.finish(engine)


@on(STAGES)
def uneven_stages(rank: Rank) -> None:
    split = {2: (4, 2), 3: (1, 3, 2)}[3 if "pipe=3" in rank.cell["mesh"] else 2]
    engine = rank.engine(rank.model(dropout=0.1), rank.optimizer("adamw"), split=split, schedule="zb_h1")
    for batch in rank.batches(2):
        rank.step(engine, batch, 4)
    rank.finish(engine)


@on(STAGES)
def three_stages_on_a_rank(rank: Rank) -> None:
    chunks = 2 if "pipe=3" in rank.cell["mesh"] else 3
    engine = rank.engine(rank.model(), rank.optimizer("adamw"), schedule="interleaved", chunks=chunks, hold=2)
    for batch in rank.batches(2):
        rank.step(engine, batch, 3)
    rank.finish(engine)


@on(CUT)
def a_plan_given_by_hand(rank: Rank) -> None:
    plan = {"*.up": "column", "*.down": "row", "5": "gathered", "*.norm": "whole"}
    engine = rank.engine(rank.model(), rank.optimizer("adamw"), tensor_plan=plan)
    for batch in rank.batches(2):
        rank.step(engine, batch, 2)
    rank.finish(engine)
