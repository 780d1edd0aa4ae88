"""A stage that raises: its own traceback first, and the others end at once; messages that processes have under way."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import engine_cases as cases
import pytest
from engine_cases import Batch, batches, loss_sum
from pipeline_cases import build, chain, linear, on, step
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.table.mesh import Mesh

RANKS = Path(__file__).with_name("pipeline_ranks.py")


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
        model.links[stage][1].how = how
        step(build(model, comm, schedule=order), batches(1)[0], 6)

    with pytest.raises(ArithmeticError, match="of the user's own") as caught:
        run(Mesh.parse("pipe=3"), body, deadline=3600)  # the test would end before this wait does
    lines = "".join(traceback.format_exception(caught.value))
    assert "test_failures.py" in lines and f"rank {stage} of 3" in lines


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_step_after_one_that_failed_in_a_pipeline_is_refused_at_once(order: str) -> None:
    """Every rank raises and catches: what is left of the messages must not be taken for the next step's."""
    together = threading.Barrier(2)
    data = batches(2, samples=12)

    def body(comm: Comm) -> int:
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
        sent = len(comm.ledger.entries)
        with pytest.raises(ValueError, match="failed inside a pipeline"):
            step(engine, data[1])
        return len(comm.ledger.entries) - sent

    assert on("pipe=2", body, deadline=2) == [0, 0], "nothing is sent, and nothing waited for"


def test_processes_keep_few_messages_and_train_as_one(start: Any) -> None:
    """Microbatches without samples among them, so also messages without content."""
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the cases that the ranks import
    out, err = start(sys.executable, "-W", "ignore", str(RANKS), env=paths).communicate(timeout=90)
    assert not err
    losses, messages = (line.split() for line in out.splitlines())
    truth = cases.plain(chain(*(linear() for _ in range(3))), batches(2, samples=10), clip=1.0)
    assert [float(loss) for loss in losses] == pytest.approx(truth.losses, abs=1e-11)
    at_most, in_the_end = [int(n) for n in messages[::2]], [int(n) for n in messages[1::2]]
    assert in_the_end == [0, 0, 0]
    assert max(at_most) <= 6, f"of 12 microbatches, {at_most} messages are under way on the three ranks"
