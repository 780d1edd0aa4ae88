"""torchrun's variables, read once and checked: the facts that a rank knows of its world before it meets the others.

RANK, WORLD_SIZE              who am I, of how many
MASTER_ADDR, MASTER_PORT      where the store listens; rank 0 (or torchrun itself) hosts it
LOCAL_RANK, LOCAL_WORLD_SIZE  the same within this host, where the launcher says so; several may share a host

A task of ``srun`` gets them here, from Slurm's own (``slurm.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, Self

import torch

from plait.comm.slurm import from_slurm
from plait.messages.escape import one_line, say
from plait.table.mesh import MOST_RANKS, Mesh

STORE = "PLAIT_STORE"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NVIDIA = "/proc/driver/nvidia/gpus"
"""The kernel has this folder where it drives NVIDIA GPUs."""
LOCAL_NAMES = ("localhost", "::1", "0.0.0.0", "::")


def variables(given: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The variables that a process needs to be a rank."""
    return ("RANK", "WORLD_SIZE") if given.get(STORE) else VARIABLES


SEVERAL = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}
"""Variables of Slurm and of mpirun whose values differ from these only where one command was started several times;
``SLURM_NTASKS`` also differs in the script of a job, which runs once."""


def launched(environment: MutableMapping[str, str] = os.environ, ranks: int | None = None, *, fix: str) -> bool:
    """True if a launcher has started this process as one of several ranks, and said so in torchrun's variables, or in
    Slurm's: then torchrun's are set.

    Args:
        ranks: their number, if known; shown to a user who forgot torchrun.
        fix: how to start the ranks, for a user who started this program several times.

    Raises:
        ValueError: half of what a rank must know is set, or this program runs several times, each as a whole run.
    """
    environment.update(from_slurm(environment))
    if any(environment.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")):
        WorldVariables.read(environment, ranks)
        return True
    for name, alone in SEVERAL.items():
        if (number := environment.get(name, alone)) != alone:
            raise ValueError(
                f"{name} is {one_line(number, 60)}: this program has been started several times, and each would be "
                f"the whole run: {fix}; for runs of their own unset {', '.join(SEVERAL)}"
            )
    return False


def started(environment: Mapping[str, str] = os.environ) -> bool:
    """True if a launcher, Slurm's ``srun`` too, has started this process as one of several ranks."""
    return bool({**environment, **from_slurm(environment)}.get("WORLD_SIZE", "").strip())


def ranks_here(ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number of a mesh's ranks on this host: all, unless a launcher has started this process as one of them."""
    if not started(environment):
        return ranks
    return _number({**environment, **from_slurm(environment)}, "LOCAL_WORLD_SIZE", 1, MOST_RANKS, default=1)


def idle_gpus(ranks: int, environment: Mapping[str, str] = os.environ) -> str:
    """Explains why ranks of this host compute on CPUs by their own choice though it has GPUs; empty where it has none.

    Args:
        ranks: the number of ranks on this host.
    """
    gpus = torch.cuda.device_count()
    if gpus:
        return (
            f"computing on CPUs, and {gpus} GPUs of this host are idle: {ranks} ranks need one each. Start {gpus} "
            f"ranks on a host, or choose the device cpu"
        )
    if os.path.exists(NVIDIA) and "CUDA_VISIBLE_DEVICES" not in environment:
        return (
            f"computing on CPUs: this host has NVIDIA GPUs, but torch {torch.__version__} sees none. See plait doctor, "
            f"or choose the device cpu"
        )
    return ""


def chosen_device(ranks: int, environment: Mapping[str, str] = os.environ) -> Literal["cpu", "cuda"]:
    """Returns the device ``auto``: GPUs, where each of the ``ranks`` of this host can have one.

    Ray and Slurm may show each rank its own; torchrun and plait show all ranks the same.
    """
    gpus, by_agent = torch.cuda.device_count(), {"TORCHELASTIC_RUN_ID", "PLAIT_LAUNCHER"} & environment.keys()
    isolated = "CUDA_VISIBLE_DEVICES" in environment and started(environment) and not by_agent
    return "cuda" if gpus and (ranks <= gpus or isolated) else "cpu"


def own_device(device: torch.device | str, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Returns the device of this rank.

    ``auto`` is ``cuda`` where this host has a GPU for each of its ranks, and ``cpu`` elsewhere; the first rank of a
    host whose GPUs are idle says so.  ``cuda`` without a number is the GPU of this rank's number on its host, or the
    first of those that it sees: Ray, and Slurm's ``--gpus-per-task``, show each rank its own
    (``CUDA_VISIBLE_DEVICES``).

    Raises:
        ValueError: there is no such GPU.
    """
    if device == "auto":
        here = ranks_here(1, environment)
        device = chosen_device(here, environment)
        if device == "cpu" and environment.get("LOCAL_RANK", "0").strip() in ("", "0") and (why := idle_gpus(here)):
            say(f"plait: {why}\n")
    device = torch.device(device)
    if device.type != "cuda":
        return device
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError(f"device {device}: torch sees no CUDA device here; see plait doctor, or use device cpu")
    index: int | None = device.index
    if index is not None:
        if index >= gpus:
            raise ValueError(f"device {device}: torch sees {gpus} CUDA devices here, counted from 0")
        return device
    name = "LOCAL_RANK" if environment.get("LOCAL_RANK", "").strip() else "RANK"
    number = _number(environment, name, 0, MOST_RANKS, default=0)
    if number >= gpus and "CUDA_VISIBLE_DEVICES" not in environment:
        raise ValueError(
            f"cuda:{number} is wanted by the rank with number {number} ({name}), and torch sees {gpus} CUDA devices "
            f"here: start one rank for each"
        )
    return torch.device("cuda", number if number < gpus else 0)


@dataclass(frozen=True)
class WorldVariables:
    """The rank of a process and its world, as its environment gives them."""

    rank: int
    size: int
    address: str
    port: int
    agents_store: bool
    """torchrun hosts the store itself; started by hand, rank 0 does."""
    file: str
    """The store, where it is a file."""
    restarts: int
    """Restarts by this host's launcher; another host's launcher may count differently."""
    job: str
    """torchrun's name of the run: agents of several may share a store."""
    hint: str
    """A hint for a rank that does not find all others."""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ, ranks: int | None = None) -> Self:
        """Reads the environment; the error of a user who forgot torchrun names the ``ranks``, if they are known.

        Raises:
            ValueError: a variable is missing, is no number, or has an impossible value.
        """
        if missing := [name for name in variables(environment) if not environment.get(name, "").strip()]:
            nproc = "N" if ranks is None else ranks
            raise ValueError(f"{', '.join(missing)} not set: start this program with torchrun --nproc-per-node {nproc}")
        size = _number(environment, "WORLD_SIZE", 1, MOST_RANKS)
        rank = _number(environment, "RANK", 0, size - 1, f"ranks of WORLD_SIZE={size} are 0 to {size - 1}")
        file = environment.get(STORE, "")
        port = 0 if file else _number(environment, "MASTER_PORT", 1, 65535)
        address = "" if file else environment["MASTER_ADDR"].strip()
        restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0, 2**31, default=0)
        _number(environment, "LOCAL_RANK", 0, MOST_RANKS, default=0)
        all_here = _number(environment, "LOCAL_WORLD_SIZE", 1, MOST_RANKS, default=1) >= size
        told = f"MASTER_ADDR={one_line(address, 100)} means each host itself: with ranks on several hosts, set it to"
        local = address in LOCAL_NAMES or address.startswith("127.")
        hint = f". {told} the name or address of the host of rank 0" if local and not all_here else ""
        agents_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        job = environment.get("TORCHELASTIC_RUN_ID", "")
        return cls(rank, size, address, port, agents_store, file, restarts, job, hint)

    def check(self, mesh: Mesh) -> None:
        """Refuses a number of processes other than that of the mesh's ranks."""
        if self.size != mesh.size:
            raise ValueError(
                f"the mesh '{mesh}' has {mesh.size} ranks, but {self.size} processes were started: start {mesh.size} "
                f"(torchrun --nproc-per-node {mesh.size}), or give a mesh of {self.size}, as in shard={self.size}"
            )

    @property
    def where(self) -> str:
        """``host:port`` of the store, or its file."""
        return one_line(self.file or f"{self.address}:{self.port}", 200)


def _number(
    environment: Mapping[str, str], name: str, low: int, high: int, why: str = "", default: int | None = None
) -> int:
    digits = environment.get(name, "").strip()
    if not digits and default is not None:
        return default
    if not (digits.removeprefix("-").isdecimal() and digits.isascii() and len(digits) < 20):
        raise ValueError(f"{name}='{one_line(digits, 60)}' is no whole number: torchrun sets it, or set it yourself")
    if not low <= int(digits) <= high:
        raise ValueError(f"{name}={digits} cannot be: {why or f'it is a number from {low} to {high}'}")
    return int(digits)
