"""Four ranks convert to torch's DTensor and back."""

from __future__ import annotations

import os

import torch
from tensor_cases import shard, values
from torch.distributed.device_mesh import init_device_mesh

from plait.comm.process import ProcessComm
from plait.sharded import from_dtensor, to_dtensor
from plait.table.mesh import Mesh

RANKS = 4
LAYOUTS = {
    "tensor=4": ["a b", "a/tensor b", "a b/tensor", "a b, pending(tensor)"],
    "replica=2 tensor=2": ["a/replica b/tensor", "a/replica/tensor b", "a/replica b, pending(tensor)"],
}


def rank_main(rank: int, port: int) -> None:
    """Compares values, pieces and layouts on both meshes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    for text, layouts in LAYOUTS.items():
        mesh = Mesh.parse(text)
        comm = ProcessComm.from_env(mesh)  # DTensor uses the process group that it makes
        names = tuple(word.partition("=")[0] for word in text.split())
        device_mesh = init_device_mesh("cpu", tuple(map(mesh.axis, names)), mesh_dim_names=names)
        for layout in layouts:
            for shape in ((5, 6), (4, 8)):
                x = shard(values(shape), layout, comm)
                theirs = to_dtensor(x, device_mesh)
                back = from_dtensor(theirs, comm)
                torch.testing.assert_close(theirs.full_tensor(), x.full())
                assert back.sharding == x.sharding and back.local.data_ptr() == x.local.data_ptr(), (text, layout)
        comm.barrier(("pipe", "replica", "shard", "tensor"))
        comm.close()
