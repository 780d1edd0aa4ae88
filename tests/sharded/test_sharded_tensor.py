"""The interface of a ShardedTensor: construction, display, gradients, optimizers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from tensor_cases import shard, values
from torch import nn
from trace_world import TraceComm

from plait import run_threads
from plait.comm import Comm
from plait.sharded import LayoutError, ShardedTensor, auto_redistribute, dropout_stream
from plait.sharded.layout import Layout
from plait.table.mesh import Mesh


def cut(text: str, shape: tuple[int, ...], comm: Comm, seed: int = 0) -> ShardedTensor:
    return ShardedTensor.from_full(values(shape, seed), text, comm)


def test_it_shows_the_whole_and_holds_a_piece() -> None:
    def body(comm: Comm) -> tuple[int, ...]:
        x = cut("row/tensor column", (5, 3), comm)
        assert x.shape == x.size() == torch.Size((5, 3)) and x.size(0) == len(x) == 5 and x.size(-1) == 3
        assert x.dim() == x.ndim == 2 and x.numel() == 15 and x.dtype == torch.float64 and x.requires_grad
        assert str(x.sharding) == "d0/tensor d1" and x.mesh == Mesh(tensor=4) and x.comm is comm
        assert type(x.local) is torch.Tensor and type(x.full()) is torch.Tensor
        assert "tensor=Shard(0)" in repr(x) and "shape=[5, 3]" in repr(x)
        assert isinstance(nn.Parameter(x), nn.Parameter) and isinstance(nn.Parameter(x), ShardedTensor)
        return tuple(x.local.shape)

    assert run_threads("tensor=4", body) == [(2, 3), (2, 3), (1, 3), (0, 3)]


@each_rank("tensor=3")
def test_made_of_pieces(comm: Comm) -> None:
    piece = torch.full((2 if comm.rank < 2 else 1,), float(comm.rank))
    x = ShardedTensor(piece, "row/tensor", comm, (5,))
    assert x.full().tolist() == [0, 0, 1, 1, 2]
    due = ShardedTensor(torch.tensor(comm.rank + 1.0), "scalar, pending(tensor)", comm, ())
    assert float(due.full()) == 6


def test_a_piece_of_another_shape_is_refused_with_the_numbers() -> None:
    comm = TraceComm(Mesh(tensor=4), rank=2)
    with pytest.raises(ValueError, match=r"rank 2 .* holds \[1, 3\] .* local piece is \[2, 3\]"):
        ShardedTensor(torch.zeros(2, 3), "row/tensor column", comm, (5, 3))
    with pytest.raises(ValueError, match="has 1 dims, the shape"):
        ShardedTensor(torch.zeros(2, 3), "row/tensor", comm, (5, 3))
    x = ShardedTensor(torch.zeros(1, 3), "row/tensor column", comm, (5, 3))
    with pytest.raises(ValueError, match="is a ShardedTensor itself"):
        ShardedTensor(x, "row column", comm, (5, 3))


def test_two_comms_do_not_mix() -> None:
    a, b = TraceComm(Mesh(tensor=2)), TraceComm(Mesh(shard=2))
    with pytest.raises(ValueError, match="add of tensors of two comms, on the meshes 'tensor=2' and 'shard=2'"):
        cut("x", (4,), a) + cut("x", (4,), b)


def test_a_plain_tensor_counts_as_replicated_unless_it_wants_a_gradient() -> None:
    x = cut("row/tensor column", (5, 3), TraceComm(Mesh(tensor=2)))
    assert str((x + torch.ones(5, 3)).sharding) == "d0/tensor d1"
    with pytest.raises(LayoutError, match="its gradient would be this rank's share only"):
        x + torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("layout", ["scalar", "scalar, pending(tensor)", "scalar, pending(replica, tensor)"])
@each_rank("replica=2 tensor=2")
def test_a_loss_seeds_every_gradient_once(comm: Comm, layout: str) -> None:
    full = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)

    x = shard(full, layout, comm)
    y = x * 2
    y.backward()
    assert x.grad is not None and not comm.ledger.entries
    assert x.grad.sharding == x.sharding.dual(comm.mesh)
    assert float(x.grad.full()) == 2


@each_rank("tensor=3")
def test_a_loss_of_one_element_may_be_cut(comm: Comm) -> None:
    x = ShardedTensor.from_full(torch.ones(1, requires_grad=True), "one/tensor", comm)
    (x * 3).backward()
    assert x.grad is not None and x.grad.full().tolist() == [3]


@each_rank("tensor=2")
def test_backward_from_more_elements_needs_a_gradient_in_the_dual_layout_or_replicated(comm: Comm) -> None:
    x = cut("row/tensor column", (5, 3), comm)
    with pytest.raises(RuntimeError, match="only a tensor of one element"):
        (x * 2).backward()
    ones = ShardedTensor.from_full(torch.ones(5, 3).double(), "row column/tensor", comm)
    with pytest.raises(LayoutError, match=r"\.redistribute\('d0/tensor d1'\)"):
        (x * 2).backward(ones)
    for seed in (ones.redistribute("row/tensor column"), torch.ones(5, 3).double()):
        x.grad = None
        (x * 2).backward(seed)
        assert x.grad.full().unique().tolist() == [2]


@each_rank("tensor=3")
def test_gradients_add_up_over_backwards_and_a_reduced_one_is_not_added_to(comm: Comm) -> None:
    x = cut("row column", (5, 3), comm)
    rows = cut("row/tensor column", (5, 3), comm, 1).detach()
    for _ in range(2):
        (x * rows).sum().backward()
    assert x.grad is not None and x.grad.sharding == Layout.parse("row column, pending(tensor)")
    torch.testing.assert_close(x.grad.full(), 2 * rows.full())
    x.grad = x.grad.redistribute(x.sharding)
    assert x.grad.sharding == x.sharding
    with pytest.raises(LayoutError, match="zero_grad"):
        (x * rows).sum().backward()
    x.grad = None
    (x * rows).sum().backward()
    torch.testing.assert_close(x.grad.full(), rows.full())
    with pytest.raises(LayoutError, match="the gradient of"):
        x.grad = x.grad.redistribute("row/tensor column")


@each_rank("tensor=2")
def test_in_place_only_where_the_layout_stays(comm: Comm) -> None:
    x = cut("row/tensor column", (5, 3), comm).detach()
    same, before = x, x.full()
    x += cut("row column", (5, 3), comm, 1).detach()
    assert x is same
    torch.testing.assert_close(x.full(), before + values((5, 3), 1).detach())
    whole = cut("row column", (5, 3), comm).detach()
    with pytest.raises(LayoutError, match="in place it would turn"):
        whole.mul_(x)
    with pytest.raises(LayoutError, match="pending"):
        whole.add_(whole.redistribute("row column, pending(tensor)"))


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
    "adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@each_rank("tensor=4")
def test_stock_optimizers_update_shards(comm: Comm, name: str) -> None:
    def loss(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w).tanh(), v).square().sum()

    data = values((4, 6), 3, False)
    full = [values((5, 6), 1), values((2, 5), 2)]
    reference = OPTIMIZERS[name](full)
    for _ in range(3):
        reference.zero_grad()
        loss(data, *full).backward()
        reference.step()

    ours = [nn.Parameter(cut(t, s, comm, k)) for t, s, k in (("o/tensor i", (5, 6), 1), ("o i/tensor", (2, 5), 2))]
    optimizer = OPTIMIZERS[name](ours)
    for _ in range(3):
        optimizer.zero_grad()
        with auto_redistribute():
            loss(data, *ours).backward()
        comm.ledger.clear()
        optimizer.step()
        assert not comm.ledger.entries, "cut parameters have cut gradients"
    for p, want in zip(ours, full, strict=True):
        torch.testing.assert_close(p.full(), want.detach())


def test_copies_are_deep_and_pickles_are_refused() -> None:
    comm = TraceComm(Mesh(tensor=2))
    p = nn.Parameter(cut("o/tensor i", (4, 6), comm))
    q = copy.deepcopy(p)
    assert isinstance(q, nn.Parameter) and q.sharding == p.sharding and q.local.data_ptr() != p.local.data_ptr()
    with pytest.raises(TypeError, match=r"save its \.full"):
        pickle.dumps(p)


@each_rank("tensor=2")
def test_numbers_leave_where_every_rank_has_them(comm: Comm) -> None:
    x = cut("row/tensor column", (5, 3), comm).sum()
    with pytest.raises(LayoutError, match=r"item of \[\] 'scalar, pending\(tensor\)'.*Take \.full\(\)"):
        x.item()
    assert x.detach().redistribute("scalar").item() == pytest.approx(float(values((5, 3)).detach().sum()))


def dropped(comm: Comm, layout: str, p: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    x = shard(values((5, 6)), layout, comm)
    with dropout_stream("seed", 3):
        first, second = F.dropout(x, p), nn.Dropout(p)(x)
    assert first.sharding == x.sharding and not comm.ledger.entries
    first.backward(torch.ones(5, 6).double())
    assert x.grad is not None
    return torch.stack([first.full(), second.full()]), x.grad.full()


def test_no_layout_and_no_mesh_changes_the_mask() -> None:
    ((want, gradient),) = run_threads("tensor=1", lambda comm: dropped(comm, "a b"))
    kept = want[0] != 0
    assert 0 < kept.sum() < 30 and not torch.equal(kept, want[1] != 0), "every call has its own mask"
    torch.testing.assert_close(want[0][kept], 2 * values((5, 6)).detach()[kept])
    for mesh, layout in (
        ("tensor=4", "a/tensor b"),
        ("tensor=4", "a b/tensor"),
        ("replica=2 tensor=2", "a/tensor/replica b"),
        ("replica=2 tensor=2", "a/tensor b, pending(replica)"),
    ):
        for out, grad in run_threads(mesh, lambda comm, layout=layout: dropped(comm, layout)):
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(grad, gradient)


@each_rank("tensor=2")
def test_the_share_that_is_kept(comm: Comm) -> None:
    x = ShardedTensor.from_full(torch.ones(200, 100), "a/tensor b", comm)
    for p in (0.1, 0.7):
        with dropout_stream(1):
            y = F.dropout(x, p).full()
        assert float((y != 0).float().mean()) == pytest.approx(1 - p, abs=0.01)
        assert float(y.mean()) == pytest.approx(1, abs=0.05)
    with dropout_stream(1):
        assert not F.dropout(x, 1.0).full().any()
        assert F.dropout(x, 0.0) is x and F.dropout(x, 0.5, training=False) is x
