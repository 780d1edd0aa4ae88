"""To and from torch's DTensor: the same local piece under the other's words.

    ours                           DTensor, on a device mesh with dims named replica, shard, tensor ...
    "out/tensor in"                [Replicate(), Shard(0)]         per dim of the device mesh
    "out in, pending(replica)"     [Partial("sum"), Replicate()]
    "out/replica/tensor in"        [Shard(0), Shard(0)]            nested in the order of the device mesh

Nothing is sent.  The piece is shared, not copied, and is outside autograd: the two disagree about where the
gradient of a replicated value lives (ours is a share of a sum, DTensor's is replicated).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plait.comm import Comm
from plait.sharded.layout import Layout
from plait.sharded.sharded_tensor import ShardedTensor
from plait.table.mesh import AXES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def to_dtensor(x: ShardedTensor, device_mesh: DeviceMesh) -> DTensor:
    """The DTensor of the same piece, on a mesh whose dims are axes of ours: same names, sizes and order of ranks.

    Raises:
        ValueError: meshes that differ, or a dim that is nested in another order than the device mesh has.
    """
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    names = _names(device_mesh, x.comm)
    placements: list[Placement] = [Replicate()] * len(names)
    for d, axes in enumerate(x.sharding.dims):
        if list(axes) != [n for n in names if n in axes]:
            raise ValueError(
                f"dim {d} is cut over {'/'.join(axes)}; DTensor nests in the order of its mesh, {', '.join(names)}: "
                f"redistribute to a layout in that order"
            )
        for axis in axes:
            placements[names.index(axis)] = Shard(d)
    for axis in x.sharding.pending:
        placements[names.index(axis)] = Partial("sum")
    stride = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(x.local.detach(), device_mesh, placements, run_check=False, shape=x.shape, stride=stride)


def from_dtensor(x: DTensor, comm: Comm) -> ShardedTensor:
    """The ShardedTensor of the same piece.

    Raises:
        ValueError: another mesh, a partial mean, or a strided shard.
    """
    from torch.distributed.tensor import Partial, Shard

    names = _names(x.device_mesh, comm)
    dims: list[tuple[str, ...]] = [()] * x.dim()
    pending = []
    for name, placement in zip(names, x.placements, strict=True):
        if type(placement) is Shard:
            dims[placement.dim % x.dim()] += (name,)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            pending.append(name)
        elif not placement.is_replicate():
            raise ValueError(f"{placement} over {name} has no counterpart here: redistribute the DTensor first")
    return ShardedTensor(x.to_local().detach(), Layout(tuple(dims), tuple(pending)), comm, tuple(x.shape))


def _names(device_mesh: DeviceMesh, comm: Comm) -> tuple[str, ...]:
    names = tuple(device_mesh.mesh_dim_names or ())
    ours = [a for a in AXES if comm.mesh.axis(a) > 1]
    same = len(names) == device_mesh.ndim and set(ours) <= set(names) <= set(AXES)
    if not same or any(device_mesh.size(k) != comm.mesh.axis(n) for k, n in enumerate(names)):
        sizes = " ".join(f"{n}={device_mesh.size(k)}" for k, n in enumerate(names))
        raise ValueError(f"the device mesh '{sizes or device_mesh}' is not the mesh '{comm.mesh}': name its dims so")
    there, here = device_mesh.get_coordinate(), comm.mesh.coordinates(comm.rank)
    if there is None or list(there) != [here[n] for n in names]:
        raise ValueError(f"rank {comm.rank} is at {there} in the device mesh, but at {here} in the mesh of its world")
    return names
