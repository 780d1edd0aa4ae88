"""The layers have every test once, as the table of shares says; the cases of a product go to the right layers."""

from collections import Counter
from itertools import combinations, product
from pathlib import Path

import layers
import pytest
from layers import FAST, FULL, LAYERS, LONG, NIGHTLY, SHARES, Case, Share, chosen, layers_of, share_of

TESTS = Path(__file__).parent

ROWS = ("ddp", "zero1", "zero3")
PRODUCT: list[Case] = list(product(ROWS, ("shard=2", "shard=3"), ("1", "3")))
TOGETHER: list[Case] = [("a-1",), ("b-2",), ("c-3",)]


@pytest.mark.parametrize("path", [*(path for path in SHARES if path), *LONG])
def test_a_path_of_the_table_leads_to_tests(path: str) -> None:
    file, _, test = path.partition("::")
    assert (TESTS / file).exists(), f"tests/{file} is gone"
    assert not test or f"\ndef {test}(" in (TESTS / file).read_text(), f"tests/{file} has no {test}"


def test_the_longest_path_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = Share("few", "pairs")
    table = {"": FAST, "a": FULL, "a/test_b.py": pairs, "a/test_b.py::test_c": NIGHTLY}
    monkeypatch.setattr(layers, "SHARES", table)
    wanted = {
        "test_x.py::test_y": FAST,
        "ab/test_x.py::test_y": FAST,
        "a/test_x.py::test_y": FULL,
        "a/test_b.py::test_cd": pairs,
        "a/test_b.py::test_c[a/test_b.py]": NIGHTLY,
    }
    assert {node: share_of(node) for node in wanted} == wanted


def pairs_of(cases: list[Case]) -> set[tuple[int, str, int, str]]:
    return {(i, case[i], j, case[j]) for case in cases for i, j in combinations(range(len(case)), 2)}


def test_parts_of_a_product() -> None:
    assert chosen(PRODUCT, "all") == PRODUCT and not chosen(PRODUCT, "none")
    first, second = chosen(PRODUCT, "few")
    assert all(a != b for a, b in zip(first, second, strict=True)), "nothing in common"
    pairs = list(chosen(PRODUCT, "pairs"))
    assert len(pairs) == 6 < len(PRODUCT) and pairs_of(pairs) == pairs_of(PRODUCT) and {first, second} < set(pairs)
    values, thrice = chosen(PRODUCT, "values"), chosen(PRODUCT, "thrice")
    assert len(values) == len(ROWS) and {*values} < {*thrice} and len(thrice) == 9
    assert Counter(row for row, *_ in thrice) == dict.fromkeys(ROWS, 3)
    assert [set(column) for column in zip(*values, strict=True)] == [set(ROWS), {"shard=2", "shard=3"}, {"1", "3"}]


def test_parts_of_a_test_that_is_parametrized_once_or_never() -> None:
    """Values that are given together are no product: each of them is a case of its own kind."""
    assert [list(chosen(TOGETHER, part)) for part in ("all", "pairs", "thrice", "values")] == [TOGETHER] * 4
    assert chosen(TOGETHER, "few") == TOGETHER[:2] and chosen(TOGETHER, "third") == TOGETHER
    nine = [(str(number), kind) for number in range(9) for kind in "ab"]
    assert chosen(nine, "third") == [("0", "a"), ("3", "b"), ("6", "a")], "every third row, and both kinds"
    assert [list(chosen([()], part)) for part in ("all", "pairs", "thrice", "values", "third", "few")] == [[()]] * 6


@pytest.mark.parametrize(
    "share, wanted",
    [
        (FAST, (12, 0, 0)),
        (FULL, (0, 12, 0)),
        (NIGHTLY, (0, 0, 12)),
        (Share("few", "pairs"), (2, 4, 6)),
        (Share("none", "values"), (0, 3, 9)),
    ],
)
def test_each_case_is_in_one_layer(share: Share, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SHARES", {"": share})
    found = layers_of({f"a.py::test[{'-'.join(case)}]": case for case in PRODUCT})
    counts = Counter(found.values())
    assert tuple(counts[layer] for layer in LAYERS) == wanted


def test_items_are_marked(request: pytest.FixtureRequest) -> None:
    marks = {
        item.name: [mark.name for mark in item.iter_markers() if mark.name in LAYERS] for item in request.session.items
    }
    assert all(len(found) == 1 for found in marks.values())
