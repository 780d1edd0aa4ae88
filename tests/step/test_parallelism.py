"""A layout is one value: made from keywords or given whole, agreed on field by field."""

import math
from dataclasses import fields
from typing import Any

import engine_cases as cases
import pytest
from each_rank import each_rank
from engine_cases import net
from torch import nn

from plait import run_threads as run
from plait.comm import Comm
from plait.step import Engine
from plait.table.cells import TABLE
from plait.table.mesh import Mesh
from plait.table.parallelism import Parallelism
from plait.table.precision import LossScale
from plait.table.tensor_plan import Style
from plait.zero.state.checks import check_settings

OTHER: dict[str, Any] = {
    "strategy": "ddp",
    "units": ["blocks.0"],
    "cut": "tensor",
    "prefetch": 0,
    "bucket": 0,
    "tensor_plan": {"head": "whole"},
    "sequence_parallel": True,
    "ring_attention": True,
    "all_to_all": True,
    "schedule": "gpipe",
    "chunks": 3,
    "hold": 2,
    "split": [2, 1],
    "recompute": "full",
    "compile": True,
}
"""A value for each field that is not its default."""


def test_keywords_make_the_same_value() -> None:
    assert {field.name for field in fields(Parallelism)} == OTHER.keys()
    value = Parallelism.of(**OTHER | {"units": ["b", "a"]})
    assert value == Parallelism(**OTHER | {"units": ["a", "b"]})
    assert (value.strategy, value.units, value.split) == (TABLE["ddp"], ("a", "b"), (2, 1))
    assert Parallelism.of() == Parallelism()
    written = Parallelism.of(schedule=[list("ab")], units=["b", "a"], split=[2, 1])
    assert written.schedule == (("a", "b"),) and hash(written) is not None


def test_a_keyword_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match="unknown setting 'prefech': did you mean prefetch"):
        run(Mesh(), lambda comm: Engine(net(), comm, prefech=2) and None)
    with pytest.raises(TypeError, match="unknown setting 'zzz': the settings are strategy, units"):
        Parallelism.of(zzz=1)


UNCUT = {"chunks", "sequence_parallel", "tensor_plan", "split"}
RUNNING: dict[str, Any] = {"clip": 1.0, "seed": 7, "nonfinite": "skip", "loss_scale": LossScale(8.0)}


@pytest.mark.parametrize("name", sorted({*OTHER, *RUNNING} - UNCUT))
def test_ranks_with_different_values_are_refused(name: str) -> None:
    def body(comm: Comm) -> None:
        Engine(cases.net(), comm, **{name: (OTHER | RUNNING)[name]} if comm.rank == 1 else {})

    with pytest.raises(ValueError, match=rf"different settings: {name} is .* on ranks 0, 2, .* on rank 1\. Give"):
        run(Mesh(shard=3), body, deadline=20)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("units", [["first", "blocks.1"], ["blocks.1", "first"]]),
        ("tensor_plan", [{"a": "column", "b": "row"}, {"b": "row", "a": Style("column")}]),
    ],
)
@each_rank("shard=2")
def test_what_means_the_same_is_the_same(comm: Comm, field: str, values: list[Any]) -> None:
    check_settings(comm, Parallelism.of(**{field: values[comm.rank]}).compared())


def test_an_engine_and_its_units_say_what_they_are() -> None:
    def shown(comm: Comm) -> str:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        engine = Engine(model, comm, strategy="zero3", units=["0", "1"], bucket=0)
        return f"{engine}, {engine.placed.units}"

    text = run(Mesh(), shown)[0]
    assert text.startswith("Engine(zero3 on shard=1, rank 0: ") and "units of 26 parameters)" in text
    assert "Unit(1, 2 parameters, " in text and " object at " not in text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cut": "rows"}, "cut='rows': it is 'element' or 'tensor'"),
        ({"recompute": "some"}, "recompute='some': it is 'full' or 'selective'"),
        ({"recompute": "selective", "ring_attention": True}, "recompute selective with ring_attention"),
        ({"clip": -1.0}, r"clip=-1\.0: it is the largest norm"),
        ({"clip": math.nan}, "clip=nan: it is the largest norm"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore': it is 'raise' or 'skip'"),
        ({"parallelism": Parallelism(), "cut": "tensor"}, "parallelism together with cut, which it has a field for"),
    ],
)
def test_a_value_that_means_nothing_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(Mesh(), lambda comm: Engine(nn.Linear(2, 2), comm, **settings))
