"""How the ranks of a process world find each other: torchrun's variables and a store.

    RANK, WORLD_SIZE           who am I, of how many
    PLAIT_STORE                the file that is the store, where plait has started the ranks of one host; or
    MASTER_ADDR, MASTER_PORT   where the store listens; rank 0 (or torchrun itself) hosts it

Whatever is wrong here is reported before the first operation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from plait.core.mesh import Mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch's stubs do not export them
_file_store: Any = dist.FileStore  # type: ignore[attr-defined]
_prefix_store: Any = dist.PrefixStore  # type: ignore[attr-defined]

STORE = "PLAIT_STORE"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def variables(given: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What a process must have to be a rank."""
    return ("RANK", "WORLD_SIZE") if given.get(STORE) else VARIABLES


def rank_from_env(mesh: Mesh) -> int:
    """This process's rank; a ValueError if torchrun did not start it, or too few or too many of them."""
    missing = [v for v in variables() if not os.environ.get(v)]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start this program with torchrun --nproc-per-node {mesh.size}")
    started = int(os.environ["WORLD_SIZE"])
    if started != mesh.size:
        raise ValueError(
            f"the mesh '{mesh}' has {mesh.size} ranks, but {started} processes were started: start "
            f"{mesh.size} (torchrun --nproc-per-node {mesh.size}), or give a mesh of {started}, as in shard={started}"
        )
    return int(os.environ["RANK"])


def init_process(rank: int, size: int, backend: str, deadline: float) -> Store:
    """Meets the other ranks and makes torch's default process group; returns the store.

    Raises:
        ConnectionError: the port is taken, or nobody answers there.
        TimeoutError: some ranks did not come within the deadline; the message names them.
    """
    patience = timedelta(seconds=deadline)
    where = os.environ.get(STORE) or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store = file_store(where) if os.environ.get(STORE) else _network_store(rank, size, patience)
        # A program may close one world and join another: every world has names of its own in the store.
        worlds_before = (store.add("plait/joined", 1) - 1) // size
    except RuntimeError as error:
        text = str(error)
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            fix = "Set MASTER_PORT (torchrun --master-port) to a free one, or end the program that holds it"
            raise ConnectionError(f"rank {rank} cannot listen on {where}: the port is in use. {fix}") from error
        ask = f"is rank 0 running, and is this its address? ({text.splitlines()[0]})"
        raise ConnectionError(f"rank {rank} found no store at {where} within {deadline:g} s: {ask}") from error
    here: Store = _prefix_store(f"plait/world {worlds_before}", store)
    try:
        here.set(f"here/{rank}", "yes")
        dist.init_process_group(backend, store=here, rank=rank, world_size=size, timeout=patience)
    except RuntimeError as error:
        absent = _absent(here, size)
        why = f"ranks {', '.join(map(str, absent))} did not come" if absent else str(error).splitlines()[0]
        raise TimeoutError(f"rank {rank} waited {deadline:g} s at {where} for {size} ranks: {why}") from error
    return here


def file_store(path: str) -> Store:
    """A store in a file, for the processes of one host that may open it; who made its folder removes it."""
    store: Store = _file_store(path, -1)
    return store


def _network_store(rank: int, size: int, patience: timedelta) -> Store:
    """The store that torchrun hosts itself; started by hand, rank 0 does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store: Store = _tcp_store(host, port, size, hosts, patience, wait_for_workers=False, multi_tenant=hosts)
    return store


def _absent(store: Store, size: int) -> list[int]:
    try:
        return [r for r in range(size) if not store.check([f"here/{r}"])]
    except RuntimeError:  # the store is gone with rank 0
        return []
