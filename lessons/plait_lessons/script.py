"""A small face for scripts: ranks on a line, and tensors that go from one to another.

    # torchrun --nproc-per-node 3 pass_it_on.py        0 --> 1 --> 2
    import torch
    import plait_lessons.script as script

    world = script.init()
    before, after = world.get_prev_rank(), world.get_next_rank()
    x = torch.ones(4) if before is None else world.recv_tensor((4,), before)
    if after is not None:
        world.send_tensor(x + 1, after)
    world.close()

``init()`` reads torchrun's variables; inside a thread world it takes the rank's comm instead, so the same
script runs in a notebook: ``run(Mesh(pipe=3), lambda comm: main(init(comm)))``.  ``world.comm`` is the whole
``Comm``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from plait.comm.base import Comm, MismatchError
from plait.comm.checks import label
from plait.comm.header import empty_header, header_of, shape_in
from plait.comm.operation import name_of
from plait.comm.process import ProcessComm
from plait.table.mesh import Mesh


def init(comm: Comm | None = None, *, device: torch.device | str = "cpu", deadline: float = 30.0) -> ScriptWorld:
    """Joins the other ranks of this script.

    Args:
        comm: this rank's comm, where there is a world already; otherwise torchrun's variables are read,
            and its processes form a line (the axis ``pipe``).
        device: where the tensors live.
        deadline: seconds that any wait may take.

    Raises:
        ValueError: no comm, and not started by torchrun.
    """
    if comm is None:
        num_ranks = int(os.environ.get("WORLD_SIZE") or 1)
        comm = ProcessComm.from_env(Mesh(pipe=num_ranks), device=device, deadline=deadline)
    return ScriptWorld(comm)


class ScriptWorld:
    """One rank of a line of ranks."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    @property
    def rank(self) -> int:
        """This rank."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.comm.mesh.size

    def get_next_rank(self) -> int | None:
        """The rank after this one; None at the end of the line."""
        return self.rank + 1 if self.rank + 1 < self.world_size else None

    def get_prev_rank(self) -> int | None:
        """The rank before this one; None at the start of the line."""
        return self.rank - 1 if self.rank > 0 else None

    def send_tensor(self, tensor: Tensor, dst: int) -> None:
        """Sends a copy of ``tensor`` on its way to ``dst`` and goes on; of any layout in memory.

        A header goes ahead, which says what it is.
        """
        self.comm.send(header_of(tensor, self.comm.device), dst)
        self.comm.send(tensor.detach().clone(memory_format=torch.contiguous_format), dst)

    def recv_tensor(self, shape: Sequence[int], src: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The next tensor from ``src``.

        Raises:
            MismatchError: the sender's shape or dtype is another; the message names both.
            TimeoutError: nothing came within the deadline.
        """
        header = empty_header(self.comm.device)
        self.comm.recv(header, src).wait()
        sent_shape, sent_dtype = shape_in(header)
        tensor = torch.empty(sent_shape, dtype=sent_dtype, device=self.comm.device)
        self.comm.recv(tensor, src).wait()  # also where it is refused: the next one comes after it
        if (sent_shape, sent_dtype) != (tuple(shape), dtype):
            raise MismatchError(
                f"rank {self.rank} receives {name_of(dtype)} {tuple(shape)} from rank {src}, which sent "
                f"{label(tensor)}: make both equal"
            )
        return tensor

    def close(self) -> None:
        """Waits until what was sent has arrived, then leaves the world."""
        self.comm.close()
