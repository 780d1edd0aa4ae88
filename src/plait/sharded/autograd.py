"""``torch.autograd.backward``, ``grad`` and hooks on ShardedTensors: as for plain tensors, seeded by the dual table.

``torch.func`` (``grad``, ``vmap``, ...) is refused.
"""

from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import eager_transforms, vmap

from plait.sharded.dispatch import DIRECT, IN_TORCH_FUNC, LayoutError
from plait.sharded.gradients import seed
from plait.sharded.sharded_tensor import ShardedTensor, wrap
from plait.torch_private import DisableTorchFunctionSubclass

_local = DisableTorchFunctionSubclass


def _seeds(ends: Any, given: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the local pieces where a backward begins, and the gradient of each."""
    ends = [ends] if isinstance(ends, Tensor) else list(ends)
    given = [given] if isinstance(given, Tensor) else given or [None] * len(ends)
    seeds = [seed(cast(ShardedTensor, y)._spec, y, g) for y, g in zip(ends, given, strict=True)]
    with _local():
        return [y.as_subclass(Tensor) for y in ends], seeds


def _backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **options: Any
) -> None:
    with _local():
        torch.autograd.backward(*_seeds(tensors, grad_tensors), retain_graph, create_graph, **options)


def _grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
    allow_unused: Any = None, **options: Any,
) -> tuple[ShardedTensor | None, ...]:  # fmt: skip
    """Returns gradients in the dual layouts of the inputs."""
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    ends, seeds = _seeds(outputs, grad_outputs)
    with _local():
        grads = torch.autograd.grad(ends, inputs, seeds, retain_graph, create_graph, allow_unused=allow_unused)
    return tuple(g if g is None else wrap(g, x._spec.dual) for g, x in zip(grads, inputs, strict=True))


def _register_hook(x: ShardedTensor, hook: Any) -> Any:
    """Registers a hook that sees this rank's piece of the gradient, plain."""
    with _local():
        return Tensor.register_hook(x, hook)


def _refusing(enter: Any) -> Any:
    """Makes a function of torch.func refuse ShardedTensors: it would mistake this rank's piece for the whole."""

    @wraps(enter)
    def enter_plain(tensor: Tensor, *rest: Any) -> Any:
        if type(tensor) is ShardedTensor:
            raise LayoutError(IN_TORCH_FUNC)
        return enter(tensor, *rest)

    return enter_plain


for module, name in (
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (vmap, "_add_batch_dim"),
):
    if hasattr(module, name):  # torch's own names may change
        setattr(module, name, _refusing(getattr(module, name)))
DIRECT[torch.autograd.backward] = _backward
DIRECT[torch.autograd.grad] = _grad
DIRECT[Tensor.register_hook] = _register_hook
