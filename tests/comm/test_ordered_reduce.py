"""The order of additions, against plain torch on stacked tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.comm import ordered_reduce as fold
from plait.comm import ordered_sum, run
from plait.table.mesh import Mesh

COMBINE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def left(values: list[torch.Tensor], op: str) -> torch.Tensor:
    total = values[0]
    for x in values[1:]:
        total = COMBINE[op](total, x)
    return total


def by_loops(stack: torch.Tensor, sizes: tuple[int, ...], op: str) -> torch.Tensor:
    """``stack`` seen as [size of axis 0, size of axis 1, ..., numel]: the first dim is folded first."""
    nested = stack.view(*sizes, -1)
    for _ in sizes:
        nested = left(list(nested), op)
    return nested


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 70),
    st.sampled_from(list(COMBINE)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.integers(0, 2**31),
    st.sampled_from([16, 64, 4096]),
)
@example([4], 70, "sum", torch.float32, 0, 16)
@example([2, 4, 3], 70, "sum", torch.float32, 0, 4096)
def test_equals_nested_left_folds_bit_for_bit(sizes, numel, op, dtype, seed, block) -> None:
    n = math.prod(sizes)
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (n, numel), generator=generator)
    stack = (torch.randn(n, numel, generator=generator) * scale).to(dtype)
    expected = by_loops(stack, tuple(sizes), op)
    before, fold.BLOCK_BYTES = fold.BLOCK_BYTES, block
    try:
        out = torch.full((numel,), 7.0, dtype=dtype)
        ordered_sum(list(stack), sizes, op, out)
        assert torch.equal(out, expected)
        for k in range(n):  # out may be any of the members, early or late
            members = list(stack.clone())
            ordered_sum(members, sizes, op, members[k])
            assert torch.equal(members[k], expected)
            assert all(torch.equal(members[j], stack[j]) for j in range(n) if j != k)
    finally:
        fold.BLOCK_BYTES = before


def test_the_sign_of_zero_survives() -> None:
    out = torch.empty(1)
    ordered_sum([torch.tensor([-0.0])] * 3, [3], "sum", out)
    assert math.copysign(1.0, out.item()) == -1.0


def test_what_makes_no_sense_is_refused() -> None:
    x = [torch.ones(2)] * 4
    with pytest.raises(ValueError, match=r"sizes \(2, 3\) make 6 members, not 4"):
        ordered_sum(x, (2, 3), "sum", torch.empty(2))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 40), st.booleans(), st.integers(0, 2**31))
def test_the_world_folds_in_this_order(shard, replica, numel, swapped, seed) -> None:
    mesh = Mesh(shard=shard, replica=replica)
    axes = ("replica", "shard") if swapped else ("shard", "replica")
    values = torch.randn(mesh.size, numel, generator=torch.Generator().manual_seed(seed)) ** 5
    grid = values.view(replica, shard, numel)
    expected = by_loops(
        grid if swapped else grid.transpose(0, 1).contiguous(), (mesh.axis(axes[0]), mesh.axis(axes[1])), "sum"
    )

    def reduce(comm):
        x = values[comm.rank].clone()
        comm.all_reduce(x, axes).wait()
        return x

    for x in run(mesh, reduce):
        assert torch.equal(x, expected)
