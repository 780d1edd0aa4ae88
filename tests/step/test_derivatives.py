"""Gradients that a program takes itself: scores, forces, penalties on gradients, and derivatives of these.

Fp64, against plain PyTorch: second derivatives must agree to 1e-11 like all other values.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_rank import same_as_plain
from engine_cases import ROWS, SPLIT_ROWS, Batch, Made, agree, batches, count, distinct, plain, sgd, train
from programs import COPIES, SPLIT, World, update
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.step import Engine

WIDTH = 5


def gradient(y: Tensor, x: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(y, x, **{"create_graph": True, **options})[0]


class Layer(nn.Module):
    """Smooth, with a norm, a view of a weight, a Linear on three dims, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)[:, None])).squeeze(1)
        return x + hidden @ self.down.weight.t() + self.down.bias


class Energy(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x * self.scale).square()


class Forces(Energy):
    """The model itself returns energy and forces."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        forces = gradient(energy.sum(), x, create_graph=self.training)
        return torch.cat((energy, forces), 1)


class Descending(nn.Module):
    """A block that descends its energy for some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x if x.requires_grad else x.requires_grad_()
            x = x - self.gain * gradient(self.energy(x).square().sum(), x)
        return x


class Descent(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Descending() for _ in range(num_blocks)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def masked(values: Tensor, batch: Any) -> Tensor:
    return (values.flatten(1).sum(1) * batch["mask"]).sum()


def leaf(batch: Any) -> Tensor:
    return batch["x"].clone().requires_grad_()


def score(model: nn.Module, batch: Any) -> Tensor:
    return masked((gradient(model(x := leaf(batch)).sum(), x) + batch["x"]).square(), batch)


def penalty(model: nn.Module, batch: Any) -> Tensor:
    """WGAN-GP's: the critic's own loss, and the norm of its gradient at other points."""
    real = masked(model(batch["x"]), batch)
    slope = gradient(model(x := leaf(batch) * 0.5).sum(), x)
    return real + masked((slope.norm(dim=1, keepdim=True) - 1).square(), batch)


def own_slope(model: nn.Module, batch: Any) -> Tensor:
    """At the points of the loss itself (R1)."""
    out = model(x := leaf(batch))
    return masked(out + gradient(out.sum(), x).square().sum(1, keepdim=True), batch)


def constant(model: nn.Module, batch: Any) -> Tensor:
    """Adversarial samples: the gradient is a number, its graph stays for the loss."""
    out = model(x := leaf(batch))
    slope = gradient(out.sum(), x, create_graph=False, retain_graph=True)
    return masked(out, batch) + masked(model(batch["x"] + 0.1 * slope.sign()), batch)


def third(model: nn.Module, batch: Any) -> Tensor:
    first = gradient(model(x := leaf(batch)).sum(), x)
    return masked(gradient(first.square().sum(), x).square(), batch)


def between(model: nn.Module, batch: Any) -> Tensor:
    """Two calls, of different parts of one graph."""
    first, second = leaf(batch), leaf(batch) * 2
    out = model(torch.cat((first, second)))
    slope = gradient(out.sum(), second)
    return masked(gradient(out.square().sum(), first).square() + slope.square(), batch)


def plainly(model: nn.Module, batch: Any) -> Tensor:
    return masked((model(batch["x"]) - 0.1).square(), batch)


class Telling(nn.Module):
    """A block whose own gradient leaves as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        self.slope = gradient(out.square().sum(), x).square().sum(1)
        return x + out


class Tellers(Descent):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Telling() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def told(model: nn.Module, batch: Any) -> Tensor:
    """Nothing but these attributes leads to the blocks."""
    model(batch["x"])
    return (torch.stack([block.slope for block in model.blocks]) * batch["mask"]).sum()


class Tied(Energy):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


class Reused(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(self.layers[1](x)))


class Checkpointed(Energy):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
        return self.head(self.first(x) * self.scale).square()


class Equilibrium(nn.Module):
    """A fixed point, whose backward solves for another one with its own gradients (DEQ)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 1)

    def towards(self, z: Tensor, x: Tensor) -> Tensor:
        for part in self.parts:
            z = torch.tanh(part(z))
        return 0.3 * z + x

    def forward(self, x: Tensor) -> Tensor:
        z = x
        with torch.no_grad():
            for _ in range(20):
                z = self.towards(z, x)
        z = self.towards(z, x)
        start = z.detach().requires_grad_()
        end = self.towards(start, x)

        def solved(incoming: Tensor) -> Tensor:
            found = incoming
            for _ in range(20):
                found = incoming + gradient(end, start, grad_outputs=found, retain_graph=True, create_graph=False)
            return found

        z.register_hook(solved)
        return self.head(z)


