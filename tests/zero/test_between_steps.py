"""Gradients that autograd's are, and changes to parameters between two steps: no bit depends on them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from each_rank import each_rank
from engine_cases import Made, distinct
from pipeline_cases import build, engine_on
from pytest import MonkeyPatch
from torch import Tensor, nn

import plait
from plait import run_threads as run
from plait.comm import Comm
from plait.schedule.actions import parse_schedule
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh
from plait.zero import adopted
from plait.zero.adopted import AdoptedGradient
from plait.zero.flat_gradient import Buffers


def net() -> nn.Module:
    """Parameters whose gradients are views of one tensor, a layer that is not used, and two that are."""
    run = lambda m, x: m.layers(x) * (m.a.view(6) + m.b.view(6)) ** 2  # noqa: E731
    parts = {"a": nn.Parameter(torch.ones(6, 1)), "b": nn.Parameter(torch.ones(2, 3)), "unused": nn.Linear(3, 3)}
    return Made(run, **parts, layers=nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().sum()


engine_of = partial(engine_on, optimizer=partial(torch.optim.SGD, lr=1.0), loss_fn=loss, count_fn=len)


def trained(mesh: str, sizes: list[int], own_loop: bool, **settings: Any) -> list[tuple[list[Tensor], set[str]]]:
    """Each rank's parameters after a few steps, and the parameters whose gradient was adopted in the last one."""

    torch.manual_seed(0)
    models = [first := net(), copy.deepcopy(first)]
    data = [[torch.randn(3, 6) for _ in range(count)] for count in sizes]

    def body(comm: plait.Comm) -> tuple[list[Tensor], set[str]]:
        how = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "clip": 0.1, "bucket": 0, "strategy": "zero3"}
        engine = engine_of(models[comm.rank], comm, **(how | settings))
        for batches in data:
            if own_loop:
                for batch in batches:
                    engine.backward(loss(engine.model, batch), len(batch))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                engine.step(batches)
        flats = [g for g in engine.placed.stages[0].gradients.flats if isinstance(g, AdoptedGradient)]
        return [o.view.detach().clone() for o in engine.placed.owned], {name for g in flats for name in g.adopted}

    return plait.run_threads(mesh, body, deadline=20)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 3, 1], [2, 2]])
@pytest.mark.parametrize(
    ("mesh", "settings"), [("shard=1", {}), ("shard=1", {"strategy": "ddp", "nonfinite": "skip"}), ("shard=2", {})]
)
def test_no_bit_depends_on_it(
    monkeypatch: MonkeyPatch, mesh: str, settings: dict[str, Any], sizes: list[int], own_loop: bool
) -> None:
    copied = trained(mesh, sizes, own_loop, **settings)
    monkeypatch.setattr(adopted, "LEAST", 0)
    found = trained(mesh, sizes, own_loop, **settings)
    for (values, names), (right, none) in zip(found, copied, strict=True):
        assert all(map(torch.equal, values, right)) and not none
        assert names == ({name for name, _ in net().named_parameters()} if mesh == "shard=1" else set())


@pytest.mark.parametrize("discarded", [False, True])
@each_rank("shard=1")
def test_a_gradient_that_is_not_finite_is_named_and_forgotten(
    comm: plait.Comm, monkeypatch: MonkeyPatch, discarded: bool
) -> None:
    monkeypatch.setattr(adopted, "LEAST", 0)
    engine = engine_of(model := nn.Linear(3, 2), comm)
    optimizer = engine.optimizer
    before = model.weight.detach().clone()
    handle = model.weight.register_hook(lambda gradient: gradient * float("nan"))
    engine.backward(model(torch.ones(1, 3)).sum(), 2, "sum")
    if discarded:
        optimizer.zero_grad()
    else:
        with pytest.raises(FloatingPointError, match="gradient in the unit of 'weight' in microbatch 0"):
            optimizer.step()
    handle.remove()
    assert torch.equal(model.weight, before)
    engine.backward(model(torch.ones(1, 3)).sum(), 2, "sum")
    optimizer.step()
    assert model.weight.isfinite().all() and not torch.equal(model.weight, before)


def whole() -> nn.Module:
    """One parameter whose gradient has the very memory of the output's, and of the input's."""
    return Made(lambda m, x: m.p.view(1, 3, 4) + x.view_as(x), p=nn.Parameter(torch.full((3, 4), 1.5)))


def update(engine: plait.Engine, loss: Tensor, **others: Any) -> None:
    engine.backward(loss, 4, "sum", **others)
    for each in (engine, *others.get("also", ())):
        each.optimizers[0].step()


