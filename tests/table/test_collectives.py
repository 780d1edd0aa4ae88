"""Bytes by direct count, each element straight to where it is needed; and the order of additions, made visible."""

import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import plait.table.additions as additions_module
from plait.comm import ordered_sum
from plait.table.additions import MICROBATCH, additions, fold
from plait.table.cells import TABLE, find_strategy
from plait.table.collectives import CUT_EVENLY, bus_factor, bytes_sent

Transfer = tuple[int, int, int]
"""From a member, to a member, one element."""


def transfers(kind: str, n: int, numel: int, root: int) -> Iterator[Transfer]:
    """Every element that travels in a collective of ``n`` members on a whole array of ``numel`` elements."""
    piece = numel // n
    owner = [e // piece for e in range(piece * n)]
    others = [(a, b) for a in range(n) for b in range(n) if a != b]
    match kind:
        case "all_gather":  # an owner shows its piece to everyone
            yield from ((a, b, e) for a, b in others for e in range(numel) if owner[e] == a)
        case "reduce_scatter":  # everyone brings each piece to its owner
            yield from ((a, b, e) for a, b in others for e in range(numel) if owner[e] == b)
        case "all_reduce":  # the one, then the other
            yield from transfers("reduce_scatter", n, numel, root)
            yield from transfers("all_gather", n, numel, root)
        case "all_to_all":  # piece b of a's row goes to b
            yield from ((a, b, e) for a, b in others for e in range(numel) if owner[e] == b)
        case "broadcast":
            yield from ((a, b, e) for a, b in others for e in range(numel) if a == root)
        case "reduce":
            yield from ((a, b, e) for a, b in others for e in range(numel) if b == root)
        case "scatter":
            yield from ((a, b, e) for a, b in others for e in range(numel) if a == root and owner[e] == b)
        case "gather":
            yield from ((a, b, e) for a, b in others for e in range(numel) if b == root and owner[e] == a)
        case "send" | "recv" | "barrier":
            return


COLLECTIVES = (*CUT_EVENLY, "all_reduce", "broadcast", "reduce")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_bytes_sent_is_what_the_members_send(kind: str, n: int) -> None:
    itemsize = 4
    for pieces in (1, 3):
        numel = pieces * n
        for root in {0, n - 1}:
            sent = Counter(src for src, _, _ in transfers(kind, n, numel, root))
            for member in range(n):
                size = numel * itemsize
                assert bytes_sent(kind, size, n, root=member == root) == sent[member] * itemsize


@pytest.mark.parametrize(
    ("kind", "size", "n", "root", "sent"),
    [
        ("send", 40, 2, False, 40),
        ("recv", 40, 2, False, 0),
        ("barrier", 0, 5, False, 0),
        ("all_reduce", 10, 4, False, 15),  # it cuts nothing that a rank keeps
        *((kind, 0, 4, root, 0) for kind in COLLECTIVES for root in (True, False)),
        *((kind, 64, 1, True, 0) for kind in COLLECTIVES),
    ],
)
def test_bytes_of_what_needs_no_count(kind: str, size: int, n: int, root: bool, sent: int) -> None:
    assert bytes_sent(kind, size, n, root=root) == sent


@pytest.mark.parametrize("kind", CUT_EVENLY)
def test_an_array_that_cannot_be_cut_evenly_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} of 10 bytes over 4 ranks: the pieces are not equal"):
        bytes_sent(kind, 10, 4)


# busbw / algbw of nccl-tests (doc/PERFORMANCE.md), S being the whole array
BUS = """
all_reduce      2(n-1)/n
all_gather      (n-1)/n
reduce_scatter  (n-1)/n
all_to_all      (n-1)/n
scatter         (n-1)/n
gather          (n-1)/n
broadcast       1
reduce          1
send            1
recv            1
"""


@pytest.mark.parametrize("line", BUS.strip().splitlines())
def test_bus_bandwidth_is_that_of_nccl_tests(line: str) -> None:
    kind, factor = line.split()
    for n in (2, 3, 8, 64):
        value = {"1": 1.0, "(n-1)/n": (n - 1) / n, "2(n-1)/n": 2 * (n - 1) / n}[factor]
        assert bus_factor(kind, n) == value


def written(order: tuple[str, ...], sizes: dict[str, int], names: tuple[str, ...]) -> str:
    """The fold as text; a leaf is the digits of its coordinates in the order of ``names``."""

    def leaf(at: dict[str, int]) -> str:
        return "".join(str(at[name]) for name in names)

    return fold(order, sizes, leaf, lambda a, b: f"({a}+{b})")


# Two replicas of two shards with two microbatches; the gradient of microbatch m on replica r, shard s is ``rsm``.

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
