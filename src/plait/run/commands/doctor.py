"""``plait doctor``: describes the hardware and warns of likely trouble.

Facts come in sections: a table and a JSON object each.  Missing hardware is reported, and is never an error.
Anything that is likely to hurt a run becomes a *warning* that names the fix.
"""

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist
from rich.text import Text

from plait import __version__
from plait.checkpoint.files.writing import check_file, write_json, write_text
from plait.comm.base import Comm
from plait.messages.escape import say
from plait.messages.wording import human
from plait.run.config.machine import MachineConfig, check_machine, resolve_world
from plait.run.launch.local import launch
from plait.run.measure import machine
from plait.run.measure.calibrate import calibrate, to_toml
from plait.run.report.screen import empty_table, screen

Facts = dict[str, Any]


@dataclass(frozen=True)
class DoctorConfig(MachineConfig):
    """Describe this machine: processor, memory, GPUs and links, network, limits, measured speeds."""

    json: str | None = None
    """Write the facts here as JSON; "-" is the standard output."""
    measure: bool = True
    """Measure memory bandwidth and matrix products (about 2 seconds)."""
    calibrate: str | None = None
    """Measure this machine with the ranks of --mesh and --world instead, and write it here as plait plan --cluster
    reads it."""
    mesh: str = "shard=2"
    """With calibrate: the ranks that measure together, as in a run on this machine."""


def run(config: DoctorConfig, argv: Sequence[str] = ()) -> int:
    if config.calibrate is not None:
        check_file("calibrate", config.calibrate)
        if config.parsed_mesh.hosts > 1:
            raise ValueError(f"mesh '{config.mesh}': calibrate measures one host; leave hosts out")
        check_machine(config)
        return launch(config, partial(run_calibrate, config), ["-m", "plait", *argv])
    facts = examine(config.measure)
    console = screen(stderr=config.json == "-")
    for section, values in facts.items():
        if section == "warnings":
            continue
        table = empty_table(section, "fact", "value", left=("fact", "value"), show_header=False, min_width=60)
        for name, value in values.items():
            heading = re.sub("_(bytes|bytes_per_second|flops)$", "", name).replace("_", " ")
            table.add_row(Text(heading, "bold"), _words(name, value))
        console.print(table)
    for warning in facts["warnings"]:
        console.print(Text.assemble(("warning: ", "bold yellow"), warning), soft_wrap=True)
    write_json(config.json, facts)
    return 0


def run_calibrate(config: DoctorConfig, comm: Comm) -> int:
    """Measures with all ranks and writes the file on one."""
    on_gpu = comm.device.type == "cuda"
    if on_gpu:
        found = torch.cuda.get_device_properties(comm.device)
        size, units = float(found.total_memory), found.multi_processor_count
    else:
        size, units = memory()["total_bytes"] / comm.mesh.size, 1
    cluster = calibrate(replace(config, world=resolve_world(config)), comm, size, units)
    if not comm.rank:
        text = f"# measured by plait doctor --calibrate: {comm.mesh.size} ranks, torch {torch.__version__}\n"
        write_text(config.calibrate or "", text + tomli_w.dumps(to_toml(cluster)))
        write_json(config.json, to_toml(cluster))
        stream = sys.stderr if config.json == "-" else sys.stdout
        say(f"written: {config.calibrate}; plait plan --cluster {config.calibrate} reads it\n", stream)
    return 0


def examine(measure: bool = True) -> Facts:
    """Collects all sections, and the warnings that follow from them."""
    facts: Facts = {"processor": processor(), "memory": memory(), "software": software(), "gpus": gpus()}
    facts |= {"network": network(), "limits": limits(), **({"measured": measured()} if measure else {})}
    return facts | {"warnings": warnings(facts)}


def processor() -> Facts:
    """The processor's model, its cores, and the number of cores that this process may use."""
    lines = _read("/proc/cpuinfo").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    return {
        "model": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cgroup_cores": int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0] != "max" else None,
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
    }


