"""Models as people write them, cut in stages: plain autograd's numbers, or a reason why not."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import tensor_models
import torch
from crossing_cases import Chain, chain
from each_rank import each_rank
from engine_cases import Batch, batches, distinct, loss_sum
from pipeline_cases import build, engine_on, linear, on, refused, same, step, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from plait.comm import Comm

BOTH = pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
ROWS = pytest.mark.parametrize("row, mesh", [("ddp", "pipe=2"), ("zero3", "pipe=2 shard=2")])


def squares(out: Tensor, batch: Batch) -> Tensor:
    return (((out - 0.5) ** 2).flatten(1).sum(1) * batch["mask"]).sum()


def link(run: Callable[[Tensor], Tensor]) -> nn.Module:
    return cases.Made(lambda module, x: run(x))


def fourier() -> nn.Module:
    """Complex numbers leave it."""
    return link(torch.fft.fft)


def real() -> nn.Module:
    return link(lambda x: x.real + 0.5 * x.imag)


EXPANDED, TOKENIZER = link(lambda x: x[:, :1].expand(-1, 5)), link(lambda x: (x * 3).long() % 11)
LINKS = {
    "no parameters at the first": (chain(nn.Tanh(), linear(), linear()), (1, 2)),
    "complex between": (chain(linear(), fourier(), real(), linear()), (2, 2)),
    "expanded": (chain(linear(), EXPANDED, linear()), (2, 1)),
    "integers between": (chain(TOKENIZER, nn.Embedding(11, 5), linear()), (1, 2)),
    "in place at the beginning": (distinct(nn.Sequential(linear(), nn.ReLU(inplace=True), linear())), (1, 2)),
    "a slice": (chain(linear(), nn.Sequential(linear(), nn.Linear(5, 3)), linear(3)), (2, 1)),
}


@ROWS
@BOTH
@pytest.mark.parametrize("name", LINKS)
def test_links_of_every_kind(name: str, order: str, row: str, mesh: str) -> None:
    model, split = LINKS[name]
    same(model, mesh, row, schedule=order, split=split)


@pytest.mark.parametrize("order", ["zbv", "dualpipe_v"])
@pytest.mark.parametrize("pair", [(nn.ReLU(inplace=True), nn.Dropout(0.0, inplace=True)), (fourier(), real())])
def test_links_between_two_stages_of_one_rank(pair: tuple[nn.Module, ...], order: str) -> None:
    same(chain(linear(), linear(), *pair, nn.Tanh(), linear()), schedule=order, split=(1, 2, 2, 1))


class ByKeyword(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(input=x)
        return x


class Scaled(Chain):
    """Works on the stream before, between and after its links."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 3
        for link in self.links:
            x = torch.nn.functional.layer_norm(torch.tanh(link(x)), (5,))
        return 2 * x


