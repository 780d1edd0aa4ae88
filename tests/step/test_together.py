"""Several engines, several optimizers, parameters that are frozen for a while: as in plain PyTorch."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import same_as_plain
from engine_cases import Made, batches, count, distinct, loss_sum
from programs import ALONE, STAGES, Claims, World, chain, net, update
from tensor_models import model as tensor_model
from tensor_models import token_batches
from torch import Tensor, nn

claim = Claims()

Freeze = Callable[[str], bool]
PATTERNS: dict[str, Freeze] = {
    "whole blocks": lambda name: name.startswith(("0.", "2.")),
    "weights of a block": lambda name: name.startswith("1.") and name.endswith("weight"),
    "before a linear that trains": lambda name: "norm" in name or "up" in name,
    "all but the first": lambda name: not name.startswith("0."),
    "all but the last": lambda name: not name.startswith("3."),
    "of the tensor axis": lambda name: "qkv" in name or "down" in name or name == "embed.weight",
}
"""Parameters that are frozen in the second and third of five steps: values, momentum and decay wait."""


def set_frozen(model: nn.Module, frozen: Freeze, step: int) -> None:
    if step in (1, 3):
        for name, p in model.named_parameters():
            p.requires_grad_(step == 3 or not frozen(name))


@claim(STAGES, *PATTERNS)
def frozen_for_two_steps(pattern: str, world: World) -> Any:
    engine, losses = world.engine(chain()), []
    for number, batch in enumerate(batches(5)):
        set_frozen(engine.model, PATTERNS[pattern], number)
        losses.append(engine.step(iter(world.parts(batch, 2))).loss)
    return losses, engine.full_state_dict()


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv", "interleaved"])
@same_as_plain("pipe")
def test_frozen_under_other_schedules(world: World, schedule: str) -> Any:
    """Weight gradients in separate passes, and two stages on a rank that share a weight."""
    linears = [nn.Linear(5, 5) for _ in range(4)]
    linears[3].weight = linears[0].weight
    template = distinct(nn.Sequential(*(nn.Sequential(linear, nn.Tanh()) for linear in linears)))
    engine = world.engine(template, schedule=schedule)
    for number, batch in enumerate(batches(5)):
        set_frozen(engine.model, lambda name: name in ("0.0.weight", "2.0.weight", "1.0.bias"), number)
        engine.step(world.parts(batch, 4))
    return engine.full_state_dict()


@same_as_plain("tensor", tolerance=1e-09)
def test_frozen_under_the_tensor_axis(world: World) -> None:
    engine = world.engine(tensor_model(0.0))
    for number, batch in enumerate(token_batches(5)):
        set_frozen(engine.model, PATTERNS["of the tensor axis"], number)
        engine.step(world.parts(batch))
    return engine.full_state_dict()


# ---- optimizers -----------------------------------------------------------------------------------------------------


def two(parameters: Any) -> list[torch.optim.Optimizer]:
    matrices = torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.05, momentum=0.9)
    return [matrices, torch.optim.AdamW([p for p in parameters if p.dim() < 2], lr=0.02, eps=1e-4)]


@claim(STAGES, "a list", "a dict", "later")
def two_optimizers(given: str, world: World) -> Any:
    engine = world.engine(chain(), None if given != "a list" and world.comm else two)
    if given == "a dict" and world.comm:
        engine.use(dict(enumerate(two(list(engine.model.parameters())))))
    elif given == "later" and world.comm:
        engine.use(two(list(engine.model.parameters())))
    return [engine.step(world.parts(batch, 2)).loss for batch in batches(3)], engine.full_state_dict()


@claim(ALONE, False, True)
def two_optimizers_in_a_loop(swap: bool, world: World) -> Any:
    engine = world.engine(net(), two)
    pair = engine.optimizers
    for number, batch in enumerate(map(world.part, batches(4))):
        engine.backward(loss_sum(engine.model, batch), count(batch))
        for optimizer in reversed(pair) if swap else pair:
            if number:
                optimizer.step()
            optimizer.zero_grad()
    return engine.full_state_dict()


# ---- engines --------------------------------------------------------------------------------------------------------


def generator() -> nn.Module:
    return distinct(nn.Sequential(cases.Block(), nn.Linear(5, 5), cases.Block()), seed=1)


def critic() -> nn.Module:
    return distinct(nn.Sequential(cases.Block(), cases.Block(), nn.Linear(5, 1)), seed=2)


def score(out: Tensor, wanted: float) -> Tensor:
    return (out - wanted).square().sum()


@claim(ALONE, "named", "frozen meanwhile")
def a_generator_and_its_critic(how: str, world: World) -> Any:
    g, d = world.engine(generator()), world.engine(critic())
    for batch in map(world.part, batches(3)):
        x = batch["x"]
        d.model.requires_grad_(True)
        d.backward(score(d.model(x), 1) + score(d.model(g.model(x).detach()), 0), 2 * len(x))
        update(d)
        d.model.requires_grad_(how == "named")
        g.backward(score(d.model(g.model(x)), 1), len(x), also=[d] if how == "named" else [])
        update(g)
        d.optimizers[0].zero_grad()
    return g.full_state_dict(), d.full_state_dict()


@claim(ALONE)
def two_models_trained_by_one_loss(world: World) -> Any:
    engines = g, d = world.engine(generator()), world.engine(critic())
    for batch in batches(3):
        for part in world.parts(batch, 2):
            d.backward(score(d.model(g.model(part["x"])), 1), len(part["x"]), also=[g])
        for engine in engines:
            update(engine)
    return [(engine.full_state_dict(), engine.last.loss) for engine in engines]


@claim(ALONE, "teacher", "frozen teacher", "perceptual loss")
def a_model_that_another_one_looks_at(kind: str, world: World) -> Any:
    g = world.engine(generator())
    other = (critic() if kind == "perceptual loss" else generator()).eval().requires_grad_(kind == "teacher")
    other = world.engine(other, None).model
    for x in (world.part(batch)["x"] for batch in batches(3)):
        if kind == "perceptual loss":
            loss = score(other(g.model(x)), 1)
        else:
            with torch.no_grad():
                target = other(x) * 2
            loss = (g.model(x) - target).square().sum()
        g.backward(loss, len(x))
        update(g)
    return g.full_state_dict()


def tied() -> nn.Module:
    """The head is tied to the first layer."""
    first, middle, last = (nn.Linear(5, 5, bias=False) for _ in range(3))
    last.weight = first.weight
    return Made(lambda m, x: m.last(m.middle(m.first(x)).tanh()), first=first, middle=middle, last=last)


@claim(ALONE, False, True)
def evaluations_around_the_update(grad: bool, world: World) -> Any:
    """A forward without a backward leaves nothing gathered that is old after the update."""
    engine, outputs = world.engine(distinct(tied())), []
    x = batches(1)[0]["x"]
    for batch in map(world.part, batches(3)):
        engine.backward(loss_sum(engine.model, batch), count(batch))
        for then in (update, id):
            engine.model.eval()
            with torch.set_grad_enabled(grad):
                outputs.append(engine.model(x).detach())
            engine.model.train()
            then(engine)
    return outputs, engine.full_state_dict()


# ---- terms that modules leave, numbers beside the loss --------------------------------------------------------------


class Router(nn.Module):
    """Leaves a term of the loss on itself, as mixture-of-experts layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 5)
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        self.aux = gates.square().sum()
        return x * gates


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = Router(), nn.Linear(5, 5)
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.router(x))
        self.aux = self.router.aux
        return out


