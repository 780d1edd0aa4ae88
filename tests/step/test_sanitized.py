"""Sanitizers see in an engine: a flipped bit of shared values, a collective that one rank adds."""

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import engine_cases as cases
import pipeline_cases
import pytest
import tensor_models
import torch
from each_rank import each_rank
from torch import Tensor, nn

from plait import run_threads
from plait.comm import AbortedError, Comm, MismatchError, run
from plait.referee.sanitize.collectives import check_collectives
from plait.referee.sanitize.drift import DriftCheck, DriftError
from plait.step import Engine
from plait.table.cells import Strategy, find_strategy
from plait.table.mesh import Mesh

STEPS, FLIPPED = 4, 1


def flip(tensor: Tensor) -> None:
    """The lowest bit of the first element."""
    tensor.detach().view(-1).view(torch.uint8)[0] ^= 1


def told(
    template: nn.Module, mesh: str, row: str | Strategy, rank: int, harm: Callable[[Engine], None], **settings: Any
) -> list[str]:
    """Words of each rank about a harm to one of them behind step 1; "" where it trains on."""
    shape = Mesh.parse(mesh)
    batches = settings.pop("batches", cases.batches)(STEPS)

    def body(comm: Comm) -> str:
        comm.engine_watchers = (partial(DriftCheck, every=1),)
        engine = pipeline_cases.build(template, comm, strategy=row, **settings)
        for number, batch in enumerate(batches):
            try:
                engine.step(cases.deal(batch, shape, comm.rank, 2))
            except DriftError as error:
                assert number == FLIPPED + 1, "not at the next check"
                return str(error)
            if number == FLIPPED and comm.rank == rank:
                harm(engine)
        return ""

    return run_threads(shape, body, deadline=60)


def parameter(name: str) -> Callable[[Engine], None]:
    """A bit of a parameter at rest."""

    def harm(engine: Engine) -> None:
        values = next(h.tensor for h in DriftCheck(engine, 1).held() if h.what.startswith(f"parameter '{name}'"))
        flip(values)

    return harm


def moment(name: str, key: str = "exp_avg_sq") -> Callable[[Engine], None]:
    """A bit of what the optimizer keeps for it."""

    def harm(engine: Engine) -> None:
        [piece, *_] = [piece for piece in engine.placed.owned if piece.name == name]
        flip(engine.optimizer.state[piece.view][key])

    return harm


def found(texts: Sequence[str], what: str, where: str) -> None:
    assert len(set(texts)) == 1, texts
    assert what in texts[0] and where in texts[0] and "step 2 (counted from 0)" in texts[0], texts[0]
    assert "after the check of step 1;" in texts[0], texts[0]


UP, DOWN, TIED = "blocks.1.up.weight", "blocks.1.down.weight", "l0.weight"
TWO = "differs between rank 0 and rank 1"
REPLICAS = "differs between rank 1 and rank 3"
OF_THREE = "is another on rank 1 than on ranks 0, 2"
OF_FOUR = "is another on rank 1 than on ranks 0, 2, 3"


@pytest.mark.parametrize(
    ("mesh", "row", "harm", "name", "where"),
    [
        ("shard=2", "ddp", moment, UP, TWO),
        ("shard=2", "zero1", parameter, UP, TWO),
        ("replica=3", "zero2", parameter, UP, OF_THREE),
        ("replica=2 shard=2", "ddp", moment, UP, OF_FOUR),
        ("replica=2 shard=2", "hsdp", parameter, DOWN, REPLICAS),
        ("replica=2 shard=2", "hsdp", moment, DOWN, REPLICAS),
        ("replica=2 shard=2", "psdp", parameter, DOWN, REPLICAS),
        ("tensor=2", "ddp", parameter, "blocks.0.norm.weight", TWO),
        ("tensor=2", "zero3", moment, "blocks.0.norm.weight", TWO),
        ("replica=2 tensor=2", "ddp", parameter, "blocks.0.mlp.up.weight", REPLICAS),
        ("replica=2 tensor=2", "hsdp", moment, "blocks.0.mlp.up.weight", REPLICAS),
        ("pipe=2", "zero3", moment, TIED, TWO),
        ("pipe=3", "ddp", parameter, TIED, OF_THREE),
        ("pipe=2 replica=2", "ddp", parameter, "l0.bias", TWO),
    ],
)
def test_a_flipped_bit_is_found_at_the_next_check(mesh: str, row: str, harm: Any, name: str, where: str) -> None:
    template, more = cases.net(), {}
    if "tensor" in mesh:
        template, more = tensor_models.model(), {"batches": tensor_models.token_batches}
    elif "pipe" in mesh:
        template = pipeline_cases.tied(3)
    found(told(template, mesh, row, 1, harm(name), **more), repr(name), where)


