"""Compares the gradients of parameters that every tensor rank has whole.

If a module works on a cut activation but is not in the tensor plan, each rank has only a part of its gradient.
"""

import math

import torch

from plait.comm.agree import gather_floats
from plait.referee.values import wide
from plait.step.engine import Engine
from plait.table.agreement import IN_STAGE
from plait.table.collectives import Note
from plait.zero.unit import parameters_of


class WholeGradients:
    """Compares each such gradient once, in the first step in which it is not zero, by one small message.

    All ranks of a stage decide the same: they agree on which parameters have gradients, and on making the step.
    """

    def __init__(self, engine: Engine) -> None:
        placed = engine.placed
        whole = [name for name, _, f, i in parameters_of(placed.units) if f.trainable and f.cuts[i] is None]
        self.unchecked = list(dict.fromkeys(whole)) if placed.parallel.styles else []

    def __call__(self, event: str, engine: Engine) -> None:
        if event != "agreed" or not engine.reducer.made:
            return
        squares = {name: 0.0 for name in self.unchecked if engine.reducer.have_gradient[name]}
        if not squares:
            return
        placed, comm = engine.placed, engine.comm
        for run in placed.owned:
            if run.name in squares and placed.norm.first_copy[run.flat.axes]:
                squares[run.name] += wide(run.gradient).square().sum().item()
        rows = gather_floats(comm, list(squares.values()), IN_STAGE, Note("sanitize"))
        sums = torch.tensor(rows, dtype=torch.float64).view(-1, comm.mesh.tensor, len(squares)).sum(0)
        for name, values in zip(squares, sums.T.tolist(), strict=True):
            if max(values) > min(values) * 1.0001:  # bitwise equal, unless the runs are cut differently
                norms = ", ".join(f"{math.sqrt(v):.3g}" for v in values)
                raise ValueError(
                    f"the gradient of {name!r} differs between the tensor ranks (norms {norms}), though each holds the "
                    f"whole parameter: it works on a cut activation; add its module to the tensor plan as 'summed' "
                    f"(or 'sequence', on the stream that sequence parallelism cuts)"
                )
            if max(values) != 0:
                self.unchecked.remove(name)
