"""The order of additions, made visible: a sum of strings shows its brackets.

Two replicas of two shards with two microbatches; the gradient of microbatch m on replica r, shard s is ``rsm``.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plait.table.additions as additions_module
from plait.comm import ordered_sum
from plait.table.additions import MICROBATCH, additions, fold
from plait.table.cells import TABLE, find_strategy


def written(order: tuple[str, ...], sizes: dict[str, int], names: tuple[str, ...]) -> str:
    """The fold as text; a leaf is the digits of its coordinates in the order of ``names``."""

    def leaf(at: dict[str, int]) -> str:
        return "".join(str(at[name]) for name in names)

    return fold(order, sizes, leaf, lambda a, b: f"({a}+{b})")


# ---- which sum comes first -------------------------------------------------------------------------------

ORDERS = {
    "ddp": (MICROBATCH, "shard", "replica"),
    "zero1": (MICROBATCH, "shard", "replica"),
    "hsdp": ("shard", MICROBATCH, "replica"),
    "psdp": ("shard", MICROBATCH, "replica"),
    "zero2": ("shard", "replica", MICROBATCH),
    "zero3": ("shard", "replica", MICROBATCH),
    "zero3_keep": ("shard", "replica", MICROBATCH),
    "hpz": ("shard", "replica", MICROBATCH),
}


def test_the_order_of_every_row() -> None:
    assert {name: additions(row) for name, row in TABLE.items()} == ORDERS


def test_the_docstring_lists_these_orders() -> None:
    found = {}
    for line in (additions_module.__doc__ or "").splitlines():
        names, _, order = line.strip().partition("   ")
        if names.split(", ")[0] in TABLE:
            words = order.split("(")[0].replace(",", " ").split()
            found.update({name: tuple(words) for name in names.split(", ")})
    assert found == ORDERS


def test_rows_of_ones_own_have_the_order_of_their_cells() -> None:
    turned = find_strategy("turned: full | full | replica/shard | replica/shard")
    assert additions(turned) == ("replica", "shard", MICROBATCH)
    other = find_strategy("other: full | full | replica, pending(shard) | replica")
    assert additions(other) == ("replica", MICROBATCH, "shard")


# ---- how a sum is folded ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "sizes", "text"),
    [
        ("x", "3", "((0+1)+2)"),
        ("x", "4", "(((0+1)+2)+3)"),
        ("x", "1", "0"),
        ("", "", ""),
        # 2 x 3 x 2 leaves; digits are x, y, z
        ("xyz", "232", "((((000+100)+(010+110))+(020+120))+(((001+101)+(011+111))+(021+121)))"),
        ("zyx", "232", "((((000+001)+(010+011))+(020+021))+(((100+101)+(110+111))+(120+121)))"),
        ("yxz", "232", "((((000+010)+020)+((100+110)+120))+(((001+011)+021)+((101+111)+121)))"),
        ("xzy", "232", "((((000+100)+(001+101))+((010+110)+(011+111)))+((020+120)+(021+121)))"),
    ],
)
def test_a_sum_is_a_left_fold_and_the_first_named_is_innermost(order: str, sizes: str, text: str) -> None:
    names = tuple(sorted(order))
    assert written(tuple(order), dict(zip(names, map(int, sizes), strict=True)), names) == text


# ---- the worlds fold the same tree -----------------------------------------------------------------------


def wide(numel: int, random: torch.Generator) -> torch.Tensor:
    """Numbers of such different sizes that every order of adding them shows."""
    return torch.randn(numel, generator=random) * 10 ** torch.randint(-3, 4, (numel,), generator=random)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_a_fused_group_adds_in_the_order_of_its_axes(sizes: list[int], seed: int) -> None:
    """comm's ordered_sum over axes (a, b, ...) is the fold with a innermost, to the last bit."""
    axes = ("a", "b", "c")[: len(sizes)]
    ways = math.prod(sizes)
    random = torch.Generator().manual_seed(seed)
    stack = [wide(8, random) for _ in range(ways)]

    def member(at: dict[str, int]) -> torch.Tensor:
        index = 0
        for axis, size in zip(axes, sizes, strict=True):  # group order: first axis outermost
            index = index * size + at[axis]
        return stack[index]

    out = torch.empty(8)
    ordered_sum(stack, sizes, "sum", out)
    assert torch.equal(out, fold(axes, dict(zip(axes, sizes, strict=True)), member, torch.add))
