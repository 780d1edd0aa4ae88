"""An average of the weights, and a program's own metrics: the plain loop's under every row."""

from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank, each_world
from engine_cases import adamw, batches, count, deal, loss_sum
from pipeline_cases import engine_on, step
from programs import STAGES, World, chain, layout
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import EMA, Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh


def model() -> nn.Module:
    made = chain()
    made[1].up.bias.requires_grad_(False)
    return made


def build(comm: Comm, row: str) -> tuple[Engine, EMA]:
    engine = engine_on(model(), comm, strategy=row)
    return engine, EMA(engine, 0.75)


def steps(engine: Engine, ema: EMA, data: list[cases.Batch]) -> None:
    for batch in data:
        step(engine, batch, 1)
        ema.update()


def plain() -> tuple[nn.Module, nn.Module]:
    alone, average = model(), model()
    optimizer = adamw(alone.parameters())
    for batch in batches(3):
        optimizer.zero_grad()
        (loss_sum(alone, batch) / count(batch)).backward()
        optimizer.step()
        add(average, alone)
    return alone, average


@torch.no_grad()
def add(average: nn.Module, model: nn.Module) -> None:
    for mean, p in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(p, 0.25)


def loss_of(model: nn.Module, batch: cases.Batch) -> float:
    return loss_sum(model, batch).item() / count(batch)


@pytest.mark.parametrize("where", STAGES)
@each_world()
def test_it_is_the_plain_average_and_the_weights_come_back(world: World) -> None:
    comm = world.comm
    engine, ema = build(comm, layout(world.where)[1])
    steps(engine, ema, batches(2))
    mean = ema.full_state_dict()
    if comm.mesh.pipe == 1:
        with ema.swapped(), engine.gathered():
            assert all(torch.equal(p, mean[name]) for name, p in engine.model.named_parameters())
    steps(engine, ema, batches(3)[2:])
    before, average, sent = engine.full_state_dict(), ema.full_state_dict(), len(comm.ledger.entries)
    ema.update()
    assert len(comm.ledger.entries) == sent, "an update sends nothing"
    parts = deal(batches(1)[0], comm.mesh, comm.rank, 2)
    with ema.swapped():
        inside = engine.evaluate(parts).loss
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())

    alone, mean = plain()
    assert all(cases.close(before[name], value) for name, value in alone.state_dict().items())
    assert all(cases.close(average[name], value) for name, value in mean.state_dict().items())
    assert engine.evaluate(parts).loss == pytest.approx(loss_of(alone, batches(1)[0]), rel=1e-11)
    add(mean, alone)
    assert inside == pytest.approx(loss_of(mean, batches(1)[0]), rel=1e-11)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@each_rank("shard=3")
def test_under_16_bits_it_is_the_average_of_the_masters(comm: Comm, row: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    engine = Engine(model, comm, strategy=TABLE[row].mixed("bf16"), optimizer=optimizer)
    ema, wanted = EMA(engine, 0.5), engine.full_state_dict()
    for _ in range(3):
        engine.backward(model(torch.ones(2, 4).bfloat16()).float().sum(), 8)
        optimizer.step()
        ema.update()
        for name, value in engine.full_state_dict().items():
            wanted[name].lerp_(value, 0.5)
    before = [p.detach().float() for p in model.parameters()] if row == "ddp" else []
    average = ema.full_state_dict()
    assert all(torch.equal(a, p.detach().float()) for a, p in zip(before, model.parameters(), strict=False))
    assert all(torch.equal(average[name], value) for name, value in wanted.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in average.values())


def a_step(engine: Engine, ema: EMA) -> None:
    with ema.swapped():
        steps(engine, ema, batches(1))


def twice(engine: Engine, ema: EMA) -> None:
    with ema.swapped(), ema.swapped():
        pass


def mid_step(engine: Engine, ema: EMA) -> None:
    engine.backward(loss_sum(engine.model, batches(1)[0]), 3)
    ema.full_state_dict()


def other_names(engine: Engine, ema: EMA) -> None:
    ema.load_full_state_dict({name: torch.zeros(2) for name in engine.full_state_dict()})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (a_step, "leave the block first"),
        (twice, "inside of another block"),
        (mid_step, "in the middle of a step"),
        (lambda engine, ema: EMA(engine, 9.99), r"a decay of 9\.99"),
        (other_names, r"has shape \(\d+.*the state has shape \(2,\)"),
    ],
)
def test_what_is_refused(wrong: Any, text: str) -> None:
    def body(comm: Comm) -> None:
        wrong(*build(comm, "zero3"))

    with pytest.raises(ValueError, match=text):
        run(Mesh(shard=2), body, deadline=20)


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3_keep", "hsdp"])
@pytest.mark.parametrize("when", ["before", "inside"])
def test_parameters_that_were_read_with_gradients_are_the_average_and_come_back(row: str, when: str) -> None:
    """A norm that a program logs, ``no_grad`` forgotten: a backward of it may come, so its units stay gathered."""

    def body(comm: Comm, read: str) -> Any:
        engine, ema = build(comm, row)

        def norm() -> None:
            with engine.gathered():
                sum(p.square().sum() for p in engine.model.parameters()).sqrt().item()

        steps(engine, ema, batches(2))
        if read == "before":
            norm()
        with ema.swapped():
            if read == "inside":
                norm()
            seen = engine.model(batches(1)[0]["x"]).detach()
        after = engine.model(batches(1)[0]["x"]).detach()
        steps(engine, ema, batches(3)[2:])
        return seen, after, engine.full_state_dict()

    expected, found = (run(Mesh(shard=2), partial(body, read=read))[0] for read in ("never", when))
    assert all(torch.equal(a, b) for a, b in zip(expected[:2], found[:2], strict=True))
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())


