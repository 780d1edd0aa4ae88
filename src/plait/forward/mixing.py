"""Functions that mix the features a column has left, of which each rank has a part: refused by shape, in any forward.

It also looks at what ``loss_fn`` does with what the model returns.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.forward.context import ForwardContext
from plait.forward.interceptor import Function
from plait.table.tensor_plan import Style

NORMS = {"layer_norm", "rms_norm"}
MIXES = {
    *NORMS,
    *("softmax", "log_softmax", "logsumexp", "cumsum", "sum", "mean", "var", "std", "norm", "vector_norm"),
    *("linalg_norm", "linalg_vector_norm", "nansum", "nanmean", "prod"),
    *("max", "min", "amax", "amin", "argmax", "argmin", "normalize", "cross_entropy", "mse_loss"),
}
"""Functions that mix the last dim of their first argument."""

DIM_SECOND = {"norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2, "normalize": 2}
"""Where their dim stands among the arguments, if it is not the second."""


def may_mix(func: Function) -> bool:
    return getattr(func, "__name__", "") in MIXES


def check_mixing(
    func: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    context: ForwardContext,
    styles: Mapping[str, Style],
    parameters: Container[int],
) -> None:
    """Raises ValueError where a function mixes the features that a column left, of which each rank has a part.

    Args:
        styles: of modules, by name.
        parameters: the cut ones, by ``id``.
    """
    x, name = args[0] if args else kwargs.get("input"), getattr(func, "__name__", "")
    if not isinstance(x, Tensor) or not (name == "linear" or may_mix(func)):
        return
    with torch._C.DisableTorchFunction():
        if x.shape != context.cut.shape:
            return
    where = context.module.name or "the model"
    if (style := styles.get(where)) is not None and style.kind in ("whole", "shared"):
        return
    if name == "linear":
        if id(args[1] if len(args) > 1 else kwargs["weight"]) in parameters:
            return
        what, fix = "multiplies", f"say 'row' for {where!r} in the tensor plan"
    else:
        place = DIM_SECOND.get(name, 1)
        dim = None if name in NORMS else kwargs.get("dim", args[place] if len(args) > place else None)
        if name == "normalize" and dim is None:
            dim = 1
        if {None, -1, x.dim() - 1}.isdisjoint(dim if isinstance(dim, tuple | list) else (dim,)):
            return
        what, fix = "mixes", "gather it first ('gathered' instead of 'column'), or leave the module whole"
    raise ValueError(
        f"{name!r} in module {where!r} {what} {x.size(-1)} of the {context.cut.width} features that a column-cut "
        f"module left on this rank: between a column and its row only element-wise functions are right; {fix}; or "
        f"say 'whole' for {where!r}, if what it works on is another tensor of this shape"
    )