def test_the_optimizers_own_copy_of_16_bit_parameters() -> None:
    row = find_strategy("ddp").mixed("bf16")
    template = copy.deepcopy(cases.net()).float()
    harm: Callable[[Engine], None] = lambda engine: flip(engine.placed.owned[3].view)  # noqa: E731
    narrow = lambda steps: [{k: v.bfloat16() for k, v in b.items()} for b in cases.batches(steps)]  # noqa: E731
    found(told(template, "shard=2", row, 1, harm, batches=narrow), "master weights of", TWO)


def test_a_seed_that_changed_on_one_rank() -> None:
    def harm(engine: Engine) -> None:
        engine.seed = 5

    found(told(cases.net(), "replica=3", "zero3", 1, harm), "the seed", OF_THREE)


def test_what_a_rank_holds_alone_is_not_compared() -> None:
    assert set(told(cases.net(), "shard=2", "zero3", 1, lambda engine: flip(engine.placed.owned[0].view))) == {""}


def test_no_alarm_for_buffers_of_a_ranks_own() -> None:
    """Not dense, and norms of this rank's samples."""
    model = pipeline_cases.chain(nn.Linear(cases.WIDTH, cases.WIDTH), nn.BatchNorm1d(cases.WIDTH))
    model.register_buffer("thin", torch.eye(3).to_sparse())
    assert set(told(model, "shard=2", "ddp", 1, lambda e: e.model.register_buffer("mine", torch.ones(2)))) == {""}


@each_rank("shard=2")
def test_between_the_checks_nothing_is_sent_and_the_messages_of_a_check_are_no_part_of_a_step(comm: Comm) -> None:
    comm.engine_watchers = (partial(DriftCheck, every=2),)
    engine = pipeline_cases.build(cases.net(), comm)
    seen = []
    for batch in cases.batches(STEPS):
        comm.ledger.clear()
        engine.step(cases.deal(batch, comm.mesh, comm.rank, 1))
        seen.append([e.note.unit for e in comm.ledger if e.note.phase == "state"])
    assert seen == [[], ["drift"], [], ["drift"]]


@each_rank("shard=1", refused="check_drift -1: it is the number of steps")
def test_a_negative_number_of_steps_is_refused(comm: Comm) -> None:
    DriftCheck(pipeline_cases.build(cases.net(), comm), -1)


@pytest.mark.parametrize(("mesh", "row"), [("shard=3", "zero3"), ("pipe=2 replica=2", "zero2")])
def test_a_collective_that_one_rank_adds_is_told_to_all_in_the_step_that_follows(mesh: str, row: str) -> None:
    def body(comm: Comm) -> str:
        check_collectives(comm)
        template = pipeline_cases.chain() if comm.mesh.pipe > 1 else cases.net()
        engine = pipeline_cases.build(template, comm, strategy=row)
        first, second = (cases.deal(batch, comm.mesh, comm.rank, 4) for batch in cases.batches(2))
        engine.step(first)
        with pytest.raises((MismatchError, AbortedError)) as caught:
            if comm.rank == 1:
                comm.barrier(("pipe", "replica", "shard", "tensor"))
            engine.step(second)
        assert engine.steps == 1, "not in the step"
        return str(caught.value)

    for text in run(Mesh.parse(mesh), body, deadline=3600):  # at once: the test would end before a wait of so long
        assert re.search(r"rank 1: barrier .* at step/test_sanitized.py:\d+", text), text
        assert re.search(r"rank 0: .* at \w+/\w+.py:\d+, called from step/\w+.py:\d+", text), text
