"""Gradients are sums, divided once; a unit is gathered when its parameters are read and freed after the last read.

Each model here is one that a simple rule gets wrong: odd sizes, dtypes, frozen, borrowed and repeated reads.  After a
step's first microbatch autograd adds to the sums by itself.
"""

import copy
import re
from collections import defaultdict
from pathlib import Path
from threading import get_ident
from typing import Any

import engine_cases as cases
import pytest
import torch
from each_rank import each_rank
from engine_cases import ROWS, SPLIT_ROWS, Made, agree, batches, distinct, plain, sgd, train
from pipeline_cases import linear
from pytest import MonkeyPatch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.zero.gradients import GradientHook


def odd() -> nn.Module:
    """Zero-size, scalar, one-element, prime-sized and unused parameters beside each other."""
    sizes = {"nothing": (0, 4), "scalar": (), "one": (1,), "prime": (17, WIDTH), "unused": (7,)}
    run = lambda m, x: m.back((x @ m.prime.t() * m.scalar + m.one + m.nothing.sum()).tanh())  # noqa: E731
    return Made(run, **{name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}, back=nn.Linear(17, 3))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mesh", ["shard=3", "replica=2 shard=2"])
def test_odd_sizes_and_a_parameter_that_gets_no_gradient(mesh: str, row: str) -> None:
    """No gradient is not a zero gradient: weight decay would shrink it and moments would come to exist."""
    template = distinct(odd())
    look = lambda engine: [n for n, kept in engine.optimizer_state_dict()["state"].items() if not kept]  # noqa: E731
    ranks = train(template, mesh, row, batches(), microbatches=2, look=look)
    agree(ranks, plain(template, batches()))
    assert all(record.seen == ["nothing", "unused"] for record in ranks), "torch loads a state that has every name"
    assert all(("unused", 0, 7) not in step for record in ranks for step in record.gradients)


@pytest.mark.parametrize("row", ROWS)
def test_mixed_dtypes(row: str) -> None:
    """In one unit."""
    run = lambda m, x_BC: m.wide(m.narrow(x_BC.float()).tanh().double())  # noqa: E731
    template = distinct(Made(run, narrow=nn.Linear(cases.WIDTH, 9), wide=nn.Linear(9, 3)))
    template.narrow.float()
    ranks = train(template, "shard=3", row, batches(), clip=0.1, units=())
    agree(ranks, plain(template, batches(), clip=0.1), tolerance=1e-5)
    assert len({tuple(record.norms) for record in ranks}) == 1, "the norm is one number on all ranks"


def sparse() -> nn.Module:
    return Made(lambda m, x_BC: m.table((x_BC[:, 0] > 0).long()), table=nn.Embedding(4, 3, sparse=True))


class Reentrant(cases.Net):
    """Checkpoints that run their own backward inside the backward: a parameter gets two gradients in it."""

    def through(self, x_BC: Tensor) -> Tensor:
        for _ in range(2):
            x_BC = checkpoint(self.blocks[0], x_BC, use_reentrant=True)
        return x_BC


