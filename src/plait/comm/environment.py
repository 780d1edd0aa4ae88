"""The facts that a rank knows about its world before it meets the others: torchrun's variables, read once and checked.

RANK, WORLD_SIZE              this rank, and the number of ranks
MASTER_ADDR, MASTER_PORT      where the store listens; rank 0 (or torchrun itself) hosts it
LOCAL_RANK, LOCAL_WORLD_SIZE  the same within this host, if the launcher sets them; several may share a host

Other launchers have other variables, which ``as_torchrun`` translates.

    srun        SLURM_STEP_NUM_TASKS, SLURM_PROCID     a task is a rank, among SLURM_GTIDS on its node
                SLURM_STEP_NODELIST                    its first node has task 0, which hosts the store
                SLURM_JOB_ID, SLURM_STEP_ID            the store's port: steps at the same time have different ones
    SkyPilot    SKYPILOT_NUM_NODES, SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS
    Modal       no variables: its client has MODAL_CLUSTER_SIZE, MODAL_CLUSTER_RANK, MODAL_CLUSTER_IPS

SkyPilot and Modal start a process on each host: it is a rank, or a launcher that sets LOCAL_RANK and LOCAL_WORLD_SIZE.
``SLURM_LAUNCH_NODE_IPADDR`` names the host where ``srun`` was called, which may have no rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch

from plait.messages.escape import one_line, say
from plait.table.mesh import MOST_RANKS, Mesh

STORE = "PLAIT_STORE"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NVIDIA = "/proc/driver/nvidia/gpus"
"""The kernel has this folder if it drives NVIDIA GPUs."""


def variables(given: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The variables that a process needs to be a rank."""
    return ("RANK", "WORLD_SIZE") if given.get(STORE) else VARIABLES


PORT = "29500"
"""torchrun's own default port of a store."""
FIRST_PORT, PORTS = 12000, 20000
"""Ports for Slurm's steps: below those that Linux assigns to connections, and above those of services."""
STEPS = 16
"""Number of steps of a job that have separate ports, before those of the next job begin."""


