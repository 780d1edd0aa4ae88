"""The reverse of a forgotten sum: gradients that a plan adds up over the axis, though every rank has them whole.

norm on each head, "summed"       rank 0: of its heads   rank 1: of its heads   differ: the sum is the gradient
norm on the stream, "summed"      rank 0: the whole      rank 1: the whole      alike: the sum is twice too large
"""

from functools import partial

import torch
from torch import Tensor

from plait.comm.agree import gather_floats
from plait.table.collectives import Note
from plait.table.tensor_plan import Style
from plait.tensor.axis import AXES, TensorAxis
from plait.torch_private import DisableTorchFunction

FEWEST = 4
"""Numbers in a gradient that are not alike on all ranks by chance."""


class SharesCheck:
    """Looks at the first gradient that is not zero of each tensor that it is given."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._done: set[str] = set()

    def watch(self, x: Tensor, name: str, style: Style, last: int | None = None) -> None:
        """``style`` says that the gradient of ``x`` (the ``last`` of its features) is a share on every rank."""
        if name not in self._done and x.requires_grad:
            x.register_hook(partial(self._look, name, style, last))

    def _look(self, name: str, style: Style, last: int | None, gradient: Tensor) -> None:
        if name not in self._done:
            with torch.no_grad(), DisableTorchFunction():
                if check_share(self._axis, gradient if last is None else gradient[..., -last:], name, style):
                    self._done.add(name)


def check_share(axis: TensorAxis, gradient: Tensor, name: str, style: Style) -> bool:
    """Raises ValueError where a gradient that is to be summed over the ranks is the same on each of them.

    One small message shows it.  Returns False where the gradients are zero, which shows nothing yet.
    """
    flat = gradient.detach().flatten().double()
    if len(flat) < FEWEST:
        return True
    angles = torch.arange(len(flat), dtype=torch.float64, device=flat.device)
    mine = [flat.norm().item(), (flat @ angles.cos()).item(), (flat @ angles.sin()).item(), float(len(flat))]
    rows = gather_floats(axis.comm, mine, AXES, Note("setup"))
    near = 1e-5 * rows[0][0]  # nothing but rounding lies between them
    if all(abs(a - b) <= near for row in rows for a, b in zip(row, rows[0], strict=True)) and near:
        raise ValueError(
            f"the gradient of {name!r} is the same on all {axis.ways} tensor ranks, and {str(style)!r} in the tensor "
            f"plan adds it up over them, so it would be {axis.ways} times too large: what it works on, or what reads "
            f"it, is whole; leave {name!r} out of the tensor plan"
        )
    return any(row[0] > 0 for row in rows)
