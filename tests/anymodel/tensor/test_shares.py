"""A gradient that is summed over the axis is a share on each rank, or the sum is too large."""

from __future__ import annotations

import pytest
import torch
from parallel_cases import on_ranks, values

from plait.anymodel.tensor.shares import SharesCheck, check_share
from plait.table.tensor_plan import Style
from plait.tensor import TensorAxis

SUMMED = Style("summed")


@pytest.mark.parametrize("rounding", [0.0, 1e-12])
def test_the_same_gradient_on_all_ranks_is_no_share(rounding: float) -> None:
    def body(axis: TensorAxis) -> None:
        check_share(axis, values(3, 4) * (1 + rounding * axis.index), "norm.weight", SUMMED)

    with pytest.raises(ValueError, match=r"'norm.weight' is the same on all 3 .* 'summed' .* 3 times too large"):
        on_ranks(3, body)


def test_other_gradients_are_shares() -> None:
    """Also where they have one size, or the same sum; a number or two shows nothing."""

    def body(axis: TensorAxis) -> list[bool]:
        gradients = [values(5, seed=axis.index), torch.ones(5).roll(axis.index).cumsum(0)[: 4 + axis.index]]
        gradients += [torch.eye(4)[axis.index], torch.ones(3)]
        return [check_share(axis, gradient, "norm.weight", SUMMED) for gradient in gradients]

    assert on_ranks(3, body) == [[True] * 4] * 3


def test_zeros_show_nothing_so_the_next_gradient_is_looked_at() -> None:
    """A whole gradient after a share is taken for one: it is looked at once."""

    def body(axis: TensorAxis) -> list[bool]:
        check, x, known = SharesCheck(axis), torch.ones(5, requires_grad=True), []
        check.watch(x, "latent", Style("shared"), last=4)
        for factor in (torch.zeros(5), torch.eye(5)[0], torch.arange(5.0) ** axis.index, torch.ones(5)):
            (x * factor).sum().backward()
            known.append("latent" in check._done)
        return known

    assert on_ranks(2, body) == [[False, False, True, True]] * 2


def test_a_share_that_is_none_is_found_in_the_backward() -> None:
    def body(axis: TensorAxis) -> None:
        x = torch.ones(5, requires_grad=True)
        SharesCheck(axis).watch(x, "latent", Style("shared"))
        x.sum().backward()

    with pytest.raises(ValueError, match="'latent' is the same on all 2"):
        on_ranks(2, body)
