"""Programs that are right: under every row each of them is the run of plain PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from engine_cases import Made, batches, count, distinct, loss_sum
from programs import ALONE, COPIES, EVERY, SPLIT, WHOLE, Claims, World, chain, net, step, update
from torch import Tensor, nn

claim = Claims()
WRITABLE = [where for where in WHOLE if where not in COPIES]


# ---- loops ----------------------------------------------------------------------------------------------------------


@claim(EVERY, iter, list)
def clipping_by_hand(forwards: Any, world: World) -> Any:
    """Forwards and backwards take turns, or all forwards come first."""
    engine, norms = world.engine(chain(partial(nn.Linear, 5, 5))), []
    for parts in (world.parts(batch, 2) for batch in batches(3)):
        for loss, part in zip(forwards(loss_sum(engine.model, p) for p in parts), parts, strict=True):
            engine.backward(loss, count(part))
        norms.append(engine.reduce(clip=0.1).grad_norm)
        update(engine)
    return norms, engine.full_state_dict()


@claim(EVERY, "a rank has no target", "a microbatch has no sample")
def little_data(kind: str, world: World) -> Any:
    engine, losses = world.engine(net()), []
    for batch in batches(2, 3 if "sample" in kind else 13):
        batch["mask"][:] = 1
        batch["mask"][6:] = 0
        losses.append(step(engine, *world.parts(batch, 2)))
    return losses, engine.full_state_dict()


@claim(EVERY)
def a_batch_that_zero_grad_discards(world: World) -> Any:
    engine = world.engine(net())
    for number, batch in enumerate(batches(3)):
        part = world.part(batch)
        engine.backward(loss_sum(engine.model, part), count(part))
        if number == 1:
            engine.optimizers[0].zero_grad()
        else:
            update(engine)
    return engine.full_state_dict()


@claim(ALONE, False, True)
def means_of_ragged_microbatches(none_here: bool, world: World) -> Any:
    """Where a microbatch has no term its mean is NaN."""
    engine, losses = world.engine(net()), []
    for batch in batches(3):
        batch["mask"][-7:] *= not none_here
        for part in world.parts(batch, 2):
            terms = (engine.model(part["x"]) - 0.5).square().sum(1)[part["mask"] == 1]
            engine.backward(terms.mean(), count(part), reduction="mean")
        update(engine)
        losses.append(engine.last.loss)
    return losses, engine.full_state_dict()


# ---- parameters that are read and written ---------------------------------------------------------------------------


@claim(EVERY, "before", "after")
def a_penalty_on_parameters(place: str, world: World) -> Any:
    engine, seen = world.engine(net()), []
    for batch in map(world.part, batches(3)):
        loss = loss_sum(engine.model, batch) if place == "after" else torch.zeros(())
        with engine.gathered():
            penalty = sum(p.square().sum() for p in engine.model.parameters())
        seen.append(penalty.item())
        loss = loss + (loss_sum(engine.model, batch) if place == "before" else 0) + 3 / world.ranks * penalty
        engine.backward(loss, count(batch))
        update(engine)
    return seen, engine.full_state_dict()


@claim(EVERY)
def a_norm_that_no_backward_follows(world: World) -> Any:
    engine, norms = world.engine(net()), []
    for batch in map(world.part, batches(3)):
        engine.backward(loss_sum(engine.model, batch), count(batch))
        for then in (update, id):
            with engine.gathered():
                norms.append(sum(p.square().sum() for p in engine.model.parameters()).item())
            then(engine)
    return norms, engine.full_state_dict()


@claim(EVERY)
def a_model_that_runs_where_it_is_gathered(world: World) -> Any:
    engine = world.engine(net())
    for batch in map(world.part, batches(3)):
        with engine.gathered("blocks.0", "head.weight"):
            with torch.no_grad():
                loss_sum(engine.model, batch)
            loss = loss_sum(engine.model, batch) + engine.model.blocks[0].up.weight.abs().sum() / world.ranks
            engine.backward(loss, count(batch))
        update(engine)
    return engine.full_state_dict()


@claim(SPLIT, "a layer", "the model")
def calls_of_a_different_number_on_each_rank(called: str, world: World) -> Any:
    engine = world.engine(net())
    for number, batch in enumerate(map(world.part, batches(4))):
        with engine.gathered(), torch.no_grad():
            for _ in range((world.rank + number) % 3):
                (engine.model if called == "the model" else engine.model.blocks[1])(batch["x"])
        step(engine, batch)
    return engine.full_state_dict()


def write(model: nn.Module, how: str) -> None:
    """Clamps the parameters."""
    if how == "as one vector":
        vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(vector.clamp(-0.2, 0.2), model.parameters())
    for parameter in model.parameters():
        if how == "in place":
            with torch.no_grad():
                parameter.clamp_(-0.2, 0.2)
        elif how == "p.data in place":
            parameter.data.clamp_(-0.2, 0.2)
        elif how == "p.data replaced":
            parameter.data = parameter.data.clamp(-0.2, 0.2)
        elif how == "loaded":
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


@claim(EVERY, "in place", "p.data in place", "p.data replaced", "as one vector")
def written_inside_of_gathered(how: str, world: World) -> Any:
    engine = world.engine(net())
    for batch in map(world.part, batches(3)):
        step(engine, batch)
        with engine.gathered(modify=True):
            write(engine.model, how)
    return engine.full_state_dict()


@claim(WRITABLE, "in place", "p.data in place", "loaded", "swapped for an evaluation")
def written_between_steps(how: str, world: World) -> Any:
    engine, losses = world.engine(net()), []
    average = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for batch in map(world.part, batches(3)):
        step(engine, batch)
        own = {name: p.data for name, p in engine.model.named_parameters()}
        if how.startswith("swapped"):
            for name, p in engine.model.named_parameters():
                p.data = average[name].lerp_(p.detach(), 0.1)
        else:
            write(engine.model, how)
        with torch.no_grad():
            losses.append(loss_sum(engine.model, batches(1)[0]).item())
        for name, p in engine.model.named_parameters() if how.startswith("swapped") else ():
            p.data = own[name]
    return losses, engine.full_state_dict()


class Clamped(nn.Linear):
    """Keeps its weights small itself."""

    how = "in place"

    def forward(self, x: Tensor) -> Tensor:
        write(self, self.how)
        return super().forward(x)


class Router(nn.Linear):
    """Casts a module to the dtype that it has, in every forward, as the routers of Switch and NLLB do."""

    def forward(self, x: Tensor) -> Tensor:
        self.to(x.dtype)
        return super().forward(x)


def routed(model: Any, x: Tensor) -> Tensor:
    model.inner = model.inner.to(x.dtype)
    return model.inner(x)


def with_class(kind: type[nn.Module]) -> nn.Module:
    model: Any = net()
    for block in model.blocks:
        block.up.__class__ = kind
        if kind is Router:
            block.down = Made(routed, inner=block.down)
    return model


def mask(model: Any, x: Tensor) -> Tensor:
    """Writes to an output: ``nn.Linear`` returns a view where its input has three dims."""
    hidden = model.first(x[:, None].repeat(1, 3, 1))
    hidden[:, 0] = 0
    return model.second(torch.tanh(hidden)).sum(1)


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda p: p,
    "expanded": lambda p: p.expand(13, -1, -1)[0],
    "detached": lambda p: p.detach(),
    "transposed": lambda p: p.t().t(),
    "in a dict": lambda p: {"queries": (p[None], 3)},
}


def attend(model: Any, x: Tensor) -> Tensor:
    out = model.latents()
    queries = out["queries"][0] if isinstance(out, dict) else out
    return model.second((torch.tanh(model.first(x)[:, None] * queries) + queries.square()).sum(1))


def perceiver(how: str) -> nn.Module:
    """Learned queries: the output of their unit is its own parameter."""
    latents = Made(lambda m: RETURNED[how](m.queries), queries=nn.Parameter(torch.zeros(3, 5)))
    return distinct(Made(attend, latents=latents, first=nn.Linear(5, 5), second=nn.Linear(5, 5)))


MODELS: dict[str, tuple[list[str], Callable[[], nn.Module]]] = {
    "writes its parameters": (WRITABLE, lambda: with_class(Clamped)),
    "is cast to its own dtype": (EVERY, lambda: with_class(Router)),
    "writes to an output": (EVERY, lambda: distinct(Made(mask, first=nn.Linear(5, 5), second=nn.Linear(5, 5)))),
} | {f"returns its parameter {how}": (EVERY, partial(perceiver, how)) for how in RETURNED}


def layer() -> nn.Module:
    """Looks at the relative positions that it is given."""
    run = lambda m, x, positions: x + m.out(torch.tanh(m.mix(x) @ positions.t()) @ positions)  # noqa: E731
    return Made(run, mix=nn.Linear(5, 5), out=nn.Linear(5, 5))


def deberta() -> nn.Module:
    """The blocks get a table's weight itself; the head is a product with the embedding's (no root parameters)."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        for layer in m.layers:
            x = layer(x, m.positions.weight)
        return F.linear(x, m.embed.weight)

    layers = nn.ModuleList(layer() for _ in range(3))
    return Made(run, embed=nn.Linear(5, 5), positions=nn.Embedding(3, 5), layers=layers)


