"""A rule for an operator that plait has none for."""

import pytest
import torch
from guide import run_section

import plait
from plait.comm import Comm
from plait.sharded.rules import RULES

WHOLE = torch.arange(15.0).view(5, 3)


def test_before_it_the_operator_is_refused() -> None:
    def body(comm: Comm) -> None:
        x = plait.ShardedTensor.from_full(WHOLE, "rows/tensor cols", comm)
        with pytest.raises(plait.LayoutError, match=r"histc has no rule"):
            torch.histc(x, 4, 0, 14)

    assert torch.histc not in RULES
    plait.run_threads("tensor=2", body)


@pytest.mark.parametrize("layout", ["rows cols", "rows/tensor cols", "rows cols/tensor"])
def test_its_shares_add_up_to_the_counts_of_the_whole(layout: str) -> None:
    run_section("A rule of an operator")

    def body(comm: Comm) -> None:
        y = torch.histc(plait.ShardedTensor.from_full(WHOLE, layout, comm), 4, 0, 14)
        assert not comm.ledger.entries
        assert torch.equal(y.full(), torch.histc(WHOLE, 4, 0, 14))

    plait.run_threads("tensor=2", body)


def test_of_a_pending_sum_it_is_refused_with_the_way_out() -> None:
    run_section("A rule of an operator")

    def body(comm: Comm) -> None:
        x = plait.ShardedTensor.from_full(WHOLE, "rows cols, pending(tensor)", comm)
        with pytest.raises(plait.LayoutError, match="only a linear operator may act on a sum"):
            torch.histc(x, 4, 0, 14)
        with plait.auto_redistribute():
            assert torch.equal(torch.histc(x, 4, 0, 14).full(), torch.histc(WHOLE, 4, 0, 14))

    plait.run_threads("tensor=2", body)