def _srun(said: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    size, here = said["SLURM_STEP_NUM_TASKS"], len(said["SLURM_GTIDS"].split(","))
    several = size != str(here)
    unordered = given.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    if several and unordered and not given.get("MASTER_ADDR", "").strip():
        raise ValueError("SLURM_DISTRIBUTION is arbitrary: set MASTER_ADDR to the host of task 0, your list's first")
    return {
        "RANK": said["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": said["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": first_host(said["SLURM_STEP_NODELIST"]) if several else "127.0.0.1",
        "MASTER_PORT": str(port(said["SLURM_JOB_ID"], said["SLURM_STEP_ID"])),
    }


def first_host(nodes: str) -> str:
    """Returns the first host of a list like ``n[001-004,7],m3``."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]


def port(job: str, step: str) -> int:
    """Returns the port of the store, the same for all tasks of a step."""
    number = STEPS * int(job) + int(step) if job.isdecimal() and step.isdecimal() else 0
    return FIRST_PORT + number % PORTS


def _hosts(said: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Reads three variables: the number of processes, one a host; this one's number; and their addresses."""
    (size, _), (index, _), (listed, addresses) = said.items()
    hosts, host = _number(said, size, 1, MOST_RANKS), _number(said, index, 0, MOST_RANKS)
    if len(addresses.split()) != hosts:
        raise ValueError(f"{size}={hosts}, and {listed} has {len(addresses.split())} addresses")
    gpus = _number(given, "SKYPILOT_NUM_GPUS_PER_NODE", 0, MOST_RANKS, default=1)
    if gpus > 1 and not given.get("LOCAL_WORLD_SIZE", "").strip():
        raise ValueError(
            f"SKYPILOT_NUM_GPUS_PER_NODE={gpus}, and this process is the only one of its host: start one torchrun on "
            f"each host, as plait submit skypilot does, or set LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    here = _number(given, "LOCAL_WORLD_SIZE", 1, MOST_RANKS, default=1)
    mine = _number(given, "LOCAL_RANK", 0, here - 1, default=0)
    return {
        "RANK": str(host * here + mine),
        "WORLD_SIZE": str(hosts * here),
        "LOCAL_RANK": str(mine),
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": addresses.split()[0],
        "MASTER_PORT": PORT,
    }


class Launcher(NamedTuple):
    """A launcher that numbers ranks in its own way."""

    alone: Mapping[str, str]
    """Values for a process that is the only one: any other value means that it is one of several."""
    more: tuple[str, ...] = ()
    """Other variables that give its rank."""
    read: Callable[[Mapping[str, str], Mapping[str, str]], dict[str, str]] | None = None
    """Converts them to torchrun's variables; None if they are not sufficient."""


LAUNCHERS = {
    "srun": Launcher(
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        ("SLURM_GTIDS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"),
        _srun,
    ),
    "SkyPilot": Launcher({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, ("SKYPILOT_NODE_IPS",), _hosts),
    "Modal": Launcher({"MODAL_CLUSTER_SIZE": "1", "MODAL_CLUSTER_RANK": "0"}, ("MODAL_CLUSTER_IPS",), _hosts),
    "mpirun": Launcher({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}),
}
"""Launchers besides torchrun.  ``SLURM_NTASKS`` is left out: it also differs in a job's script, which runs once."""


def as_torchrun(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the unset torchrun variables of a process that another launcher started as one of several.

    It returns nothing for the only process, if RANK is set (torchrun, or the user, numbers the ranks), or if a variable
    that gives the rank is missing.

    Raises:
        ValueError: the host of rank 0 is not known, variables contradict each other, or one is not a number.
    """
    if given.get("RANK", "").strip():
        return {}
    given = {**_of_modal(), **given}
    for launcher in LAUNCHERS.values():
        said = {name: given.get(name, "").strip() for name in (*launcher.alone, *launcher.more)}
        if launcher.read and all(said.values()) and next(iter(said.values())) != "1":
            return {
                name: value for name, value in launcher.read(said, given).items() if not given.get(name, "").strip()
            }
    return {}


def _of_modal() -> dict[str, str]:
    """Modal's cluster, if this container's program has imported Modal's client."""
    client: Any = sys.modules.get("modal")
    try:
        cluster = client.Cluster.from_context()
    except Exception:  # there is no client, or no cluster
        return {}
    hosts = cluster.container_ips()
    names = ("MODAL_CLUSTER_SIZE", "MODAL_CLUSTER_RANK", "MODAL_CLUSTER_IPS")
    return dict(zip(names, (str(len(hosts)), str(cluster.container_rank()), " ".join(hosts)), strict=True))


def launched(environment: MutableMapping[str, str] = os.environ, ranks: int | None = None, *, fix: str) -> bool:
    """True if a launcher has started this process as one of several ranks.  If it set its own variables, sets
    torchrun's.

    Args:
        ranks: their number, if known; shown to a user who forgot torchrun.
        fix: how to start the ranks, for a user who started this program several times.

    Raises:
        ValueError: half of what a rank must know is set, or this program runs several times, each as a whole run.
    """
    environment.update(as_torchrun(environment))
    if any(environment.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")):
        WorldVariables.read(environment, ranks)
        return True
    for launcher in LAUNCHERS.values():
        missing = [name for name in (*launcher.alone, *launcher.more) if not environment.get(name, "").strip()]
        unknown = f", and {', '.join(missing)} not set" if launcher.read and missing else ""
        for name, alone in launcher.alone.items():
            if (number := environment.get(name, alone)) != alone:
                raise ValueError(
                    f"{name} is {one_line(number, 60)}{unknown}: this program has been started several times, and each "
                    f"would be the whole run: {fix}; for separate runs unset {', '.join(launcher.alone)}"
                )
    return False


def started(environment: Mapping[str, str] = os.environ) -> bool:
    """True if a launcher of any kind has started this process as one of several ranks."""
    return bool({**environment, **as_torchrun(environment)}.get("WORLD_SIZE", "").strip())


def ranks_here(ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """The number of a mesh's ranks on this host: all of them, unless a launcher has started this process as one."""
    if not started(environment):
        return ranks
    return _number({**environment, **as_torchrun(environment)}, "LOCAL_WORLD_SIZE", 1, MOST_RANKS, default=1)


def idle_gpus(ranks: int, environment: Mapping[str, str] = os.environ) -> str:
    """Explains why ranks of this host chose to compute on CPUs though it has GPUs; empty if it has none.

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
    """Returns the device ``auto``: GPUs if each of this host's ``ranks`` can have one.

    Ray and Slurm may show each rank only its own GPU; torchrun and plait show all ranks the same GPUs.
    """
    gpus, by_agent = torch.cuda.device_count(), {"TORCHELASTIC_RUN_ID", "PLAIT_LAUNCHER"} & environment.keys()
    isolated = "CUDA_VISIBLE_DEVICES" in environment and started(environment) and not by_agent
    return "cuda" if gpus and (ranks <= gpus or isolated) else "cpu"


def own_device(device: torch.device | str, environment: Mapping[str, str] = os.environ) -> torch.device:
    """Returns the device of this rank.

    ``auto`` is ``cuda`` if this host has a GPU for each of its ranks, and ``cpu`` otherwise; the first rank of a host
    with idle GPUs reports them.  ``cuda`` without a number is the GPU with this rank's number on its host, or the first
    one if Ray or Slurm's ``--gpus-per-task`` shows each rank only its own (``CUDA_VISIBLE_DEVICES``).

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
            f"{name}={number} wants cuda:{number}, and torch sees {gpus} CUDA devices here: start one rank for each"
        )
    return torch.device("cuda", number if number < gpus else 0)


@dataclass(frozen=True)
class WorldVariables:
    """The rank of a process and its world, read from its environment."""

    rank: int
    size: int
    address: str
    port: int
    agents_store: bool
    """torchrun hosts the store itself; otherwise rank 0 does."""
    file: str
    """The path of the store, if it is a file."""
    restarts: int
    """Restarts by this host's launcher; another host's launcher may count differently."""
    job: str
    """torchrun's name of the run: agents of several may share a store."""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ, ranks: int | None = None) -> Self:
        """Reads the environment; the error of a user who forgot torchrun names the ``ranks``, if they are known.

        Raises:
            ValueError: a variable is missing, is not a number, or has an impossible value.
        """
        if missing := [name for name in variables(environment) if not environment.get(name, "").strip()]:
            start = f"start this program with torchrun --nproc-per-node {ranks or 'N'}"
            unset = "".join(f", or unset {name}" for name in ("RANK", "WORLD_SIZE") if name not in missing)
            raise ValueError(f"{', '.join(missing)} not set: {start}{unset}")
        size = _number(environment, "WORLD_SIZE", 1, MOST_RANKS)
        rank = _number(environment, "RANK", 0, size - 1, f"ranks of WORLD_SIZE={size} are 0 to {size - 1}")
        file = environment.get(STORE, "")
        port = 0 if file else _number(environment, "MASTER_PORT", 1, 65535)
        address = "" if file else environment["MASTER_ADDR"].strip()
        restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT", 0, 2**31, default=0)
        _number(environment, "LOCAL_RANK", 0, MOST_RANKS, default=0)
        _number(environment, "LOCAL_WORLD_SIZE", 1, MOST_RANKS, default=1)
        agents_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        job = environment.get("TORCHELASTIC_RUN_ID", "")
        return cls(rank, size, address, port, agents_store, file, restarts, job)

    def check(self, mesh: Mesh) -> None:
        """Refuses a number of processes that differs from the mesh's ranks."""
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
