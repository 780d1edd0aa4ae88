"""Slurm's variables as torchrun's: ``srun --ntasks 8 plait train`` starts one task for each rank.

SLURM_STEP_NUM_TASKS, SLURM_PROCID   how many, and who am I
SLURM_GTIDS, SLURM_LOCALID           the tasks of this node, and which of them this one is
SLURM_STEP_NODELIST                  its first node has task 0, which hosts the store
SLURM_JOB_ID, SLURM_STEP_ID          the port of the store: steps at the same time have different ones

The variables of ``srun`` itself (SLURM_LAUNCH_NODE_IPADDR) name the host where it was called, which may have no rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NAMES = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_GTIDS",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
FIRST_PORT, PORTS = 12000, 20000
"""Ports below those that Linux gives to connections, and above those of services."""
STEPS = 16
"""Number of steps of a job that have separate ports, before those of the next job begin."""


def from_slurm(given: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables of a task that ``srun`` started as one of several, without those already set.

    Nothing where it is the only one, where RANK is set (torchrun, or the user, numbers the ranks), and where a variable
    is missing that tells it.

    Raises:
        ValueError: the host of rank 0 is not known.
    """
    said = {name: given.get(name, "").strip() for name in NAMES}
    size = said["SLURM_STEP_NUM_TASKS"]
    if size == "1" or not all(said.values()) or given.get("RANK", "").strip():
        return {}
    here = len(said["SLURM_GTIDS"].split(","))
    values = {
        "RANK": said["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": said["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(here),
        "MASTER_ADDR": "127.0.0.1" if size == str(here) else first_host(said["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(port(said["SLURM_JOB_ID"], said["SLURM_STEP_ID"])),
    }
    wanted = {name: value for name, value in values.items() if not given.get(name, "").strip()}
    if size != str(here) and "MASTER_ADDR" in wanted and given.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ValueError("SLURM_DISTRIBUTION is arbitrary: set MASTER_ADDR to the host of task 0, your list's first")
    return wanted


def first_host(nodes: str) -> str:
    """Returns the first host of a list like ``n[001-004,7],m3``."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]


def port(job: str, step: str) -> int:
    """Returns the port of the store, the same for all tasks of a step."""
    number = STEPS * int(job) + int(step) if job.isdecimal() and step.isdecimal() else 0
    return FIRST_PORT + number % PORTS
