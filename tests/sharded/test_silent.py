"""Former silent faults: a write into a copy, a sum added once per rank, a cast before the sum, infinite shares."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from tensor_cases import shard, values
from torch import Tensor, nn

from plait import LayoutError, ShardedTensor, auto_redistribute, run_threads
from plait.comm import Comm

CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "iadd": lambda x, y: x.__iadd__(y),
    "copy_": lambda x, y: x.copy_(y),
    "mul_ by itself": lambda x, y: x.mul_(x),
    "relu by keyword": lambda x, y: F.relu(input=x, inplace=True),
    "relu": lambda x, y: F.relu(x, inplace=True),
    "module": lambda x, y: nn.ReLU(inplace=True)(x),
    "setitem": lambda x, y: x.__setitem__(0, y[1]),
    "setitem of a mask": lambda x, y: x.__setitem__(x > 0, 2.0),
}
"""Beside those of torch's database, which has every operator in place and with out=."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layout", ["a b", "a/tensor b", "a b/tensor", "a b, pending(tensor)"])
@each_rank("tensor=3")
def test_under_auto_redistribute_the_tensor_itself_changes(comm: Comm, change: str, layout: str) -> None:
    def changed(x: Any, y: Any) -> Any:
        with torch.no_grad():
            CHANGES[change](x, y)
        return x

    want = changed(values((5, 5), 1, False), values((5, 5), 2, False))

    x, y = shard(values((5, 5), 1, False), layout, comm), shard(values((5, 5), 2, False), "a/tensor b", comm)
    before = x.sharding
    with auto_redistribute():
        changed(x, y)
    torch.testing.assert_close(x.full(), want)
    assert x.sharding == before


@each_rank("tensor=2")
def test_a_gradient_passes_what_was_changed_in_place(comm: Comm) -> None:
    a, b = values((5, 6), 1), values((5, 6), 2)
    want = torch.autograd.grad(a.clone().mul_(b.relu()).sum(), [a, b])

    x, y = shard(a.detach(), "a b", comm).requires_grad_(), shard(b.detach(), "a b/tensor", comm).requires_grad_()
    with auto_redistribute():
        z = x.clone()
        assert z.mul_(y.relu()) is z
    for found, whole in zip(torch.autograd.grad(z.sum(), [x, y]), want, strict=True):
        torch.testing.assert_close(found.full(), whole)


@each_rank("tensor=2")
def test_a_copy_in_the_place_of_a_view_is_not_written_into(comm: Comm) -> None:
    x = shard(values((5, 6), 1, False), "a b/tensor", comm)
    with auto_redistribute():
        flat = x.flatten()
        for _ in range(2):
            with pytest.raises(LayoutError, match="relu_ would change a copy: flatten gave it"):
                flat.relu_()
        with pytest.raises(LayoutError, match="would change a copy"):
            F.relu(flat, True)
        flat.clone().relu_()
    rows = shard(values((5, 6), 1, False), "a/tensor b", comm)
    rows.view(5, 6, 1).relu_()
    assert torch.equal(rows.full(), values((5, 6), 1, False).relu())


@each_rank("tensor=2")
def test_whole_numbers_have_no_mean(comm: Comm) -> None:
    x = ShardedTensor.from_full(torch.arange(1, 5), "a/tensor", comm)
    with pytest.raises(LayoutError, match="could not infer output dtype"):
        x.mean()
    assert float(x.mean(dtype=torch.float64).full()) == 2.5


@each_rank("tensor=2")
def test_a_mean_of_halves_is_finite_where_their_sum_is_not(comm: Comm) -> None:
    x = ShardedTensor.from_full(torch.full((40000, 2), 8.0).half(), "a/tensor b", comm)
    assert x.mean().full() == 8
    assert x.mean(0).full().tolist() == [8, 8]


