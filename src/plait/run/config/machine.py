"""Settings of the ranks: their number, their kind and their device, checked against this machine."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from plait.comm.environment import chosen_device, idle_gpus, ranks_here, started
from plait.table.mesh import Mesh

World = Literal["auto", "process", "shared_memory", "thread"]
Device = Literal["auto", "cpu", "cuda"]


MOST_ON_ONE_HOST = 1024
"""Largest number of ranks on one host, as threads or processes."""


@dataclass(frozen=True)
class MachineConfig:
    """The settings of every command that starts ranks."""

    mesh: str = "shard=4"
    """Ranks on named axes, as in "replica=2 shard=2"; their product is the number of ranks. "hosts=2" after them gives
    the number of hosts."""
    world: World = "auto"
    """Kind of a rank: a process, a process that shares memory with the others of its host, or a thread of this one;
    auto is shared_memory for CPUs of this machine, if the system has it, and process otherwise."""
    device: Device = "auto"
    """Device of the ranks; auto is cuda if a host has a GPU for each of its ranks, and cpu otherwise."""
    threads: int = 1
    """Compute threads of each rank."""
    deadline: float = 60.0
    """Seconds after which a rank that waits for another gives up."""
    check_collectives: bool = False
    """Compare every collective across its ranks before it runs: its kind, its size, the calling line."""

    @cached_property
    def parsed_mesh(self) -> Mesh:
        return Mesh.parse(self.mesh)


def check_machine(config: MachineConfig) -> None:
    """Refuses devices that this machine does not have, and more ranks than it can start."""
    ranks = config.parsed_mesh.size
    here, gpus = ranks_here(ranks), torch.cuda.device_count()
    if ranks > MOST_ON_ONE_HOST and not started():
        raise ValueError(
            f"{ranks:,} ranks on one host: give a mesh of at most {MOST_ON_ONE_HOST:,}, or start it with torchrun"
        )
    if config.world == "shared_memory" and not _can_share():
        raise ValueError(
            "world shared_memory needs Linux 5.3, and memfd_create and pidfd_open to be allowed: use --world process"
        )
    if config.world == "shared_memory" and config.device == "cuda":
        raise ValueError("world shared_memory moves tensors of CPUs: use --world process, or --device cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no CUDA device here; use --device cpu, or see plait doctor")
    isolated = "CUDA_VISIBLE_DEVICES" in os.environ and started() and not _ours()  # each rank may see its own
    if config.device == "cuda" and resolve_world(config) == "process" and here > gpus and not isolated:
        raise ValueError(
            f"{here} ranks on {gpus} CUDA devices of this host: NCCL needs one each; start {gpus} or fewer on a host, "
            f"or use --world thread or --device cpu"
        )


def resolve_world(config: MachineConfig) -> Literal["process", "shared_memory", "thread"]:
    """Resolves ``auto`` for this machine: shared memory for ranks on CPUs that plait starts itself, since ranks that
    another launcher starts may be on several hosts."""
    if config.world != "auto":
        return config.world
    return "shared_memory" if _ours() and resolve_device(config) == "cpu" and _can_share() else "process"


def _ours() -> bool:
    """True if plait starts the ranks, or has started this one."""
    return "PLAIT_LAUNCHER" in os.environ or not started()


def _can_share() -> bool:
    """True if this system supports shared memory: it has Linux 5.3, and nothing forbids the calls."""
    try:
        for descriptor in (os.memfd_create("plait"), os.pidfd_open(os.getpid())):
            os.close(descriptor)
    except (AttributeError, OSError):
        return False
    return True


def resolve_device(config: MachineConfig) -> Literal["cpu", "cuda"]:
    """Resolves ``auto`` for this machine.  Threads may share a GPU."""
    if config.device != "auto":
        return config.device
    if config.world == "shared_memory":
        return "cpu"
    return chosen_device(1 if config.world == "thread" else ranks_here(config.parsed_mesh.size))


def idle_devices(config: MachineConfig) -> str:
    """Explains why ranks compute on CPUs of a host with GPUs if the user did not choose that.  Otherwise empty."""
    if config.device != "auto" or resolve_device(config) == "cuda":
        return ""
    return idle_gpus(ranks_here(config.parsed_mesh.size))
