"""When a rank raises: its own traceback, the others stop at once, and whoever catches it can go on."""

from __future__ import annotations

import copy
import traceback

import engine_cases as cases
import pytest
import torch
from engine_cases import ROWS, adamw, batches, count, deal, loss_sum
from torch import Tensor, nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.mesh import Mesh


class Failing(cases.Block):
    """Raises in forward or backward while ``broken`` says so."""

    broken = ""

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.broken == "forward":
            raise ArithmeticError("of the user's own")
        out: Tensor = super().forward(x_BC)
        if self.broken == "backward" and out.requires_grad:
            out.register_hook(self.fail)
        return out

    def fail(self, gradient: Tensor) -> Tensor:
        raise ArithmeticError("of the user's own")


def failing() -> nn.Module:
    model = cases.Net(3)
    model.blocks[1] = Failing()
    return cases.distinct(model)


def build(template: nn.Module, comm: Comm, row: str) -> Engine:
    model = copy.deepcopy(template)
    return Engine(
        model, comm, strategy=row, optimizer=adamw(model.parameters()), loss_fn=loss_sum, count_fn=count, clip=0.5
    )


@pytest.mark.parametrize("row", ["ddp", "zero3", "hsdp"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_rank_raising_ends_all_at_once_with_its_own_traceback(where: str, row: str) -> None:
    template = failing()

    def body(comm: Comm) -> None:
        engine = build(template, comm, row)
        engine.model.blocks[1].broken = where if comm.rank == 2 else ""  # type: ignore[union-attr, index]
        engine.step(deal(batches(1)[0], comm.mesh, comm.rank, 2))

    with pytest.raises(ArithmeticError, match="of the user's own") as caught:
        run(Mesh(replica=2, shard=2), body, deadline=3600)  # the test would end before this wait does
    lines = "".join(traceback.format_exception(caught.value))
    assert "test_exceptions.py" in lines and "rank 2" in lines


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_a_caught_exception_the_next_step_is_as_if_nothing_had_been(row: str, where: str) -> None:
    """All ranks fail alike, in the second microbatch, and catch it: nothing of the failed step stays."""
    template, data = failing(), batches(4)

    def body(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        states = []
        for fails in (False, True):
            engine = build(template, comm, row)
            for number, batch in enumerate(data):
                parts = deal(batch, comm.mesh, comm.rank, 2)
                if fails and number == 2:
                    broken = engine.model.blocks[1]  # type: ignore[union-attr, index]
                    with pytest.raises(ArithmeticError):
                        calls = iter(("", where))
                        hook = broken.register_forward_pre_hook(
                            lambda module, args, calls=calls: setattr(module, "broken", next(calls, where))
                        )
                        engine.step(parts)
                    hook.remove()
                    broken.broken = ""
                result = engine.step(parts)
                assert result.step == number
            states.append(engine.full_state_dict())
        return states[0], states[1]

    for straight, again in run(Mesh(replica=2, shard=2), body, deadline=20):
        assert all(torch.equal(straight[name], again[name]) for name in straight)
