"""ZeRO's memory table, number by number, and the same count on padded buffers."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.predict.memory import Held, formula, held
from plait.table.cells import TABLE, Strategy
from plait.table.flat import Cut, UnitLayout, lay
from plait.table.mesh import Mesh

B, T, GB = 1e9, 1e12, 1e9

# ---- the published table ---------------------------------------------------------------------------------

# GB per device, stages 1 / 2 / 3, 16-bit parameters and gradients, K = 12 (Rajbhandari et al. 2020, table 1)
PUBLISHED = """
N     7.5B                 128B             1T
1     120  / 120   / 120   2048/2048/2048   16000/16000/16000
4     52.5 / 41.25 / 30    896 /704 /512    7000 /5500 /4000
16    35.6 / 21.6  / 7.5   608 /368 /128    4750 /2875 /1000
64    31.4 / 16.6  / 1.88  536 /284 /32     4188 /2219 /250
256   30.4 / 15.4  / 0.47  518 /263 /8      4047 /2055 /62.5
1024  30.1 / 15.1  / 0.12  514 /258 /2      4012 /2014 /15.6
"""
SIZES = {"7.5B": 7.5 * B, "128B": 128 * B, "1T": T}
STAGES = ("zero1", "zero2", "zero3")


def published() -> list[tuple[int, str, str, str]]:
    header, *lines = PUBLISHED.strip().splitlines()
    cells = []
    for line in lines:
        n, *models = re.sub(r" */ *", "/", line).split()
        for model, stages in zip(header.split()[1:], models, strict=True):
            cells += [(int(n), model, row, text) for row, text in zip(STAGES, stages.split("/"), strict=True)]
    return cells


def mixed(num_parameters: float, mesh: Mesh, row: str) -> Held:
    """16-bit parameters and gradients, fp32 Adam with master weights."""
    return formula(num_parameters, mesh, TABLE[row], param_bytes=2, grad_bytes=2, optimizer_bytes=12)


@pytest.mark.parametrize(("n", "model", "row", "text"), published())
def test_the_published_zero_table(n: int, model: str, row: str, text: str) -> None:
    num_decimals = len(text.partition(".")[2])
    half_a_digit = 0.5 * 10**-num_decimals
    for mesh in (Mesh(shard=n), Mesh(replica=n), Mesh(replica=2, shard=n // 2) if n > 1 else Mesh()):
        assert abs(mixed(SIZES[model], mesh, row).total / GB - float(text)) <= half_a_digit * (1 + 1e-9)


# ---- what the buffers hold -------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 60), max_size=2).map(tuple), min_size=1, max_size=4)
DATA = st.builds(Mesh, replica=st.integers(1, 4), shard=st.integers(1, 4))
ROWS = st.sampled_from(list(TABLE.values()))
CUTS: st.SearchStrategy[Cut] = st.sampled_from(["element", "tensor"])


def units_of(models: list[list[tuple[int, ...]]], itemsize: int, mesh: Mesh, cut: Cut = "element") -> list[UnitLayout]:
    """One unit a list; every second one has a frozen buffer beside the trainable one."""
    units = []
    for u, shapes in enumerate(models):
        flat = lay([(f"{u}.{i}", shape) for i, shape in enumerate(shapes)], itemsize, mesh.data_size, cut)
        frozen = lay([(f"{u}.frozen", (11, 3))], itemsize, mesh.data_size, cut)
        units.append(UnitLayout(f"u{u}", *(((flat, frozen), (True, False)) if u % 2 else ((flat,), (True,)))))
    return units


def count(units: list[UnitLayout]) -> tuple[int, int]:
    """Parameters, and those that train."""
    flats = [(sum(s.numel for s in f.slots), t) for u in units for f, t in zip(u.flats, u.trainable, strict=True)]
    return sum(n for n, _ in flats), sum(n for n, t in flats if t)


def padding(units: list[UnitLayout]) -> int:
    """Bytes of the flat buffers that hold no parameter."""
    return sum((f.numel - sum(s.numel for s in f.slots)) * f.itemsize for unit in units for f in unit.flats)


@settings(max_examples=100, deadline=None)
@given(models=st.lists(SHAPES, min_size=1, max_size=3), itemsize=st.sampled_from([2, 4, 8]), mesh=DATA, row=ROWS)
def test_held_is_the_formula_within_padding(
    models: list[list[tuple[int, ...]]], itemsize: int, mesh: Mesh, row: Strategy
) -> None:
    units = units_of(models, itemsize, mesh)
    everything, trained = count(units)
    sizes = {"param_bytes": itemsize, "grad_bytes": itemsize, "optimizer_bytes": 2 * itemsize}
    whole, learning = formula(everything, mesh, row, **sizes), formula(trained, mesh, row, **sizes)
    extra = padding(units)
    for rank in range(mesh.size):
        found = held(units, mesh, row, rank)
        ways = mesh.count(row.params.split)
        assert found.params * ways == everything * itemsize + extra  # every byte of it, and no other
        assert 0 <= found.params - whole.params <= extra / ways + 1
        assert 0 <= found.grads - learning.grads <= extra / mesh.count(row.grads.split) + 1
        assert abs(found.optimizer - learning.optimizer) <= 2 * extra  # padding has no state
        assert found.total == found.params + found.grads + found.optimizer


@settings(max_examples=60, deadline=None)
@given(models=st.lists(SHAPES, min_size=1, max_size=3), mesh=DATA, row=ROWS, cut=CUTS, states=st.integers(0, 3))
def test_together_the_ranks_hold_every_state_once_per_copy(
    models: list[list[tuple[int, ...]]], mesh: Mesh, row: Strategy, cut: Cut, states: int
) -> None:
    """Under either cut: the sum over ranks is the whole, times the ranks that hold the same."""
    units, itemsize = units_of(models, 4, mesh, cut), 4
    trained = count(units)[1]
    every = [held(units, mesh, row, rank, states) for rank in range(mesh.size)]
    full = sum(f.numel for u in units for f in u.flats) * itemsize
    learning = sum(f.numel for u in units for f, t in zip(u.flats, u.trainable, strict=True) if t) * itemsize
    copies = {part: mesh.size // mesh.count(getattr(row, part).split) for part in ("params", "grads", "optim")}
    assert sum(h.params for h in every) == full * copies["params"]
    assert sum(h.grads for h in every) == learning * copies["grads"]
    assert sum(h.optimizer for h in every) == trained * states * itemsize * copies["optim"]
    assert full == count(units)[0] * itemsize + padding(units)
