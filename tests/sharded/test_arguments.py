"""Arguments by keyword, by sign and by type: the same call said otherwise gets the same answer, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait import LayoutError, ShardedTensor

WHOLE = torch.arange(24.0, dtype=torch.float64).view(2, 4, 3)


def on_two_ranks(layout: str, act: Callable[[ShardedTensor], Any]) -> Any:
    return plait.run_threads("tensor=2", lambda comm: act(ShardedTensor.from_full(WHOLE, layout, comm)))[0]


@pytest.mark.parametrize(
    ("layout", "act"),
    [
        ("a b c/tensor", lambda x: x.unbind(dim=1)[3]),
        ("a/tensor b c", lambda x: x.unbind(1)[3]),
        ("a b c/tensor", lambda x: x.flip(dims=(0, 1))),
        ("a b c/tensor", lambda x: x.flip(-2)),
        ("a b c, pending(tensor)", lambda x: x.flip(0, 1)),
        ("a b/tensor c", lambda x: x.tensor_split((1, 2), -1)[2]),
        ("a/tensor b c", lambda x: torch.std(input=x, dim=-1)),
        ("a b c, pending(tensor)", lambda x: x.clone().copy_(x, True)),
        ("a b c, pending(tensor)", lambda x: torch.add(x, other=x)),
        ("a b c", lambda x: x[False]),
        ("a b/tensor c", lambda x: x.tensor_split((1, -1), 0)[2]),
        ("a b c", lambda x: x.view(torch.int64)),
        ("a b/tensor c", lambda x: x[[0]]),
        ("a b c/tensor", lambda x: x[:, [2, 0, 2]]),
    ],
)
def test_another_way_to_say_it(layout: str, act: Callable[[Any], Tensor]) -> None:
    found = on_two_ranks(layout, lambda x: act(x).full())
    torch.testing.assert_close(found, act(WHOLE.clone()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "act"),
    [
        ("a b/tensor c", lambda x: x.unbind(dim=1)),
        ("a b/tensor c", lambda x: x.flip(0, 1)),
        ("a b/tensor c", lambda x: x.select(0, 0).fill_diagonal_(7.0)),
        ("a b c, pending(tensor)", lambda x: torch.add(x, other=1.0)),
        ("a b c, pending(tensor)", lambda x: x.sub(other=1.0)),
        ("a b c, pending(tensor)", lambda x: x + True),
    ],
)
def test_what_would_be_wrong_is_refused(layout: str, act: Callable[[ShardedTensor], Any]) -> None:
    with pytest.raises(LayoutError):
        on_two_ranks(layout, act)


def test_true_is_not_one() -> None:
    """1 and True are one key of a dict, and two arguments: std along dim 1, std of all."""

    def act(x: ShardedTensor) -> list[tuple[int, ...]]:
        return [tuple(x.std(1).shape), tuple(x.std(True).shape), tuple(x.std(1).shape), tuple(x[0].shape)]

    assert on_two_ranks("a b c", act) == [(2, 3), (), (2, 3), (4, 3)]