def test_a_plan_that_proved_wrong_is_not_kept() -> None:
    from plait.sharded.rules import RULES, rule

    def body(comm: Comm) -> None:
        x = shard(values((5, 5), 1, False), "a/tensor b", comm)
        for _ in range(3):
            with pytest.raises(LayoutError, match="this rank would hold"):
                torch.histc(x, 4, -2, 2)

    rule(torch.histc)(lambda func, x, *args: x)
    try:
        run_threads("tensor=2", body)
    finally:
        del RULES[torch.histc]


def test_numbers_of_another_type_are_another_call() -> None:
    def dtypes(x: Any) -> list[torch.dtype]:
        return [torch.hypot(x * 1.0, x * 1.0).dtype, *(x.clamp_min(n).dtype for n in (1, 1.0, True))]

    of_whole = torch.arange(6)
    found = run_threads("tensor=2", lambda comm: dtypes(ShardedTensor.from_full(of_whole, "a/tensor", comm)))
    assert found[0] == dtypes(of_whole)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jacrev", "jacfwd", "hessian", "functionalize"])
@each_rank("tensor=2")
def test_torch_func_of_a_sharded_tensor_is_refused(comm: Comm, transform: str) -> None:
    """It asks no class of a tensor, and would take this rank's piece for the whole: a mean over half of it."""
    x = shard(values((6, 5), 1, False), "a/tensor b", comm)
    with pytest.raises(LayoutError, match=r"torch\.func"):
        getattr(torch.func, transform)(lambda x: x.mean())(x)
    with pytest.raises(LayoutError, match=r"torch\.func"):
        torch.func.vjp(torch.sin, x)
    with pytest.raises(LayoutError, match=r"torch\.func"):  # what it has made, beside a sharded tensor
        torch.func.grad(lambda w: (w * x).sum())(torch.ones(6, 5))
    plain = torch.ones(5)
    assert torch.equal(torch.func.grad(lambda x: x.square().sum())(plain), 2 * plain), "nothing is left open"


UNTOLD: list[Callable[[Any], Any]] = [
    lambda x: x.apply_(abs),
    lambda x: x.map_(x, max),
    lambda x: x.t_(),
    lambda x: x.resize_(5, 5),
    lambda x: x.as_strided((5,), (1,)),
    lambda x: x.uniform_(),
    lambda x: torch.rand_like(x),
    lambda x: nn.init.kaiming_uniform_(x),
    lambda x: x.untyped_storage(),
    lambda x: x.share_memory_(),
    lambda x: x.to_sparse(),
]
"""What torch does not tell of, what draws random numbers, and what is no function of values."""


@pytest.mark.parametrize("layout", ["a b", "a/tensor b"])
@pytest.mark.parametrize("number", range(len(UNTOLD)))
@each_rank("tensor=2")
def test_what_torch_does_not_tell_is_refused(comm: Comm, number: int, layout: str) -> None:
    x = shard(values((5, 5), 1, False), layout, comm)
    with auto_redistribute(), pytest.raises(LayoutError):
        UNTOLD[number](x)
    assert torch.equal(x.full(), values((5, 5), 1, False))


def test_torch_has_its_own_layout() -> None:
    def body(comm: Comm) -> Tensor:
        x = shard(values((5, 5), 1, False), "a/tensor b", comm)
        assert x.layout is torch.strided and str(x.sharding) == "d0/tensor d1"
        return torch.masked.sum(x, 1, mask=x > 0).full()

    x = values((5, 5), 1, False)
    torch.testing.assert_close(run_threads("tensor=2", body)[0], torch.masked.sum(x, 1, mask=x > 0))


def test_true_is_not_one() -> None:
    """1 and True are one key of a dict, and two arguments: std along dim 1, std of all."""

    def body(comm: Comm) -> list[tuple[int, ...]]:
        x = shard(values((2, 4, 3), 0, False), "a b c", comm)
        return [tuple(y.shape) for y in (x.std(1), x.std(True), x.std(1), x[0])]

    assert run_threads("tensor=2", body)[0] == [(2, 3), (), (2, 3), (4, 3)]
