"""The tensors of a batch of any kind."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.forward.batch import batch_tensors
from plait.step.step import num_samples

Pair = namedtuple("Pair", "x y")


@dataclass(slots=True)
class Slots:
    x: Tensor
    y: Any


X, Y = torch.ones(3, 2), torch.ones(3)


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y),
        {"x": X, "y": [Y, 1]},
        Pair(X, Y),
        UserDict(x=X, y=Y),
        SimpleNamespace(x=X, y=(Y,)),
        Slots(X, UserDict(y=Y)),
        [Slots(X, "a"), Y],
    ],
)
def test_tensors_are_found_in_their_order(batch: Any) -> None:
    first, second = batch_tensors(batch)
    assert first is X and second is Y and num_samples(batch) == 3


def test_transformers_batches_have_tensors() -> None:
    transformers = pytest.importorskip("transformers")
    assert next(batch_tensors(transformers.BatchEncoding({"input_ids": X}))) is X


def test_an_object_of_another_kind_has_none() -> None:
    with pytest.raises(ValueError, match=r"no tensor found in the batch of type object: .* Give a tensor, or tuples"):
        num_samples(object())
    assert not list(batch_tensors(Slots))