PROGRAMS: dict[str, tuple[type[nn.Module], Callable[..., Tensor]]] = {
    "score": (Energy, score),
    "penalty": (Energy, penalty),
    "own slope": (Energy, own_slope),
    "constant": (Energy, constant),
    "third": (Energy, third),
    "between": (Energy, between),
    "forces": (Forces, plainly),
    "descent": (Descent, plainly),
    "score of a descent": (Descent, score),
    "attributes": (Tellers, told),
}

KINDS: dict[str, tuple[type[nn.Module], Callable[..., Tensor], tuple[str, ...], dict[str, Any]]] = {
    "frozen": (Energy, penalty, ("first", "layers.1"), {}),
    "frozen inside": (Descent, score, ("blocks.1",), {}),
    "tied": (Tied, penalty, (), {}),
    "tied, frozen": (Tied, third, ("layers.0.up.weight",), {}),
    "reused": (Reused, own_slope, (), {}),
    "nested units": (Energy, penalty, (), {"units": ["layers.0", "layers.0.up", "layers.2.norm"]}),
    "one unit": (Energy, third, (), {"units": []}),
    "recomputed": (Energy, penalty, (), {"recompute": "full"}),
    "recomputed inside": (Descent, plainly, (), {"recompute": "full"}),
    "checkpoints": (Checkpointed, penalty, (), {}),
    "equilibrium": (Equilibrium, plainly, (), {}),
    "equilibrium, frozen": (Equilibrium, plainly, ("parts.0",), {}),
    "no prefetch": (Energy, penalty, (), {"prefetch": 0}),
}


ROWS_THAT_SPLIT = [where for where in SPLIT if where not in COPIES]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replica=2 shard=2"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_is_that_of_one_process(program: str, mesh: str, row: str) -> None:
    kind, loss = PROGRAMS[program]
    template, data = distinct(kind()), batches(2)
    agree(train(template, mesh, row, data, loss=loss, microbatches=2), plain(template, data, loss=loss))


