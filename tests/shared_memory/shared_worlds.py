"""Worlds over shared memory whose ranks are threads: the same mailboxes, segments and waits as between processes."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from plait.comm import ProcessComm
from plait.comm.process_identity import Peer
from plait.table.mesh import Mesh


def play(mesh: str, body: Callable[[ProcessComm], object], deadline: float = 30.0, hosts: str = "") -> list[object]:
    """The results of ``body(comm)`` by rank, or the errors."""
    shape, store = Mesh.parse(mesh), dist.HashStore()
    names = hosts or "a" * shape.size
    peers = [Peer(rank, names[rank], os.getpid()) for rank in range(shape.size)]

    def rank_main(rank: int) -> object:
        try:
            comm = ProcessComm(shape, rank, store, peers, deadline=deadline, shared_memory=True)
            result = body(comm)
            comm.close()
            return result
        except Exception as error:
            return error

    with ThreadPoolExecutor(shape.size) as pool:
        return list(pool.map(rank_main, range(shape.size)))