def memory() -> Facts:
    """Bytes of memory, of the cgroup's limit, and of shared memory."""
    rows = (line.split() for line in _read("/proc/meminfo").splitlines())
    table = {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, *_ in rows}
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return {
        "total_bytes": table.get("MemTotal"),
        "available_bytes": table.get("MemAvailable"),
        "swap_bytes": table.get("SwapTotal"),
        "cgroup_limit_bytes": int(limit) if limit.isdigit() else None,
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    }


def software() -> Facts:
    """Versions, and the backends that torch was built with."""
    there = dist.is_available()
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "plait": __version__,
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available(),
    }


def gpus() -> Facts:
    devices = []
    for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        facts = {"name": one.name, "bytes": one.total_memory, "capability": f"{one.major}.{one.minor}"}
        devices.append(facts | {"multiprocessors": one.multi_processor_count})
    return {"devices": devices}


def network() -> Facts:
    """Network interfaces, and the address to which the hostname resolves."""
    host = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)})
    except OSError:
        addresses = []
    return {
        "hostname": host,
        "hostname_resolves_to": addresses,
        "interfaces": [name for _, name in socket.if_nameindex()],
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def limits() -> Facts:
    """Limits of this process, as in the shell's ``ulimit``.  None means unlimited."""
    which = {
        "open_files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
        "stack_bytes": resource.RLIMIT_STACK,
    }
    soft = {name: resource.getrlimit(number)[0] for name, number in which.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def measured() -> Facts:
    """Speeds of the processor and, if there is one, of the first GPU."""
    facts: Facts = {
        "threads": torch.get_num_threads(),
        "memory_copy_bytes_per_second": machine.copy_rate(),
        "matrix_product_flops": machine.product_rate(),
    }
    if torch.cuda.is_available():
        facts["gpu_memory_copy_bytes_per_second"] = machine.copy_rate(0.3, 1 << 30, "cuda")
        facts["gpu_matrix_product_flops"] = machine.product_rate(0.3, 8192, "cuda")
    return facts


def warnings(facts: Facts) -> list[str]:
    """Lists the facts that are likely to hurt a run on this machine, each with its fix."""
    host, addresses = facts["network"]["hostname"], facts["network"]["hostname_resolves_to"]
    shared, files = facts["memory"]["shared_memory_bytes"] or 1 << 30, facts["limits"]["open_files"] or 1024
    cores = facts["processor"]["usable_cores"]
    quota = facts["processor"]["cgroup_cores"] or cores
    loopback = bool(addresses) and all(a.startswith("127.") or a == "::1" for a in addresses)
    rows = (
        (
            not addresses,
            f"the hostname {host!r} resolves to nothing, and gloo asks for it: add it to /etc/hosts, or set "
            f"GLOO_SOCKET_IFNAME to one of {', '.join(facts['network']['interfaces'])} (plait's own launches do)",
        ),
        (
            loopback,
            f"the hostname {host!r} resolves to loopback ({', '.join(addresses)}): fine on one host; ranks on other "
            f"hosts cannot reach it, set GLOO_SOCKET_IFNAME there",
        ),
        (shared < 1 << 30, f"/dev/shm holds {shared >> 20} MB: give containers --shm-size=1g or more"),
        (files < 1024, f"only {files} open files: raise it with ulimit -n 4096"),
        (quota < cores, f"the cgroup grants {quota:g} of {cores} visible cores: use at most {quota:g} threads"),
        (not facts["software"]["gloo"], "this torch has no gloo: process worlds on CPU need it; --world thread works"),
    )
    return [text for hurts, text in rows if hurts]


def _words(name: str, value: Any) -> str:
    """Formats a fact for a reader: bytes and rates with their units, lists with commas."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_per_second"):
        return f"{value / 1e9:.1f} GB/s"
    if name.endswith("_flops"):
        return f"{value / 1e9:.0f} GFLOP/s"
    if name.endswith("bytes"):
        return human(value)
    if name == "devices":
        rows = [f"{i}: {d['name']}, {human(d['bytes'])}" for i, d in enumerate(value)]
        return "\n".join(rows) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return str(value)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
