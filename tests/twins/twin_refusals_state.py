"""More misuse: parameters read and written at the wrong time, states, checkpoints, collectives."""

from __future__ import annotations

from pathlib import Path

import adapter
import torch
from twin_rank import Rank
from twin_refusals import REFUSALS, backward, build, refusal

__all__ = ["REFUSALS"]


@refusal()
def parameter_read_at_rest(rank: Rank) -> None:
    engine = build(rank)
    dict(engine.model.named_parameters())["1.up.weight"].sum()


@refusal()
def gathered_of_no_such_name(rank: Rank) -> None:
    with build(rank).gathered("9.weight"):
        pass


@refusal("pipe=2")
def gathered_in_a_pipeline(rank: Rank) -> None:
    with build(rank, "ddp").gathered():
        pass


@refusal()
def written_without_modify(rank: Rank) -> None:
    engine = build(rank)
    with engine.gathered(), torch.no_grad():
        dict(engine.model.named_parameters())["1.up.weight"].add_(1)


@refusal()
def written_otherwise_on_each_rank(rank: Rank) -> None:
    engine = build(rank)
    with engine.gathered(modify=True), torch.no_grad():
        dict(engine.model.named_parameters())["1.up.weight"].add_(rank.comm.rank)


@refusal()
def state_of_another_shape(rank: Rank) -> None:
    engine = build(rank)
    engine.load_full_state_dict(engine.full_state_dict() | {"1.up.weight": torch.zeros(2, 2)})


@refusal()
def state_without_a_name(rank: Rank) -> None:
    engine = build(rank)
    state = engine.full_state_dict()
    del state["1.up.weight"]
    engine.load_full_state_dict(state)


@refusal()
def state_with_another_name(rank: Rank) -> None:
    engine = build(rank)
    engine.load_full_state_dict(engine.full_state_dict() | {"1.upp.weight": torch.zeros(2, 2)})


@refusal()
def optimizer_state_of_no_optimizer(rank: Rank) -> None:
    rank.engine(rank.model(), None, row="zero3").optimizer_state_dict()


@refusal()
def step_state_of_another_seed(rank: Rank) -> None:
    engine = build(rank)
    engine.load_step_state(engine.step_state() | {"seed": 77})


@refusal()
def save_into_a_folder_that_is_there(rank: Rank) -> None:
    engine = build(rank)
    adapter.save(rank.folder, engine, extra=None)
    adapter.save(rank.folder, engine, extra=None)


@refusal()
def save_in_a_step(rank: Rank) -> None:
    engine = build(rank)
    backward(rank, engine)
    adapter.save(rank.folder, engine, extra=None)


@refusal()
def save_what_is_no_value(rank: Rank) -> None:
    adapter.save(rank.folder, build(rank), extra={"f": object()})


@refusal()
def load_where_nothing_is(rank: Rank) -> None:
    adapter.load(str(Path(rank.folder) / "nothing"), build(rank))


@refusal()
def load_into_another_model(rank: Rank) -> None:
    adapter.save(rank.folder, build(rank), extra=None)
    adapter.load(rank.folder, build(rank, kind="gpt"))


@refusal()
def load_into_another_seed(rank: Rank) -> None:
    adapter.save(rank.folder, build(rank), extra=None)
    adapter.load(rank.folder, build(rank, seed=9))


@refusal()
def load_what_is_damaged(rank: Rank) -> None:
    engine = build(rank)
    adapter.save(rank.folder, engine, extra=None)
    if rank.comm.rank == 0:
        for file in sorted(Path(rank.folder).rglob("*.safetensors"))[:1]:
            data = bytearray(file.read_bytes())
            data[-3] ^= 1
            file.write_bytes(data)
    engine.sum(1)
    adapter.load(rank.folder, engine)


@refusal("shard=3")
def collective_of_another_kind(rank: Rank) -> None:
    adapter.unlike_collectives(rank.comm)


@refusal("shard=3")
def collective_over_no_axis(rank: Rank) -> None:
    adapter.collective_over(rank.comm, "rows")
