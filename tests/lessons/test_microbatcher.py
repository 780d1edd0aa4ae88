"""Cut and joined again exactly; sums add up however the batch is cut, means of means do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from naive_cases import COUNT, LOSS, batch, mlp, pairs, taken
from plait_lessons.naive.microbatcher import accumulate, join, mean_of_means, split
from torch.utils._pytree import tree_leaves

from plait.run.models.mlp import MLP


def test_first_ones_are_a_sample_longer_and_the_last_may_be_empty() -> None:
    x = torch.arange(7)
    assert [part.tolist() for part in split(x, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part.tolist() for part in split(x[:3], 5)] == [[0], [1], [2], [], []]
    assert [part.tolist() for part in split(x, 1)] == [x.tolist()]


TREES: dict[str, Any] = {
    "tensor": torch.randn(9, 3),
    "pair": (torch.randn(9, 3), torch.arange(9)),
    "dict": {"x": torch.randn(9, 2, 5), "mask": torch.ones(9, dtype=torch.bool)},
    "nested": ({"x": torch.randn(9, 1)}, [torch.randn(9).bfloat16(), (torch.arange(9),)]),
}


@pytest.mark.parametrize("num_microbatches", range(1, 12))
@pytest.mark.parametrize("kind", TREES)
def test_joined_again_nothing_has_changed(kind: str, num_microbatches: int) -> None:
    parts = split(TREES[kind], num_microbatches)
    assert len(parts) == num_microbatches
    whole = join(parts)
    assert type(whole) is type(TREES[kind])
    for found, expected in zip(tree_leaves(whole), tree_leaves(TREES[kind]), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 16])
def test_outputs_joined_are_the_output_of_the_batch(num_microbatches: int) -> None:
    model = mlp().double()
    x = batch(model)[0].double()
    found = join([model(part) for part in split(x, num_microbatches)])
    torch.testing.assert_close(found, model(x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 16])
def test_sums_divided_once_are_the_gradient_of_the_batch(num_microbatches: int) -> None:
    model, (x, target) = double()
    (LOSS(model(x), target) / COUNT(target)).backward()
    expected = taken(model)
    losses = accumulate(model, split((x, target), num_microbatches), LOSS, COUNT)
    torch.testing.assert_close(sum(losses), LOSS(model(x), target).detach(), rtol=1e-12, atol=0)
    for name, gradient in taken(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-11, atol=1e-13)


def double() -> tuple[MLP, tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    model = mlp().double()
    x, target = batch(model)
    return model, (x.double(), {name: value.double() for name, value in target.items()})


def test_a_mean_of_means_is_another_gradient_as_soon_as_counts_differ() -> None:
    model, (x, target) = double()
    for mask, equal in ((torch.ones(12), True), (torch.arange(12) % 3 > 0, True), (torch.arange(12) > 3, False)):
        parts = split((x[:12], {"y": target["y"][:12], "mask": mask}), 2)
        counts = [COUNT(t) for _, t in parts]
        assert (counts[0] == counts[1]) is equal
        accumulate(model, parts, LOSS, COUNT)
        right = taken(model)
        mean_of_means(model, parts, LOSS, COUNT)
        wrong = taken(model)
        gap = max(float((wrong[n] - right[n]).abs().max() / right[n].abs().max()) for n in right)
        assert gap < 1e-12 if equal else gap > 0.05, counts


def test_a_microbatch_without_a_loss_counts_for_nothing() -> None:
    model, (x, target) = double()
    target["mask"] = (torch.arange(13) < 4).double()
    parts = split((x, target), 3)
    assert [COUNT(t) for _, t in parts] == [4, 0, 0]
    accumulate(model, parts, LOSS, COUNT)
    right = taken(model)
    accumulate(model, parts[:1], LOSS, COUNT)
    for name, gradient in taken(model).items():
        assert torch.equal(gradient, right[name])
    mean_of_means(model, parts, LOSS, COUNT)
    assert all(gradient.isnan().any() for gradient in taken(model).values())
    with pytest.raises(ValueError, match="nothing in the 2 microbatches"):
        accumulate(model, parts[1:], LOSS, COUNT)


@pytest.mark.parametrize(
    ("tree", "num", "words"),
    [
        (torch.ones(3), 0, "0 microbatches: .*at least one"),
        ((torch.ones(3), torch.ones(4)), 2, "3 and 4 samples"),
        ((torch.ones(3), "text"), 2, "a str without a first dim"),
        (torch.tensor(1.0), 2, "a Tensor without a first dim"),
        ((), 2, "no tensor"),
    ],
)
def test_what_cannot_be_split_is_named(tree: Any, num: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(tree, num)


def test_what_cannot_be_joined_is_named() -> None:
    with pytest.raises(ValueError, match="no microbatches"):
        join([])
    with pytest.raises(ValueError, match="microbatch 1 is built as"):
        join([(torch.ones(1),), torch.ones(1)])


def test_the_cases_are_ragged() -> None:
    assert len({COUNT(target) for _, target in pairs(mlp(), 3)}) > 1
