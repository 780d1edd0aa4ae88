"""What cannot be cut, or does not fit, is refused before it trains wrongly; what fails ends every rank at once."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import Batch, batches, count, distinct, loss_sum
from pipeline_cases import Chain, build, chain, linear, on, refused, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.comm import Comm, run
from plait.core.actions import parse_schedule
from plait.core.mesh import Mesh

RANKS = Path(__file__).with_name("pipeline_ranks.py")


# ---- models that no chain of links is -------------------------------------------------------------------------


class Between(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = torch.tanh(link(x))
        return x


class Residual(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = x + link(x)
        return x


class InPlace(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
            x *= 3
        return x


class Transposed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x).t()
        return x


class Reordered(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in (self.links[0], self.links[2], self.links[1]):
            x = link(x)
        return x


class Looped(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Doubled(Chain):
    def pipeline_links(self) -> list[str]:
        return ["l0", "l1", "l1", "l2"]

    def forward(self, x: Tensor) -> Tensor:
        for name in ("l0", "l1", "l2"):
            x = getattr(self, name)(x)
        return x


class Pair(nn.Module):
    """Takes a second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.inner(x) + y
        return out


class Skipping(Chain):
    def forward(self, x: Tensor) -> Tensor:
        early = self.l0(x)
        out: Tensor = self.l2(self.l1(early), early)
        return out


class Reading(Chain):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.l2(self.l1(self.l0(x)), x)
        return out


class Scaling(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x * 3))


WRONG = (Between, Residual, InPlace, Transposed, Reordered, Looped, Doubled, Skipping, Reading, Scaling)