def two_engines(comm: plait.Comm) -> list[Tensor]:
    models = whole(), whole()
    models[1].p = nn.Parameter(torch.full((4, 3), 1.5))
    a, b = (engine_of(model, comm) for model in models)
    update(a, (models[0].p.view(-1) + models[1].p.view(-1) - 2.5).square().sum(), also=[b])
    return [model.p for model in models]


def two_stages(comm: plait.Comm, *, tied: bool = False) -> list[Tensor]:
    model = nn.Sequential(whole(), whole())
    model[1].p = model[0].p if tied else model[1].p
    order = parse_schedule("0F0 1F0 1B0 0B0")
    engine = engine_of(model, comm, schedule=order, clip=0.1)
    engine.step([torch.ones(1, 3, 4)])
    return list(engine.full_state_dict().values())


def an_input(comm: plait.Comm) -> list[Tensor]:
    model, x = whole(), torch.ones(1, 3, 4, requires_grad=True)
    engine = engine_of(model, comm)
    for _ in range(2):
        engine.backward(loss(model, x), 4, "sum")
    engine.optimizers[0].step()
    return [model.p, x.grad]


def hooked(hook: Callable[[Tensor, list[Tensor]], object], after: bool) -> Callable[[plait.Comm], list[Tensor]]:
    def body(comm: plait.Comm) -> list[Tensor]:
        model, kept = nn.Linear(4, 3, bias=False), [torch.full((3, 4), 8.0)]
        nn.init.ones_(model.weight)
        model.weight.grad_dtype = None
        if after:
            model.weight.register_post_accumulate_grad_hook(lambda p: hook(p, kept))
        else:
            model.weight.register_hook(lambda gradient: hook(gradient, kept))
        engine = engine_of(model, comm)
        for _ in range(2):
            update(engine, model(torch.full((1, 4), 4.0)).sum())
        return [model.weight, *kept]

    return body


def put_average(p: Tensor, kept: list[Tensor]) -> None:
    p.grad = kept[0].mul_(0.5).add_(p.grad)


def put_numpy(p: Tensor, kept: list[Tensor]) -> None:
    kept[0].copy_(p.grad)
    p.grad = torch.from_numpy(kept[0].numpy())


def put_wider(p: Tensor, kept: list[Tensor]) -> None:
    p.grad = p.grad.double()


def put_before(comm: plait.Comm) -> list[Tensor]:
    model, buffer = whole(), torch.ones(3, 4)
    engine = engine_of(model, comm)
    model.p.grad = buffer
    update(engine, (model.p * 3).sum())
    return [model.p, buffer]


SHARED = {
    "views of one gradient in two engines": two_engines,
    "neighbouring stages on one rank": two_stages,
    "a weight of two stages": partial(two_stages, tied=True),
    "an input that has its gradient": an_input,
    "a hook that puts its average": hooked(put_average, after=True),
    "a hook that puts a numpy array": hooked(put_numpy, after=True),
    "a hook that puts another dtype": hooked(put_wider, after=True),
    "a hook that keeps the gradient": hooked(lambda p, kept: kept.append(p.grad), after=True),
    "a hook that keeps a view": hooked(lambda gradient, kept: kept.append(gradient.detach()), after=False),
    "a buffer that was .grad before": put_before,
}


@pytest.mark.parametrize("case", SHARED)
def test_memory_that_something_else_has_is_copied(monkeypatch: MonkeyPatch, case: str) -> None:
    (right,) = plait.run_threads("shard=1", SHARED[case], deadline=20)
    monkeypatch.setattr(adopted, "LEAST", 0)
    (found,) = plait.run_threads("shard=1", SHARED[case], deadline=20)
    assert all(map(torch.equal, found, right))


@each_rank("shard=1")
def test_autograds_tensor_is_the_sum_beside_empty_ones_and_a_hook_that_only_reads(
    comm: plait.Comm, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(adopted, "LEAST", 0)
    model, seen = whole(), []
    model.e, model.f = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(2, 0))
    model.p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    engine = engine_of(model, comm)
    for _ in range(2):
        engine.backward(sum((p * 3).sum() for p in model.parameters()), 4, "sum")
    engine.reduce()
    assert [o.gradient.data_ptr() for o in engine.placed.owned if o.name == "p"] == seen[:1] and len(seen) == 2