@pytest.mark.parametrize("row", ["ddp", "zero2"])
@pytest.mark.parametrize(
    ("kind", "words"), [(sparse, r"table\.weight.*sparse=False"), (Reentrant, r"second gradient.*use_reentrant=False")]
)
def test_gradients_that_cannot_be_added_up_are_refused(kind: Any, words: str, row: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(distinct(kind()), "shard=2", row, batches())


WIDTH = cases.WIDTH


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def frozen_first() -> nn.Module:
    """Trained after frozen: all gradients of the unit have come while its frozen weight is still needed."""
    return Made(lambda m, x: m.own(m.base(x).tanh()), base=frozen(linear()), own=linear())


def sharing() -> nn.Module:
    """Blocks that read one shared linear before their own."""
    shared = linear()
    return nn.Sequential(*(Made(lambda m, x: m.own(m.shared(x).tanh()), shared=shared, own=linear()) for _ in range(3)))


def frozen_twice() -> nn.Module:
    """A frozen module in the middle, called twice in a row."""
    run = lambda m, x: m.last(m.middle(m.middle(m.first(x))).tanh())  # noqa: E731
    return Made(run, first=linear(), middle=frozen(linear()), last=linear())


def two_inputs() -> nn.Module:
    """Learned latents (a leaf) attend to a memory through a frozen module of two inputs."""
    attend = lambda m, latent, memory: m.key(memory).tanh() * m.query(latent)  # noqa: E731
    cross = nn.ModuleList([Made(attend, key=frozen(linear()), query=frozen(linear()))])
    run = lambda m, x: m.cross[0](m.latent, m.memory(x))  # noqa: E731
    return Made(run, latent=nn.Parameter(torch.zeros(WIDTH)), memory=linear(), cross=cross)


def frozen_between() -> nn.Module:
    """A frozen scale, read before the model's own trained weight: its backward comes after that weight's gradient."""
    scale, turn = nn.Parameter(torch.ones(WIDTH), requires_grad=False), nn.Parameter(torch.ones(WIDTH, WIDTH))
    return Made(lambda m, x: (m.first(x) * m.scale) @ m.turn, first=linear(), scale=scale, turn=turn)


MODELS = {
    "frozen before own": lambda: nn.Sequential(frozen_first(), frozen_first()),
    "shared before own": sharing,
    "frozen, twice": frozen_twice,
    "frozen, two inputs": two_inputs,
    "frozen in the model itself": frozen_between,
}


@pytest.mark.parametrize("row", ["ddp", *SPLIT_ROWS])
@pytest.mark.parametrize("model", MODELS)
def test_frozen_and_shared_parameters_stay_until_they_were_read(model: str, row: str) -> None:
    template, data = distinct(MODELS[model]()), batches()
    ranks = train(template, "replica=2 shard=2", row, data, optimizer=sgd, microbatches=2)
    agree(ranks, plain(template, data, optimizer=sgd))
    still = {name for name, p in template.named_parameters() if not p.requires_grad}
    assert all(torch.equal(ranks[0].state[name], template.state_dict()[name]) for name in still)


def beside(m: Any, x_BC: Tensor) -> Tensor:
    """Each block calls a module which stands beside the blocks."""
    for block in m.blocks:
        x_BC = x_BC + block(x_BC, m.bias)
    return x_BC


@pytest.mark.parametrize(
    ("row", "prefetch", "recompute"),
    [("zero3", 0, None), ("zero3", 1, "full"), ("psdp", 1, None), ("psdp", 0, "full"), ("hsdp", 1, None)],
)
def test_a_module_beside_the_blocks_that_each_of_them_calls(row: str, prefetch: int, recompute: str | None) -> None:
    """The block is open while the module runs, though it is not around it."""
    biased = (Made(lambda m, x, bias: m.own(x + bias(x)).tanh(), own=linear()) for _ in range(3))
    template = distinct(Made(beside, bias=linear(), blocks=nn.ModuleList(biased)))
    ranks = train(template, "replica=2 shard=2", row, batches(), prefetch=prefetch, recompute=recompute)
    agree(ranks, plain(template, batches()))


def test_only_the_unsharding_writes_its_fields() -> None:
    """Stages and engines report each start to it; the consequences are in one file."""
    written = re.compile(r"(gathering|unsharding)\.\w+ *([-+]?=)[^=]")
    sources = Path(plait.__file__).parent.rglob("*.py")
    assert not [f"{path.name}: {found[0]}" for path in sources if (found := written.search(path.read_text()))]


class Net(nn.Module):
    """Blocks; the last one has a part that runs from the second microbatch on, and a parameter that a hook watches."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.late, self.watched = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        out: Tensor = self.watched(self.late(x) if number else x)
        return out.square().sum()


DATA = [torch.linspace(-1, number + 1.0, 12).view(3, 4).double() for number in range(4)]


def plain_sums(template: Net) -> tuple[dict[str, Tensor], list[Tensor]]:
    model, seen = copy.deepcopy(template), list[Tensor]()
    model.watched.weight.register_hook(seen.append)
    for number, x in enumerate(DATA):
        model(x, number).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, seen


def listening(model: nn.Module, comm: plait.Comm, sums: dict[str, Tensor] | None = None) -> plait.Engine:
    """An engine whose sums of the last step are kept in ``sums``."""

    def listen(event: str, engine: plait.Engine) -> None:
        if event == "reducing" and sums is not None:
            for gradient in engine.placed.stages[0].gradients.flats:
                sums.update((gradient.name(i), gradient.sum_of(i).clone()) for i in gradient.touched)

    return plait.Engine(
        model, comm, strategy="ddp", bucket=0, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), listener=listen
    )


@pytest.mark.parametrize("mesh", ["shard=1", "replica=2"])
def test_autograd_adds_to_sums_that_have_begun(mesh: str, monkeypatch: MonkeyPatch) -> None:
    """Hooks are called for first gradients, for the unit that is looked at, and where the program has a hook too."""
    template, heard = distinct(Net()), defaultdict[int, list[str]](list)
    wanted, gradients = plain_sums(template)
    call = GradientHook.__call__

    def hear(self: GradientHook, parameter: Tensor) -> None:
        heard[get_ident()].append(str(self))
        call(self, parameter)

    def body(comm: plait.Comm) -> None:
        model, seen, sums = copy.deepcopy(template), list[Tensor](), dict[str, Tensor]()
        model.watched.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        engine = listening(model, comm, sums)
        for _ in range(2):
            counts = list[int]()
            seen.clear()
            for number, x in enumerate(DATA):
                heard[get_ident()].clear()
                engine.backward(model(x, number), len(x), reduction="sum")
                counts.append(len(heard[get_ident()]))
                assert all(p.grad is None or type(p.grad) is not Tensor for p in model.parameters())
            engine.optimizers[0].step()
            assert counts == [8, 5, 3, 3], "all; late, watched.weight and blocks.0; without late"
            assert all(map(torch.equal, seen, gradients)) and sums.keys() == wanted.keys()
            assert all(torch.equal(sums[name], wanted[name]) for name in wanted)

    monkeypatch.setattr(GradientHook, "__call__", hear)
    plait.run_threads(mesh, body, deadline=20)


@each_rank("shard=1", sanitize=False)
def test_a_backward_that_fails_or_is_not_the_engines_leaves_nothing(comm: plait.Comm) -> None:
    template = distinct(Net())
    wanted, _ = plain_sums(template)

    def fail(gradient: Tensor) -> None:
        raise KeyError("in a backward")

    model, sums = copy.deepcopy(template), dict[str, Tensor]()
    engine = listening(model, comm, sums)
    engine.backward(model(DATA[0], 0), 3, reduction="sum")
    handle = model.late.weight.register_hook(fail)
    with pytest.raises(KeyError):
        engine.backward(model(DATA[1], 1), 3, reduction="sum")
    handle.remove()
    for number, x in enumerate(DATA):
        engine.backward(model(x, number), 3, reduction="sum")
        if number in (0, 2):
            with pytest.raises(ValueError, match=r"came outside of its engine's backward"):
                model.late(DATA[0]).sum().backward()
    engine.optimizers[0].step()
    assert sums.keys() == wanted.keys() and all(torch.equal(sums[name], wanted[name]) for name in wanted)