@pytest.mark.parametrize("split", [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_is_no_chain_is_right_or_refused(kind: type[Chain], split: tuple[int, int]) -> None:
    """Never wrong: a stage that computed twice, or on another stage's tensor, would train on nonsense."""
    model = distinct(kind(linear(), linear(), Pair() if kind in (Skipping, Reading) else linear()))
    data = [{name: tensor[:5] for name, tensor in batch.items()} for batch in batches(2)]  # square: 5 x 5
    sizes = (split[0], split[1] + (kind is Doubled))
    try:
        ranks = cases.train(model, "pipe=2", "ddp", data, split=sizes)
    except ValueError as error:
        assert re.search(r"link|stage|stream|pipeline", str(error)), error
    else:
        cases.agree(ranks, cases.plain(model, data))


class Unnamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()


class Rootless(Chain):
    def __init__(self, *links: nn.Module) -> None:
        super().__init__(*links)
        self.scale = nn.Parameter(torch.ones(()))


class Nowhere(Chain):
    def pipeline_links(self) -> list[str]:
        return ["l0", "l9"]


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


@pytest.mark.parametrize(
    "words, model",
    [
        (r"pipeline_links\(\)", Unnamed()),
        ("'scale' belongs to no link", Rootless(linear(), linear())),
        ("'l9', which is no module", Nowhere(linear(), linear())),
        ("2 stages, but the model has 1 links", chain(linear())),
        ("one tensor", chain(Pairs(), linear())),
    ],
)
def test_models_that_cannot_be_cut(words: str, model: nn.Module) -> None:
    refused(words, model)


# ---- losses -------------------------------------------------------------------------------------------------


def twice(model: nn.Module, batch: Batch) -> Tensor:
    return loss_sum(model, batch) + loss_sum(model, batch)


def never(model: nn.Module, batch: Batch) -> Tensor:
    return batch["x"].sum()


def greedy(model: nn.Module, batch: Batch) -> Tensor:
    try:
        return loss_sum(model, batch)
    except BaseException:
        return torch.zeros(())


def link_by_link(model: nn.Module, batch: Batch) -> Tensor:
    for link in model.links:  # type: ignore[union-attr]
        batch = batch | {"x": link(batch["x"])}
    return batch["x"].sum()


def regularised(model: nn.Module, batch: Batch) -> Tensor:
    squares = torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return loss_sum(model, batch) + squares


def by_name(model: nn.Module, batch: Batch) -> Tensor:
    return loss_sum(model, batch) + model.l0.weight.square().sum()  # type: ignore[union-attr, operator]


def recomputed(model: nn.Module, batch: Batch) -> Tensor:
    out = checkpoint(model, batch["x"], use_reentrant=False)
    return (out**2).sum()


@pytest.mark.parametrize("row, mesh", [("ddp", "pipe=2"), ("zero3", "pipe=2 shard=2")])
@pytest.mark.parametrize("loss", [twice, never, greedy, link_by_link, regularised, by_name, recomputed])
def test_losses_that_no_stage_can_run(loss: Any, row: str, mesh: str) -> None:
    words = "call model|did not call|loss_fn reads|another stage has|is used by|got nothing"
    with pytest.raises((ValueError, AttributeError), match=words):
        cases.train(chain(), mesh, row, batches(1), loss=loss, microbatches=2)


def test_an_output_whose_shape_changes_for_batches_of_one_shape() -> None:
    class Sometimes(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x[:, : 3 + self.calls % 2]

    class Whatever(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1, keepdim=True).expand(-1, 5)

    data = batches(1, samples=12)
    with pytest.raises(ValueError, match="depend on the shapes of the batch only"):
        cases.train(
            chain(linear(), Sometimes(), Whatever(), linear()), "pipe=2", "ddp", data, microbatches=3, split=(2, 2)
        )


# ---- schedules and splits -----------------------------------------------------------------------------------

GOOD = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    "words, settings",
    [
        ("did you mean 1f1b", {"schedule": "1fb1"}),
        ("only interleaved takes chunks", {"chunks": 2}),
        ("8 stages, but the model has 4 links", {"schedule": "interleaved", "chunks": 4}),
        ("1 \\+ 2 = 3 links, but the model has 4", {"split": (1, 2)}),
        ("at least one", {"split": (4, 0)}),
        ("at least one", {"split": (5, -1)}),
        ("for 3 stages, but the pipeline has 2", {"split": (1, 2, 1)}),
        ("1B1 is missing", {"schedule": GOOD.removesuffix(" 1B1")}),
        ("1B1 is doubled", {"schedule": GOOD + " 1B1"}),
        ("1B0 is out of order", {"schedule": "0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1"}),
        ("deadlock: rank 0 waits at 0B0", {"schedule": "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"}),
        ("1 lines", {"schedule": "0F0 0B0 0F1 0B1"}),
        ("written for 1 microbatches, but the step brings 2", {"schedule": "0F0 0B0\n1F0 1B0"}),
        ("rank 1", {"schedule": "0F0 0B0 0F1 0B1\n-"}),
        ("rank 1", {"schedule": "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1\n-"}),
        ("UPDATE", {"schedule": "0F0 0F1 0B0 0B1 0REDUCE\n1F0 1B0 1F1 1B1 1REDUCE"}),
    ],
)
def test_schedules_and_splits_that_do_not_fit(words: str, settings: dict[str, Any]) -> None:
    if " " in settings.get("schedule", ""):
        settings = settings | {"schedule": parse_schedule(settings["schedule"])}
    refused(words, chain(), microbatches=2, **settings)


# ---- ranks that disagree ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, values",
    [
        ("schedule", ("gpipe", "1f1b")),
        ("schedule", ("interleaved", "1f1b")),
        ("split", ((1, 3), (2, 2))),
        ("split", ((3, 1), (2, 2))),
        ("strategy", ("ddp", "zero3")),
        ("clip", (None, 0.1)),
        ("seed", (0, 1)),
    ],
)
def test_ranks_that_were_built_differently_are_told(name: str, values: tuple[Any, Any]) -> None:
    def body(comm: Comm) -> None:
        build(chain(), comm, **{name: values[comm.rank]})

    with pytest.raises(ValueError, match=name):
        on("pipe=2", body)


def test_ranks_that_bring_different_batches() -> None:
    def numbers(comm: Comm) -> None:
        step(build(chain(), comm), batches(1)[0], 3 + comm.rank)

    def samples(comm: Comm) -> None:
        step(build(chain(), comm), batches(2)[comm.rank])

    with pytest.raises(ValueError, match="different numbers of microbatches"):
        on("pipe=2", numbers)
    with pytest.raises(ValueError, match="differ in pipe only"):
        on("pipe=2", samples)


# ---- failures -----------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Raises in the third forward, or in the backward of what came third, on one stage."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def fail(self, *_: object) -> None:
        raise ArithmeticError("of the user's own")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and self.how == "forward":
            self.fail()
        if self.calls == 3 and self.how == "backward":
            x = x * 1
            x.register_hook(self.fail)
        return x


@pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_one_stage_that_fails_ends_all_with_its_own_traceback(how: str, stage: int, order: str) -> None:
    def body(comm: Comm) -> None:
        model = chain(*(nn.Sequential(linear(), Failing()) for _ in range(3)))
        model.links[stage][1].how = how  # type: ignore[index]
        step(build(model, comm, schedule=order), batches(1)[0], 6)

    started = time.monotonic()
    with pytest.raises(ArithmeticError, match="of the user's own") as caught:
        run(Mesh.parse("pipe=3"), body, deadline=60)
    assert time.monotonic() - started < 10, "nobody waits for the deadline"
    lines = "".join(traceback.format_exception(caught.value))
    assert "test_pipeline_faults.py" in lines and f"rank {stage} of 3" in lines


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_step_after_one_that_failed_is_right_or_refused_at_once(order: str) -> None:
    """Every rank raises and catches; what is left of the messages must not be taken for the next step's."""
    together = threading.Barrier(2)
    data = batches(2, samples=12)
    wanted = (loss_sum(chain(), data[1]) / count(data[1])).item()

    def body(comm: Comm) -> None:
        bad = [True, False, False, False] if comm.rank == 0 else [True]  # in which microbatch, from behind

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            if bad and bad.pop():
                raise ArithmeticError("a bad batch")
            return loss_sum(model, batch)

        engine = build(chain(), comm, loss_fn=loss, schedule=order)
        with pytest.raises((ArithmeticError, TimeoutError)):
            step(engine, data[0])
        together.wait(20)
        bad.clear()
        assert abs(step(engine, data[1]).loss - wanted) < 1e-11

    started = time.monotonic()
    try:
        on("pipe=2", body, deadline=2)
    except ValueError as error:
        assert "step before" in str(error)
    assert time.monotonic() - started < 3.5, "the second step waited for messages that never come"


# ---- processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def play() -> Iterator[Any]:
    processes: list[subprocess.Popen[str]] = []

    def start(how: str, rank: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", str(RANKS), how, str(rank)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_a_process_fails_with_its_traceback_alone_and_the_others_end(play: Any) -> None:
    started = time.monotonic()
    process = play("backward", 1)
    out, err = process.communicate(timeout=90)
    assert time.monotonic() - started < 60, "nobody waits for the deadline of 120 s"
    assert (process.returncode, out) == (1, "")
    assert err.startswith("Traceback") and err.count("Traceback") == 1
    *_, error, last = err.splitlines()
    assert error == "ArithmeticError: of the user's own"
    assert last == "plait: rank 1 of mesh pipe=3 failed as above; the others were stopped"


def test_processes_keep_few_messages_and_train_as_one(play: Any) -> None:
    """Microbatches without samples among them, so also messages without content."""
    out, err = play("memory", 0).communicate(timeout=90)
    assert not err
    losses, messages = (line.split() for line in out.splitlines())
    truth = cases.plain(chain(*(linear() for _ in range(3))), batches(2, samples=10), clip=1.0)
    assert [float(loss) for loss in losses] == pytest.approx(truth.losses, abs=1e-11)
    at_most, in_the_end = [int(n) for n in messages[::2]], [int(n) for n in messages[1::2]]
    assert in_the_end == [0, 0, 0]
    assert max(at_most) <= 6, f"of 12 microbatches, {at_most} messages are under way on the three ranks"
