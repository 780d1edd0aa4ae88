"""Explains a backward that fails, and refuses gradients that the engine cannot take.

loss ──► the model's parameters        taken by hooks, reduced, divided
     └─► another engine's              taken by its hooks (``also``), or refused there
     └─► a criterion's, a loss weight  its gradient would not be reduced: refused, after the first backward
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from plait.forward.recompute import WRITTEN

REFUSED = {
    "in the input part": (
        "a gradient of {name!r} came in the input part of a backward that the schedule splits: an autograd.Function "
        "(SyncBatchNorm has one) must not be given the parameter itself: pass parameter * 1, or take another schedule "
        "(1f1b, gpipe, interleaved)"
    ),
    "outside": (
        "a gradient of {name!r} came outside of its engine's backward: call engine.backward(loss, count) instead of "
        "loss.backward(); where another engine's loss goes through this model too, name this engine there, as in "
        "other.backward(loss, count, also=[engine])"
    ),
    "not gathered": (
        "the gradient of {name!r} came while its unit {unit!r} was not gathered: the module leaks a tensor besides its "
        "return value; return it, so that its backward can be seen"
    ),
    "sparse": "the gradient of {name!r} is sparse: build the embedding with sparse=False",
    "twice": (
        "{name!r} got a second gradient in one microbatch (two backward calls, a reentrant checkpoint): add the "
        "losses, call backward once, and use checkpoint(..., use_reentrant=False). Your own function whose backward "
        "calls backward (reversible layers) needs bucket=0"
    ),
}
"""Texts of errors, by where or how a gradient came."""
LATE = "use w.detach().clone() in place of w.detach(), and return each tensor that a module leaks besides its result"


def refused(why: str, name: str, unit: str = "") -> ValueError:
    """The error for a parameter's gradient that came in the wrong way."""
    return ValueError(REFUSED[why].format(name=name, unit=unit))


def explained(error: RuntimeError, flights: Mapping[int, object]) -> ValueError | None:
    """Returns the cause of a backward's error, if one is known: a write in place, by an update, by the forward of
    another microbatch (among ``flights``) or by one that ran again; or a late read of a detached parameter."""
    if isinstance(error, CheckpointError):
        return ValueError(f"a forward that was run again in the backward made other tensors: {WRITTEN}")
    if "out of bounds for storage of size 0" in str(error):
        return ValueError(f"a split parameter is read after it was resharded: {LATE}. PyTorch says: {error}")
    if "modified by an inplace operation" not in str(error):
        return None
    if not flights:
        return ValueError(
            f"this backward reads something that was written to after its forward. Were parameters updated? Call "
            f"engine.backward before. Are blocks recomputed? Write x = x + block(x), not x += block(x). {error}"
        )
    return ValueError(
        f"a forward writes in place to a tensor that an earlier microbatch's backward still reads (a buffer?); "
        f"in a pipeline several are under way at once, here with {sorted(flights)}: let the forward read a copy, "
        f"as in x * self.scale.clone(). PyTorch says: {error}"
    )


def refuse_outside(reached: Sequence[nn.Parameter]) -> None:
    """Raises ValueError if a parameter that a backward reached has a gradient: no engine has taken it."""
    if taken := [parameter for parameter in reached if parameter.grad is not None]:
        for parameter in taken:
            parameter.grad = None
        raise ValueError(
            f"the loss goes through a trainable parameter of shape {tuple(taken[0].shape)} that is not the engine's "
            f"model's (of a criterion, or a loss weight): its gradient would be this rank's alone, and not divided by "
            f"the count. Make it part of the model, as in a module that has both; give the module that has it its own "
            f"engine, and name that one (also=[engine]); or freeze it"
        )


def reached_by(outputs: Sequence[Tensor | GradientEdge]) -> list[nn.Parameter]:
    """The parameters that a backward from these outputs reaches."""
    nodes: list[Any] = [out.grad_fn if isinstance(out, Tensor) else out.node for out in outputs]
    seen: set[Any] = set()
    parameters: dict[int, nn.Parameter] = {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            parameters[id(variable)] = variable
        nodes += [after for after, _ in node.next_functions]
    return list(parameters.values())
