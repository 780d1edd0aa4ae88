"""A rule for an operator that plait has none for."""

import pytest
import torch
from guide import run_section

import plait
from plait.comm import Comm
from plait.sharded.rules import RULES


def test_before_it_the_operator_is_refused() -> None:
    def body(comm: Comm) -> None:
        x = plait.ShardedTensor.from_full(torch.ones(3, 4), "rows/tensor cols", comm)
        with pytest.raises(plait.LayoutError, match="roll"):
            torch.roll(x, 1, 1)

    assert torch.roll not in RULES
    plait.run_threads("tensor=2", body)


@pytest.mark.parametrize("layout", ["rows cols", "rows/tensor cols", "rows cols, pending(tensor)"])
def test_value_and_gradient_are_those_of_whole_tensors(layout: str) -> None:
    run_section("A rule of an operator")
    whole = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    weight = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)

    def body(comm: Comm) -> None:
        x = plait.ShardedTensor.from_full(whole.clone().requires_grad_(), layout, comm)
        y = torch.roll(x, 1, (1,))
        mark = len(comm.ledger)
        (y * plait.ShardedTensor.from_full(weight, "rows cols", comm)).sum().backward()
        assert len(comm.ledger) == mark  # the backward of a rule sends nothing
        assert torch.equal(y.full(), torch.roll(whole, 1, 1))
        assert torch.equal(x.grad.full(), torch.roll(weight, -1, 1))

    plait.run_threads("tensor=2", body)


def test_along_a_cut_dim_it_is_refused_with_the_way_out() -> None:
    run_section("A rule of an operator")

    def body(comm: Comm) -> None:
        x = plait.ShardedTensor.from_full(torch.arange(12.0).view(4, 3), "rows/tensor cols", comm)
        with pytest.raises(plait.LayoutError, match="moves elements along the dim"):
            torch.roll(x, 1, 0)
        with plait.auto_redistribute():
            assert torch.equal(torch.roll(x, 1, 0).full(), torch.roll(torch.arange(12.0).view(4, 3), 1, 0))

    plait.run_threads("tensor=2", body)
