"""Bytes by direct count: who sends which element to whom, when each goes straight to where it is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

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
