"""Small operators on cut tensors, and the kinds of tensors that dispatch them.

An ``Operation`` names its operands by shape and by the dim that is cut. A ``Kind`` of tensor makes operands of the
same numbers, and the gradient that a backward starts from:

    torch     a rank's pieces as plain tensors: the cost of arithmetic without any bookkeeping
    dtensor   DTensor
    plait     ShardedTensor

Nothing here communicates: in these layouts each operator is local, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.contestants import comm_beside
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

N = 16
"""Every dim of every operand."""


@dataclass(frozen=True)
class Operand:
    """A tensor of N elements in each dim; ``cut`` is the dim that is cut over the ranks, None for a replicated one."""

    cut: int | None = 0
    num_dims: int = 2

    def values(self, seed: int) -> Tensor:
        """The whole tensor, the same on every rank."""
        return torch.randn((N,) * self.num_dims, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Operation:
    """An operator and the layouts in which it is local."""

    name: str
    function: Callable[..., Any]
    operands: tuple[Operand, ...] = (Operand(),)


ROW_CUT, WHOLE, COLUMN_CUT, VECTOR = Operand(0), Operand(None), Operand(1), Operand(None, 1)

# gelu by tanh: torch computes the exact one with oneDNN, whose set-up alone costs more than any dispatch
OPERATIONS = (
    Operation("a + b", lambda a, b: a + b, (ROW_CUT, ROW_CUT)),
    Operation("a * b", lambda a, b: a * b, (ROW_CUT, ROW_CUT)),
    Operation("relu", torch.relu),
    Operation("F.gelu, tanh", lambda x: F.gelu(x, approximate="tanh")),
    Operation("x @ w, w cut in columns", lambda x, w: x @ w, (WHOLE, COLUMN_CUT)),
    Operation("F.linear, w cut in rows", F.linear, (WHOLE, ROW_CUT)),
    Operation("sum of all", lambda x: x.sum()),
    Operation("sum(-1)", lambda x: x.sum(-1)),
    Operation("F.layer_norm", lambda x, w, b: F.layer_norm(x, (N,), w, b), (ROW_CUT, VECTOR, VECTOR)),
    Operation("softmax(-1)", lambda x: x.softmax(-1)),
    Operation("transpose", lambda x: x.transpose(0, 1)),
    Operation("view", lambda x: x.view(-1, 4, N // 4)),
)


class Kind(Protocol):
    """One kind of tensor."""

    def operand(self, operand: Operand, values: Tensor) -> Any:
        """The operand, from its whole values."""

    def seed(self, result: Any) -> Any:
        """A gradient of ones for this result, in the layout in which its backward wants it."""

    def whole(self, tensor: Any) -> Tensor:
        """The whole of a result or gradient, on every rank; this communicates."""

    def messages(self, function: Callable[[], Any]) -> int:
        """The number of messages that a call sends."""


class Plain:
    """Plain local pieces."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def operand(self, operand: Operand, values: Tensor) -> Tensor:
        piece = values if operand.cut is None else values.chunk(self.ranks, operand.cut)[self.rank]
        return piece.clone(memory_format=torch.contiguous_format)

    def seed(self, result: Tensor) -> Tensor:
        return torch.ones_like(result)


class Distributed:
    """torch's DTensor."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def operand(self, operand: Operand, values: Tensor) -> DTensor:
        return distribute_tensor(values, self.mesh, [Replicate() if operand.cut is None else Shard(operand.cut)])

    def seed(self, result: DTensor) -> DTensor:
        placements = [Replicate() if isinstance(p, Partial) else p for p in result.placements]
        return distribute_tensor(torch.ones(result.shape), self.mesh, placements)

    def whole(self, tensor: DTensor) -> Tensor:
        return tensor.full_tensor()

    def messages(self, function: Callable[[], Any]) -> int:
        with CommDebugMode() as mode:
            function()
        count: int = mode.get_total_counts()
        return count


class Sharded:
    """plait's ShardedTensor."""

    def __init__(self) -> None:
        from plait.table.mesh import Mesh

        self.comm = comm_beside(Mesh(tensor=dist.get_world_size()), "operations")

    def operand(self, operand: Operand, values: Tensor) -> Any:
        from plait.sharded.layout import Layout
        from plait.sharded.sharded_tensor import ShardedTensor

        dims = tuple(("tensor",) if d == operand.cut else () for d in range(operand.num_dims))
        return ShardedTensor.from_full(values, Layout(dims), self.comm)

    def seed(self, result: Any) -> Any:
        from plait.sharded.sharded_tensor import ShardedTensor

        return ShardedTensor.from_full(torch.ones(result.shape), result.sharding.dual(self.comm.mesh), self.comm)

    def whole(self, tensor: Any) -> Tensor:
        whole: Tensor = tensor.full()
        return whole

    def messages(self, function: Callable[[], Any]) -> int:
        before = len(self.comm.ledger)
        function()
        return len(self.comm.ledger) - before


def forward(operation: Operation, operands: Sequence[Any]) -> Callable[[], Any]:
    """The operator on operands that want no gradient."""
    function = operation.function
    fixed = [x.detach() for x in operands]
    return lambda: function(*fixed)


def forward_backward(operation: Operation, operands: Sequence[Any], seed: Any) -> Callable[[], Any]:
    """The operator and its backward down to the operands' ``grad``, which is given back and forgotten, as in a step."""
    function = operation.function
    leaves = [x.detach().requires_grad_() for x in operands]

    def call() -> list[Any]:
        function(*leaves).backward(seed)
        gradients = []
        for leaf in leaves:
            gradients.append(leaf.grad)
            leaf.grad = None
        return gradients

    return call
