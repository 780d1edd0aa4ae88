"""Models as people write them, cut in stages, against plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import Batch, batches, count, deal, distinct, loss_sum
from links_cases import Chain, chain
from pipeline_cases import build, linear, on, same, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


def test_batches_of_any_structure() -> None:
    template, data = chain(linear(), linear(), linear()), batches(1)[0]

    def with_tuples(comm: Comm) -> float:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            (x, (mask,)) = batch
            return squares(model(x), {"mask": mask})

        engine = build(template, comm, loss_fn=loss, count_fn=lambda batch: int(batch[1][0].sum()))
        return engine.step([(p["x"], (p["mask"],)) for p in deal(data, comm.mesh, comm.rank, 3)]).loss

    wanted = (loss_sum(template, data) / count(data)).item()
    assert on("pipe=2", with_tuples) == pytest.approx([wanted] * 2, abs=1e-12)


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
