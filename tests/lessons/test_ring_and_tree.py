"""Ring and tree give the library's collectives, and send the right bytes."""

from itertools import product

import pytest
import torch
from each_rank import each_rank
from plait_lessons import ring, tree

from plait.comm import Comm, run
from plait.table.mesh import Mesh


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 8])
def test_any_number_of_ranks(n: int) -> None:
    """Sums of whole numbers do not depend on the order, so the library has the same."""

    def sums(comm: Comm) -> None:
        for algorithm, op in product((ring, tree), ("sum", "min", "max")):
            x = ((torch.arange(11.0) + comm.rank) * 7 % 5).round()
            wanted = x.clone()
            comm.all_reduce(wanted, ("shard",), op).wait()
            algorithm.all_reduce(comm, y := x.clone(), ("shard",), op)
            assert torch.equal(y, wanted)
            whole, piece, gathered = x.repeat(n), torch.empty(11), torch.empty(11 * n)
            algorithm.reduce_scatter(comm, piece, whole, ("shard",), op)
            algorithm.all_gather(comm, gathered, piece + comm.rank, ("shard",))
            assert torch.equal(piece, wanted) and torch.equal(whole, x.repeat(n))
            assert torch.equal(gathered.view(n, 11), wanted + torch.arange(n)[:, None])
            for root in range(n):
                tree.reduce(comm, y := x.clone(), ("shard",), root, op)
                assert torch.equal(y, wanted if comm.rank == root else x)
                tree.broadcast(comm, y, ("shard",), root)
                assert torch.equal(y, wanted)

    run(Mesh(shard=n), sums)


@pytest.mark.parametrize("n", [2, 3, 6, 8])
def test_the_ring_sends_what_the_formula_says(n: int) -> None:
    def sent(comm: Comm) -> int:
        ring.all_reduce(comm, torch.ones(n * 10), ("shard",))
        return comm.ledger.sent

    assert run(Mesh(shard=n), sent) == [2 * (n - 1) * 10 * 4] * n


def test_the_tree_of_the_picture() -> None:
    """Six members: 0 hands to 1, 2, 4; 1 to 3, 5."""
    pairs = run(Mesh(shard=6), lambda c: (tree.broadcast(c, torch.ones(1), ("shard",)), len(c.ledger))[1])
    assert [tree._children(v, 6) for v in range(6)] == [[1, 2, 4], [3, 5], [], [], [], []]
    assert [tree._parent(v) for v in range(1, 6)] == [0, 0, 1, 0, 1]
    assert tree._subtree(1, 6) == [1, 3, 5]
    assert pairs == [3, 3, 1, 1, 1, 1]  # messages sent or received


@pytest.mark.parametrize("algorithm", [ring, tree])
@each_rank("shard=2", refused="equal pieces")
def test_uneven_pieces_are_refused(comm: Comm, algorithm) -> None:
    algorithm.reduce_scatter(comm, torch.empty(2), torch.ones(5), ("shard",))
