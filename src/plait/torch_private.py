"""Torch's private names that plait uses, each with its reason.  No other file takes one of these from torch itself.

A release of torch may rename or drop such a name, so this is the page to read when one comes out.  Names that are slow
to import stay in the one file that uses them; decision 135 lists those.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._python_dispatch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store  # torch.distributed has it, and does not export it to mypy

# Trees of lists, tuples and dicts: torch's modules themselves return types that it has registered here.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils._pytree import treespec_dumps as treespec_dumps
from torch.utils._pytree import treespec_loads as treespec_loads

# Classes of tensors: parameters at rest, cut weights, sharded tensors.
DisableTorchFunction = torch._C.DisableTorchFunction  # reads a tensor past every class and mode
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # reads a tensor past its class only

# Modes.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode  # sees operators below autograd
get_function_stack_at = torch._C._get_function_stack_at  # finds the interceptor among the program's modes
len_torch_function_stack = torch._C._len_torch_function_stack  # counts them
pop_torch_function_stack = torch._C._pop_torch_function_stack  # takes the interceptor off without a context manager
push_on_torch_function_stack = torch._C._push_on_torch_function_stack  # puts it on

# Backward passes: torch does not show hooks which pass runs, or which of its nodes will run.
current_autograd_node = torch._C._current_autograd_node  # finds what follows the running node
# tells a first backward from the last:
current_backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
current_graph_task_id = torch._C._current_graph_task_id  # is -1 outside of a backward
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # runs a function at the end of a backward
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # tells if a checkpoint is around a call
will_engine_execute_node = torch._C._will_engine_execute_node  # tells which gradients this backward wants

# Transforms around a call.
are_functorch_transforms_active = torch._C._are_functorch_transforms_active  # tells if vmap or jvp is around a call
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor  # tells if a tensor is inside of one
is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled  # is False inside of an autograd.Function's forward

# Modules, storages and operators.
assert_async = torch._assert_async  # checks a class index on the device, without a wait
foreach_norm = torch._foreach_norm  # takes the norms of many tensors in one call
global_forward_hooks = torch.nn.modules.module._global_forward_hooks  # are hooks that a program has put on all modules
global_forward_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks  # likewise
storage_use_count = torch._C._storage_Use_Count  # tells if another tensor has a gradient's memory too


# Nodes of autograd, whose fields are private.


def shapes_before(node: Any) -> list[Sequence[int]]:
    """The shapes of the tensors that a node's own is made of, as far as they need a gradient."""
    return [before._input_metadata[index].shape for before, index in node.next_functions if before is not None]


def stack_of(node: Any) -> Any:
    """The node that makes one tensor of scalars, or of means over samples, if this one adds it up; else this one."""
    before = node.next_functions[0][0] if type(node).__name__.startswith("SumBackward") else None
    averages = before is not None and type(before).__name__ == "MeanBackward1" and 0 in before._saved_dim
    return before if averages or (before and math.prod(shapes_before(node)[0]) > 1 and _of_scalars(before)) else node


def slopes(node: Any) -> list[tuple[Any, float]]:
    """The nodes before one of scalars, and the derivative by each of its sum; none for Python's functions."""
    if not _of_scalars(node) or isinstance(node, torch.autograd.function.BackwardCFunction) or is_packed(node):
        return []
    made = node._input_metadata[0]
    found = node(torch.ones(made.shape, dtype=made.dtype, device=made.device))
    by_each = zip(node.next_functions, found if isinstance(found, tuple) else (found,), strict=True)
    return [(edge[0], float(by)) for edge, by in by_each if by is not None]


def _of_scalars(node: Any) -> bool:
    return bool(shapes := shapes_before(node)) and all(math.prod(shape) == 1 for shape in shapes)


def is_packed(node: Any) -> bool:
    """True if hooks (a checkpoint's) hold tensors that a node has saved, and recompute them on every access."""
    for name in (name for name in dir(node) if name.startswith("_raw_saved_")):
        try:
            getattr(node, name).register_hooks(torch.Tensor.detach, torch.Tensor.detach)
        except RuntimeError as error:  # it has hooks already, or nothing is saved
            if "None" not in str(error):
                return True
    return False