def by_class(model: Any) -> Any:
    return sum(m.aux for m in model.modules() if isinstance(m, Router))


def by_attribute(model: Any) -> Any:
    return sum(m.aux for m in model.modules() if hasattr(m, "aux") and isinstance(m.aux, Tensor)) / 2


def by_name(model: Any) -> Any:
    return sum(m.aux for name, m in model.named_modules() if name.endswith("router"))


def by_cleared_block(model: Any) -> Any:
    """They were cleared in the step before, so that each has the attribute."""
    total = sum(block.aux for block in model)
    for block in model:
        block.aux = 0.0
    return total


def by_default(model: Any) -> Any:
    return sum(getattr(block, "router", None).aux for block in model if getattr(block, "router", None))


def by_apply(model: Any) -> Any:
    found: list[Tensor] = []
    model.apply(lambda module: found.append(module.aux) if isinstance(module, Router) else None)
    return sum(found)


TERMS = [by_class, by_attribute, by_name, by_cleared_block, by_default, by_apply]


@claim(ALONE, *TERMS)
def terms_of_modules(way: Any, world: World) -> Any:
    engine = world.engine(chain(Expert), loss_fn=lambda model, batch: loss_sum(model, batch) + way(model))
    return [engine.step(world.parts(batch, 2)).loss for batch in batches(2)], engine.full_state_dict()


