"""What four ranks do for the oracle: the operators under torch's DTensor and under ShardedTensor, side by side.

DTensor redistributes as it likes, so values are compared whole.  Where both compute without communication, their
layouts are compared as well.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from tensor_cases import OPERATORS, shard, values
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from plait.comm import Comm
from plait.comm.process import ProcessComm
from plait.sharded import LayoutError, ShardedTensor, auto_redistribute, from_dtensor, to_dtensor
from plait.table.mesh import Mesh

RANKS = 4
MESHES = {"tensor=4": ("tensor",), "replica=2 tensor=2": ("replica", "tensor")}
LAYOUTS = {
    "tensor=4": {
        0: ["scalar", "scalar, pending(tensor)"],
        1: ["a", "a/tensor", "a, pending(tensor)"],
        2: ["a b", "a/tensor b", "a b/tensor", "a b, pending(tensor)"],
        3: ["a b c", "a/tensor b c", "a b c/tensor"],
        4: ["a b c d", "a/tensor b c d", "a b/tensor c d"],
    },
    "replica=2 tensor=2": {
        0: ["scalar"],
        1: ["a", "a/replica/tensor"],
        2: ["a b", "a/replica b/tensor", "a/replica/tensor b", "a/replica b, pending(tensor)"],
        3: ["a b c", "a/replica b/tensor c"],
        4: ["a b c d", "a/replica b/tensor c d"],
    },
}
BOTH = """
    add add_broadcast sub mul mul_row mul_number div neg relu gelu tanh exp maximum matmul mm matmul_batch bmm
    linear linear_bias addmm sum sum_dim mean mean_dim softmax log_softmax layer_norm mse_sum unsqueeze
    transpose permute t clone mlp
"""
"""Operators that DTensor computes in every one of these layouts, uneven and empty pieces included.

Not ``cast``: of a pending sum DTensor rounds each share to fp32 and adds then, off by 1e-7 from the whole tensor; ours
is refused, or summed first, and the property test holds it against the whole tensor at 1e-9.
"""


def compare(name: str, layouts: list[str], comm: Comm, mesh: DeviceMesh) -> dict[str, Any]:
    """Largest difference of values and of gradients, and whether the layouts agree."""
    shapes, fn = OPERATORS[name]
    ours = [shard(values(s, k), text, comm) for k, (s, text) in enumerate(zip(shapes, layouts, strict=True))]
    theirs: list[Any] = [to_dtensor(x, mesh).requires_grad_() for x in ours]
    assert all(from_dtensor(t, comm).sharding == x.sharding for t, x in zip(theirs, ours, strict=True))
    try:
        with CommDebugMode() as sent:
            want = fn(*theirs)
        silent = not sent.get_total_counts()
        want = want[0] if isinstance(want, list | tuple) else want
        whole = want.full_tensor()
        whole.sum().backward()
    except (RuntimeError, NotImplementedError, AssertionError, ValueError, IndexError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    legal = True
    try:
        got: Any = fn(*ours)
    except LayoutError:
        legal = False
        with auto_redistribute():
            got = fn(*ours)
    got = got[0] if isinstance(got, list | tuple) else got
    assert isinstance(got, ShardedTensor)
    got.backward(torch.ones(got.shape, dtype=got.dtype))
    gradients = [
        difference(x.grad.full(), t.grad.full_tensor()) for x, t in zip(ours, theirs, strict=True) if t.grad is not None
    ]
    same = None
    if legal and silent and isinstance(want, DTensor):
        try:
            same = from_dtensor(want.detach(), comm).sharding == got.sharding
        except ValueError:  # a placement that is DTensor's own
            same = None
    return {"values": difference(got.full(), whole), "gradients": max(gradients, default=0.0), "layout": same}


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max()) if ours.numel() else 0.0


def rank_main(rank: int, port: int, path: str) -> None:
    """Compares every operator in every row of LAYOUTS; rank 0 saves what was found."""
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for text, names in MESHES.items():
        grid = Mesh.parse(text)
        comm = ProcessComm.from_env(grid)  # DTensor uses the process group that it makes
        device_mesh = init_device_mesh("cpu", tuple(grid.axis(n) for n in names), mesh_dim_names=names)
        for name in BOTH.split():
            shapes, _ = OPERATORS[name]
            choices = [LAYOUTS[text][len(s)] for s in shapes]
            for k in range(min(3, max(map(len, choices)))):
                layouts = [c[(k + j) % len(c)] for j, c in enumerate(choices)]
                found[f"{name} of {' and '.join(map(repr, layouts))} on {text}"] = compare(
                    name, layouts, comm, device_mesh
                )
        dist.barrier()
        comm.close()
    if rank == 0:
        torch.save(found, path)