class ScheduleFree(torch.optim.Optimizer):
    """As the official one: it steps in its training mode only, and looks into its state when that begins."""

    def __init__(self, parameters: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "train_mode": False, "k": 0})

    @torch.no_grad()
    def turn(self, mode: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p] and group["train_mode"] != mode:
                    p.lerp_(self.state[p]["z"], 1 - (group["beta"] if mode else 1 / group["beta"]))
            group["train_mode"] = mode

    def train(self) -> None:
        self.turn(True)

    def eval(self) -> None:
        self.turn(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "not in train mode"
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (1 - group["beta"]))
                z.sub_(p.grad, alpha=group["lr"])


def sgd_engine(template: nn.Module, comm: Comm, row: str) -> Engine:
    return build(template, comm, strategy=row, optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "bf16"])
def test_a_schedule_free_optimizer_in_its_modes(row: str) -> None:
    """It is allowed where a rank has one copy of the parameters, and refused elsewhere."""
    x_BC, template = torch.linspace(-1, 1, 12, dtype=torch.float64).sin().view(2, 6), nn.Linear(6, 7)
    template = template if row == "bf16" else template.double()
    strategy = TABLE["zero3"].mixed("bf16") if row == "bf16" else TABLE[row]

    def body(comm: Comm, row: Any = strategy) -> list[Any]:
        model, seen = copy.deepcopy(template), []
        optimizer = plait.elementwise(ScheduleFree(model.parameters()))
        optimizer.train()
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        for _ in range(3):
            mine = x_BC[comm.rank :: comm.mesh.size]
            engine.backward(model(mine).square().sum(), len(mine))
            optimizer.step()
            optimizer.eval()
            seen.append(engine.full_state_dict()["weight"])
            optimizer.train()
        return seen

    if row not in ("ddp", "zero3"):
        with pytest.raises(ValueError, match=r"ScheduleFree changes parameters between steps, in train\(\)"):
            run(Mesh(shard=2), body, deadline=20)
        return
    (truth,) = run(Mesh(), lambda comm: body(comm, "ddp"))
    for seen in run(Mesh(shard=2), body, deadline=20):
        assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(seen, truth, strict=True))


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@each_rank("shard=1")
def test_gradients_are_there_behind_the_step(comm: Comm, row: str) -> None:
    """An optimizer around another one (Lookahead) asks which parameters had one."""
    engine = sgd_engine(nn.Linear(5, 3), comm, row)
    engine.backward(engine.model(torch.ones(2, 5)).sum(), 2)
    engine.optimizer.step()
    parameters = engine.optimizer.param_groups[0]["params"]
    assert parameters and all(p.grad is not None for p in parameters)


@pytest.mark.parametrize("row", ["zero1", "zero3"])
@each_rank("shard=2")
def test_hooks_behind_a_step_that_take_the_right_door(comm: Comm, row: str) -> None:
    engine = sgd_engine(distinct(nn.Linear(5, 3)).float(), comm, row)
    model, optimizer = engine.model, engine.optimizer

    def keeps_small(*call: Any) -> None:
        with torch.no_grad(), engine.gathered(modify=True):
            model.weight.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(keeps_small)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=False))
    for _ in range(3):
        engine.backward(model(torch.ones(2, 5)).square().sum(), 2)
        optimizer.step()
    assert engine.full_state_dict()["weight"].abs().max() <= 0.1


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_a_step_that_was_bound_before_the_engine(row: str) -> None:
    template, x = nn.Linear(5, 3), torch.ones(2, 5)

    def body(comm: Comm, old: bool) -> Any:
        model = copy.deepcopy(template)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = optimizer.step
        engine = Engine(model, comm, strategy=row, optimizer=optimizer)
        for _ in range(2):
            engine.backward(model(x + comm.rank).square().sum(), 2)
            update() if old else optimizer.step()
        return engine.full_state_dict()

    states = [state for old in (True, False) for state in run(Mesh(shard=2), partial(body, old=old), deadline=20)]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)


@each_rank("shard=1")
def test_the_smallest_free_buffer_that_is_large_enough_is_used_again(comm: Comm) -> None:
    buffers = Buffers(comm)
    views = [buffers.take(numel, torch.float32) for numel in (16, 4, 8)]
    for view in views:
        buffers.give(view)
    assert [buffers.take(numel, torch.float32).data_ptr() for numel in (3, 5)] == [v.data_ptr() for v in views[1:]]


@each_rank("shard=2")
def test_two_gradient_buffers_serve_all_units(comm: Comm) -> None:
    with plait.empty_parameters():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    engine = engine_on(model, comm, strategy="zero3", loss_fn=lambda model, x: model(x).square().sum(), count_fn=len)
    engine.step([torch.ones(2, 4)])
    assert len(engine.placed.stages[0].gradients.buffers._free) == 2