@pytest.mark.parametrize("where", [*STAGES, "tensor"])
@each_world()
def test_sums_count_each_data_rank_once(world: World) -> None:
    comm = world.comm
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    for p in model.parameters():
        nn.init.ones_(p)
    model.tensor_plan = lambda: {}
    engine = Engine(model, comm, strategy=layout(world.where)[1])
    mine, n = 1 + comm.data_rank, world.ranks
    total = n * (n + 1) // 2
    if comm.mesh.coordinates(comm.rank)["pipe"] + 1 < comm.mesh.pipe:
        sums, number, tensor, rows = (
            engine.sum(None),
            engine.sum(None),
            engine.sum("not looked at"),
            engine.gather(None),
        )
    else:
        sums = engine.sum({"right": mine, "loss": mine / 8, "by class": torch.tensor([True, mine > 1])})
        number, tensor = engine.sum(mine), engine.sum(torch.tensor(0.5 * mine).bfloat16())
        rows = engine.gather(torch.full((mine - 1, 2), mine, dtype=torch.int32))
    assert sums.keys() == {"right", "loss", "by class"} and sums["by class"].tolist() == [n, n - 1]
    assert (sums["right"], type(sums["right"])) == (total, int) == (number, type(number))
    assert (sums["loss"], type(sums["loss"])) == (total / 8, float)
    assert tensor.dtype == torch.float32 and tensor.item() == total / 2
    assert rows.dtype == torch.int32 and rows.shape[1] == 2
    assert rows[:, 0].tolist() == [mine for mine in range(1, n + 1) for _ in range(mine - 1)]


@each_rank("shard=2", refused="one need of a gradient")
def test_a_gradient_that_some_ranks_need_only_is_refused(comm: Comm) -> None:
    engine = Engine(chain(), comm, strategy="ddp")
    engine.gather(torch.ones(2, 3, requires_grad=comm.rank > 0))


@pytest.mark.parametrize("where", STAGES)
@each_world()
def test_a_metric_of_an_evaluation_is_the_plain_one(world: World) -> None:
    """Counted where the outputs are: in the loss function, which only the last stage carries to its end."""
    seen, outputs = {"above": 0, "all": 0}, list[Tensor]()

    def counting(model: nn.Module, batch: cases.Batch) -> Tensor:
        out = model(batch["x"])
        seen["above"] += int((out > 0.3).sum())
        seen["all"] += out.numel()
        outputs.append(out.detach())
        return (out.sum(1) * batch["mask"]).sum()

    engine = world.engine(chain(), loss_fn=counting)
    engine.evaluate(world.parts(batches(1)[0], 2))
    wanted = chain()(batches(1)[0]["x"]).detach()
    assert engine.sum(seen) == {"above": int((wanted > 0.3).sum()), "all": wanted.numel()}
    assert cases.close(engine.gather(torch.cat(outputs) if outputs else None), wanted)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda engine, rank: engine.sum({"a": 1, "b": 2} if rank else {"a": 1}), "sum different things"),
        (lambda engine, rank: engine.sum(1.0 if rank else 1), "sum different things"),
        (lambda engine, rank: engine.sum("loss"), "give numbers and tensors"),
        (lambda engine, rank: engine.gather(torch.ones(2, 2 + rank)), "after the first dim"),
        (lambda engine, rank: engine.gather(torch.ones(2) if rank else None), "after the first dim"),
        (lambda engine, rank: engine.gather(torch.ones(())), "a dim of samples"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run(Mesh(shard=2), lambda comm: call(engine_on(chain(), comm), comm.rank), deadline=20)


def test_a_world_has_the_names_that_launchers_use() -> None:
    assert run(Mesh(replica=3), lambda comm: (comm.world_size, comm.local_rank)) == [(3, 0), (3, 1), (3, 2)]