class Outside(Chain):
    """Recomputes its links from outside; the first two without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.l1(self.l0(x))
        for link in self.links[2:]:
            x = checkpoint(link, x, use_reentrant=False)
        return x


@ROWS
@BOTH
@pytest.mark.parametrize("kind", [Scaled, Outside])
def test_code_of_the_model_around_its_links_runs_once(kind: type[Chain], order: str, row: str, mesh: str) -> None:
    model = distinct(kind(linear(), linear(), linear(), linear()))
    for split in ((1, 3), (2, 2), (3, 1)):
        same(model, mesh, row, schedule=order, split=split, optimizer=cases.sgd)


def test_links_may_be_called_by_keyword() -> None:
    same(distinct(ByKeyword(linear(), linear(), linear())), "pipe=3")


def test_sequences_of_several_lengths_in_one_step_and_over_steps() -> None:
    template = chain(nn.Embedding(11, 5), linear(), linear())

    def parts(comm: Comm, seed: int) -> list[Batch]:
        lengths = (3, 5, 3, 1, 5)[seed:]
        return [{"x": tokens(2 + i, n)[0]["x"], "mask": tokens(2 + i, n)[0]["mask"]} for i, n in enumerate(lengths)]

    def body(comm: Comm) -> list[float]:
        engine = build(template, comm, schedule="zb_h1" if comm.mesh.pipe > 1 else None)
        return [engine.step(parts(comm, seed)).loss for seed in (0, 1, 2, 0)]

    wanted = on("pipe=1", body)[0]
    for found in on("pipe=3", body):
        assert found == pytest.approx(wanted, abs=1e-12)


def test_losses_that_read_attributes() -> None:
    model = chain()
    model.temperature = 2.0
    same(model, loss=lambda m, batch: loss_sum(m, batch) * m.temperature)


@pytest.mark.parametrize("lengths", [(7, 8, 7), (8, 7, 8), (5, 1, 6)], ids=str)
@pytest.mark.parametrize("ways", [2, 3])
def test_sequence_parallelism_in_stages_with_batches_of_several_lengths(ways: int, lengths: tuple[int, ...]) -> None:
    """The parts of 7 and of 8 steps are equally long on some ranks, and not on others."""
    template = tensor_models.model(dropout=0.0)
    data = [tensor_models.token_batches(1, samples=3, length=length)[0] for length in lengths]
    names = ["embed", "blocks.0", "blocks.1", "norm", "out"]

    def body(comm: Comm) -> list[float]:
        mine: Any = copy.deepcopy(template)
        mine.pipeline_links = lambda: names
        engine = engine_on(mine, comm, sequence_parallel=comm.mesh.tensor > 1)
        first = [engine.step([batch]).loss for batch in data]
        return [*first, engine.step(data).loss]

    (wanted,) = on("pipe=1", body)
    for losses in on(f"pipe=2 tensor={ways}", body, deadline=20):
        assert losses == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("row, mesh", [("ddp", "pipe=2"), ("zero3", "pipe=2"), ("zero3", "pipe=2 shard=2")])
@pytest.mark.parametrize("start", [0, 1, 4])
@each_rank(refused=r"loss_fn reads a parameter by '.*' outside of the model's call|is used by|belongs")
def test_a_regulariser_that_begins_later_is_refused_when_it_does(comm: Comm, start: int, row: str) -> None:
    calls = 0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        value = loss_sum(model, batch)
        return value if calls <= start else value + sum(p.square().sum() for p in model.parameters())

    engine = build(chain(linear(), linear()), comm, strategy=row, loss_fn=loss)
    for batch in batches(2, samples=12):
        step(engine, batch, 3)


class Counted(Chain):
    """Counts its forwards in its own buffer."""

    calls: Tensor

    def __init__(self, *links: nn.Module) -> None:
        super().__init__(*links)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("order", ["1f1b", "zbv", "interleaved"])
@each_rank("pipe=2")
def test_a_buffer_of_the_model_counts_a_microbatch_once(comm: Comm, order: str) -> None:
    engine = build(distinct(Counted(*(linear() for _ in range(4)))), comm, schedule=order)
    for batch in batches(2):
        step(engine, batch, 3)
    assert engine.full_state_dict()["calls"] == 6


class Listed(Chain):
    """Runs its links from a second place: a list, a dict, a tuple in both, or what a bound method returns."""

    def __init__(self, kind: str, *links: nn.Module) -> None:
        super().__init__(*links)
        made: dict[str, Any] = {
            "list": list(links),
            "method": self.listed,
            "dict": {str(i): link for i, link in enumerate(links)},
            "nested": {"all": [tuple(links)]},
        }
        self.order = made[kind]

    def forward(self, x: Tensor) -> Tensor:
        order = self.order() if callable(self.order) else self.order
        if isinstance(order, dict):
            order = order["all"][0] if "all" in order else list(order.values())
        for link in order:
            x = torch.tanh(link(x))
        return x

    def listed(self) -> list[nn.Module]:
        return list(self.links)


@pytest.mark.parametrize("order", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", ["list", "method", "dict", "nested"])
def test_links_that_the_model_keeps_a_second_time(kind: str, order: str) -> None:
    same(distinct(Listed(kind, *(linear() for _ in range(4)))), schedule=order)


@pytest.mark.parametrize("order", ["1f1b", "interleaved"])
@each_rank("pipe=2")
def test_links_whose_forward_is_patched(comm: Comm, order: str) -> None:
    template, data = chain(*(linear() for _ in range(4))), batches(2)
    model = copy.deepcopy(template)
    for link in model.children():
        link.forward = partial(lambda forward, x: forward(x) * 1.0, link.forward)
    engine = engine_on(model, comm, schedule=order)
    for batch in data:
        step(engine, batch, 3)
    state, truth = engine.full_state_dict(), cases.plain(template, data).state
    assert all(cases.close(state[name], value) for name, value in truth.items())


class InGroups(Chain):
    """Recomputes its links two by two; ``checkpoint_sequential`` all but the last two."""

    def __init__(self, last: bool) -> None:
        super().__init__(*(linear() for _ in range(4)))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        if not self.last:
            return checkpoint_sequential(self.links, 2, x, use_reentrant=False)
        for first, second in (self.links[:2], self.links[2:]):
            x = checkpoint(lambda y, f=first, s=second: s(torch.tanh(f(y))), x, use_reentrant=False)
        return x


@pytest.mark.parametrize("split", [(2, 2), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_groups_of_links_that_are_recomputed_together(last: bool, split: tuple[int, int]) -> None:
    model = distinct(InGroups(last))
    if split == (2, 2) or (split == (3, 1) and not last):
        same(model, split=split)
    else:
        refused("a checkpoint around several links of the pipeline holds links of two stages", model, split=split)