@pytest.mark.parametrize("row", SPLIT_ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_units_of_every_kind(kind: str, row: str) -> None:
    model, loss, frozen, settings = KINDS[kind]
    template, data = distinct(model()), batches(2)
    for name, parameter in template.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    agree(
        train(template, "replica=2 shard=2", row, data, loss=loss, microbatches=2, **settings),
        plain(template, data, loss=loss),
    )


def in_two_backwards(engine: Any, batch: Any, number: int) -> None:
    losses = [(masked(engine.model(batch["x"]), batch), count(batch)), (score(engine.model, batch), 0)]
    for loss, terms in losses[:: -1 if number else 1]:
        engine.backward(loss, terms)


def with_gradients_of_parameters(engine: Any, batch: Any, number: int) -> None:
    loss = masked(engine.model(batch["x"]), batch)
    with engine.gathered():
        parameters = list(engine.model.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        loss = loss + sum((g * p.detach()).sum() for g, p in zip(gradients, parameters, strict=True))
    engine.backward(loss, count(batch))


def with_functional_transforms(engine: Any, batch: Any, number: int) -> None:
    slopes = torch.func.vmap(torch.func.grad(lambda x: engine.model(x[None]).sum()))
    with engine.gathered():
        loss = masked(slopes(batch["x"]).square(), batch)
    engine.backward(loss, count(batch))


def beside_an_evaluation(engine: Any, batch: Any, number: int) -> None:
    engine.model.eval()
    for create_graph in (False, True):
        gradient(engine.model(x := leaf(batch)).sum(), x, create_graph=create_graph)
    with torch.no_grad():
        engine.model(batch["x"])
    engine.backward(penalty(engine.model.train(), batch), count(batch))


LOOPS = [in_two_backwards, with_gradients_of_parameters, with_functional_transforms, beside_an_evaluation]


@pytest.mark.parametrize("where", ["zero2", *ROWS_THAT_SPLIT])
@pytest.mark.parametrize("loop", LOOPS)
@same_as_plain()
def test_in_a_loop_of_a_program(world: World, loop: Any) -> None:
    engine = world.engine(distinct(Energy()))
    for number, batch in enumerate(batches(2)):
        loop(engine, world.part(batch), number)
        update(engine)
    return engine.full_state_dict()


def path_loss(g: nn.Module, x: Tensor) -> Tensor:
    noise = x.clone().requires_grad_()
    return gradient(g(noise).sum(), noise).square().sum()


@pytest.mark.parametrize("where", ["ddp", "zero2", *ROWS_THAT_SPLIT])
@same_as_plain()
def test_a_generator_and_a_critic_with_penalties(world: World) -> None:
    g = world.engine(distinct(nn.Sequential(Layer(), nn.Linear(WIDTH, WIDTH)), seed=1), sgd)
    d = world.engine(distinct(Energy(), seed=2), sgd)
    for x in (world.part(batch)["x"] for batch in batches(3)):
        fake = g.model(x).detach()
        middle = (0.3 * x + 0.7 * fake).requires_grad_()
        slope = gradient(d.model(middle).sum(), middle)
        loss = (d.model(fake) - d.model(x)).sum() + 10 * (slope.norm(dim=1) - 1).square().sum()
        d.backward(loss, len(x))
        update(d)
        g.backward(path_loss(g.model, x) - d.model(g.model(x)).sum(), len(x), also=[d])
        update(g)
        d.optimizers[0].zero_grad()
    return g.full_state_dict(), d.full_state_dict()


def test_a_gradient_inside_of_a_block_gathers_nothing_and_keeps_nothing_whole() -> None:
    def gathered(engine: Engine) -> Any:
        entries = engine.comm.ledger.entries
        return engine.placed.bytes_held()["gathered_peak"], [
            e.note.unit for e in entries if e.note.phase == "inner backward"
        ]

    template, data = distinct(Descent(7)), batches(1)
    for record in train(template, "shard=2", "zero3", data, loss=plainly, look=gathered, prefetch=0):
        peak, inner = record.seen
        assert inner == [] and peak < 0.5 * sum(p.nbytes for p in template.parameters())
    for record in train(distinct(Energy()), "shard=2", "zero3", data, loss=score, look=gathered, prefetch=0):
        assert record.seen[1] == ["root", "head", "layers.2", "layers.1", "layers.0", "first"]


def links() -> nn.Module:
    return distinct(nn.Sequential(Descending(), Descending(), Descending(), nn.Linear(WIDTH, 1)))


@pytest.mark.parametrize("row", ["ddp", "zero3", "zero3_keep", "hpz"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_inside_of_a_link_of_a_pipeline(row: str, schedule: str) -> None:
    template, data = links(), batches(2)
    ranks = train(template, "pipe=2 shard=2", row, data, loss=plainly, microbatches=3, schedule=schedule)
    agree(ranks, plain(template, data, loss=plainly))


def silent(model: nn.Module, batch: Batch) -> Tensor:
    return masked(gradient(model(x := leaf(batch)).sum(), x, allow_unused=True, materialize_grads=True), batch)


class Sloping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return gradient(super().forward(x).sum(), x, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@pytest.mark.parametrize("loss", [score, silent, plainly])
def test_through_several_links_of_a_pipeline_it_is_refused(row: str, loss: Any) -> None:
    """Where the input is on another stage torch would call it unused, or give zeros."""
    kind = Sloping if loss is plainly else nn.Sequential
    with pytest.raises(ValueError, match="outside of the pipeline's links"):
        train(kind(Layer(), Layer(), nn.Linear(WIDTH, 1)).double(), "pipe=2", row, batches(1), loss=loss)


def transformed(model: nn.Module, batch: Batch) -> Tensor:
    return masked(torch.func.grad(lambda x: model(x).sum())(batch["x"]), batch)


def borrowing() -> nn.Module:
    """Reads a parameter of another unit inside of a transform."""
    run = lambda m, x: m.second(m.first(x) + torch.func.grad(lambda z: (z * m.first.bias).sin().sum())(x))  # noqa: E731
    return Made(run, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, 1))


@pytest.mark.parametrize(("kind", "loss"), [(Energy, transformed), (borrowing, plainly)])
def test_a_transform_of_torch_func_with_parameters_at_rest_is_refused(kind: Any, loss: Any) -> None:
    with pytest.raises(ValueError, match=r"unit 'root'.*torch\.func.*engine\.gathered"):
        train(distinct(kind()), "shard=2", "zero3", batches(1), loss=loss)