@pytest.mark.parametrize("where", ["pipe", "pipe and shard"])
@same_as_plain()
def test_modules_may_be_walked_before_their_forward(world: World) -> None:
    def clearing(model: Any, batch: cases.Batch) -> Tensor:
        for module in model.modules():
            module.aux = 0.0
        assert [block.aux for block in model] == [0.0] * 4
        return loss_sum(model, {key: value.to(next(model.parameters()).device) for key, value in batch.items()})

    engine = world.engine(chain(Expert), loss_fn=clearing)
    return [engine.step(world.parts(batch, 2)).loss for batch in batches(2)]


@pytest.mark.parametrize("where", [*ALONE, "tensor"])
@same_as_plain()
def test_a_loss_over_the_features_of_all_ranks_has_the_gradients_of_one_process(world: World) -> None:
    x_BC, ends = torch.arange(42.0, dtype=torch.float64).sin().view(7, 6), [0, 2, 2, 5, 7]
    template = distinct(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)))
    template.tensor_plan = lambda: {"0": "column", "2": "row"} if world.where == "tensor" else {}
    engine = world.engine(template, cases.sgd)
    start = ends[world.place]
    stop = 7 if world.place + 1 == world.ranks else ends[world.place + 1]
    for _ in range(2):
        rows = engine.model(x_BC[start:stop])
        every, size = rows, rows.square().sum()
        if world.comm:
            every, size = engine.gather(rows), engine.sum({"a": size})["a"]
        labels = start + torch.arange(len(rows))
        loss = nn.functional.cross_entropy(rows @ every.T, labels, reduction="sum") + (rows / size.sqrt()).sum()
        engine.backward(loss, stop - start)
        update(engine)
    return engine.full_state_dict()


# ---- SyncBatchNorm: of the whole batch, forward, backward and buffers ------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "mean of all": {"momentum": None},
    "no weights": {"affine": False},
    "no statistics": {"track_running_stats": False},
}


def deal_unevenly(batch: cases.Batch, world: World) -> cases.Batch:
    """All ranks have different numbers of samples; the first has none, where there are several."""
    ends = [0] + [round(13 * (i / max(1, world.ranks - 1)) ** 2) if world.ranks > 1 else 13 for i in range(world.ranks)]
    return {name: value[ends[world.place] : ends[world.place + 1]] for name, value in batch.items()}


def normalising(kind: str, uneven: bool, world: World) -> Any:
    def link() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, **KINDS[kind]), nn.Tanh())

    template = chain(link)
    if kind == "usual":
        template[1][1].requires_grad_(False)
    if world.comm:
        template = nn.SyncBatchNorm.convert_sync_batchnorm(template)
    engine = world.engine(template, loss_fn=lambda model, batch: (model(batch["x"]) - 0.5).square().sum())
    for batch in batches(3):
        batch["mask"][:] = 1
        engine.step([deal_unevenly(batch, world)] if uneven else world.parts(batch))
    state = engine.full_state_dict()
    if "pipe" in world.where:
        return state
    engine.model.eval()
    with torch.no_grad():
        return state, engine.model(batches(1)[0]["x"])


for kind, uneven in itertools.product(KINDS, (False, True)):
    claim[f"norms: {kind}{', uneven' * uneven}"] = STAGES, partial(normalising, kind, uneven)


@claim.under(STAGES)
def test_under_pipelines_too(name: str, where: str) -> None:
    claim.check(name, where)


@claim.under(ALONE)
def test_in_a_loop_of_a_program(name: str, where: str) -> None:
    claim.check(name, where)


@same_as_plain("zero3", tolerance=1e-10)
def test_images_in_a_loop(world: World) -> None:
    """[samples, channels, height, width]; nothing asks for the gradient of a norm's weight."""
    norms = nn.BatchNorm2d(3).requires_grad_(False), nn.BatchNorm2d(4)
    made = nn.Sequential(nn.Conv2d(2, 3, 3), norms[0], nn.ReLU(), nn.Conv2d(3, 4, 3), norms[1], nn.Flatten())
    template = distinct(made)
    x = torch.randn(7, 2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    engine = world.engine(nn.SyncBatchNorm.convert_sync_batchnorm(template) if world.comm else template)
    for _ in range(3):
        out = engine.model(x.tensor_split(world.ranks)[world.place])
        engine.backward((out - 1).square().sum(), out.numel(), "sum")
        update(engine)
    return engine.full_state_dict()