def detr() -> nn.Module:
    """The model's own forward reads a table that is never called, and goes on with a view of it."""

    def run(m: Any, x: Tensor) -> Tensor:
        queries = m.queries.weight[2:].unsqueeze(0)
        for layer in m.layers:
            x = layer(x, queries[0] * m.scale)
        return m.head(x + queries[0, 0])

    parts = {"queries": nn.Embedding(7, 5), "scale": nn.Parameter(torch.ones(()))}
    return Made(run, **parts, layers=nn.ModuleList(layer() for _ in range(2)), head=nn.Linear(5, 2))


BORROWING: dict[str, tuple[type[nn.Module], tuple[str, ...], dict[str, Any]]] = {
    "given to blocks": (deberta, (), {}),
    "given to blocks, frozen": (deberta, ("positions", "layers.1"), {}),
    "given to blocks, recomputed": (deberta, (), {"recompute": "full"}),
    "given to blocks, nothing ahead": (deberta, (), {"prefetch": 0}),
    "never called": (detr, (), {}),
    "never called, frozen": (detr, ("queries",), {}),
    "nested units": (detr, (), {"units": ["queries", "layers.0.mix", "layers.1", "layers.1.out", "head"]}),
}


@claim(ALONE, *BORROWING)
def borrowed_parameters(kind: str, world: World) -> Any:
    model, frozen, settings = BORROWING[kind]
    template = distinct(model())
    for name, parameter in template.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    engine = world.engine(template, **{"bucket": 0, **settings})
    return [engine.step(world.parts(batch, 2)).loss for batch in batches(3)], engine.full_state_dict()


def of_a_model(name: str, world: World) -> Any:
    engine = world.engine(MODELS[name][1]())
    losses = [step(engine, world.part(batch), loss=lambda m, b: 0.01 * loss_sum(m, b)) for batch in batches(3)]
    return losses, engine.full_state_dict()


for name, (layouts, _) in MODELS.items():
    claim[f"a model that {name}"] = layouts, partial(of_a_model, name)


@claim.under(EVERY)
def test_under_every_row(name: str, where: str) -> None:
    claim.check(name, where)


@claim.under(ALONE)
def test_in_full_precision(name: str, where: str) -> None:
    claim.check(name, where)


@claim.under(SPLIT)
def test_where_parameters_are_split(name: str, where: str) -> None:
    claim.check(name, where)


@claim.under(WRITABLE)
def test_where_parameters_may_be_written(name: str, where: str) -> None:
    claim.check(name, where)
