"""Writes a ``LaunchSpec`` in the language of a scheduler.  Pure functions from a spec to text.

    slurm         an sbatch script whose srun starts each rank
    kubernetes    a TrainJob of Kubeflow Trainer, runtime torch-distributed, in JSON
    skypilot      a task, in JSON
    modal         a program of Modal, with a cluster if there are several hosts
    ray           a program for ``ray job submit``, with a placement group
    torchx        a component

All but Slurm's start one torchrun on each host.  Each argument is quoted once, by the rules of its reader.
"""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plait.run.launch.spec import LaunchSpec

LAUNCHER = "plait_launch.py"
PORT = 29500
"""The port of the store on the first host."""


@dataclass(frozen=True)
class Target:
    """A scheduler."""

    render: Callable[[LaunchSpec], str]
    file: str
    """The name of the text's file."""
    client: tuple[str, ...]
    """The client's words before the user's own options."""
    last: tuple[str, ...] = ("{file}",)
    """The client's words after them."""


def torchrun(spec: LaunchSpec) -> list[str]:
    """The words after ``python`` that start a host's ranks; the first host's address and the command follow."""
    return ["-m", "torch.distributed.run", "--nnodes", str(spec.hosts), "--nproc-per-node", str(spec.ranks_per_host)]


def yaml(value: Any) -> str:
    """Writes mappings, lists, numbers and texts as JSON, which YAML includes; unprintable characters are escaped, since
    YAML takes U+2028 for the end of a line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(c if c == "\n" or c.isprintable() or ord(c) > 0xFFFF else f"\\u{ord(c):04x}" for c in text) + "\n"


def _given(asked: dict[str, Any]) -> dict[str, Any]:
    """Leaves out values that are None or empty."""
    return {name: value for name, value in asked.items() if value}


def slurm(spec: LaunchSpec) -> str:
    """An sbatch script: ``srun`` starts each rank, and plait reads Slurm's variables."""
    asked = {
        "job-name": spec.name,
        "nodes": spec.hosts,
        "ntasks-per-node": spec.ranks_per_host,
        "cpus-per-task": spec.cpus,
        "time": spec.minutes,
        "mem": spec.memory and f"{spec.memory}G",
        "gpus-per-node": spec.gpu and f"{spec.gpu}:{spec.ranks_per_host}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in _given(asked).items()]
    if spec.requeue:
        lines += ["#SBATCH --signal=USR1@120", "#SBATCH --requeue", "#SBATCH --open-mode=append"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in spec.variables.items()]
    lines += [f"srun {shlex.join(['python', *spec.command])}"]
    if spec.requeue:
        lines += ["code=$?", '[ "$code" -eq 138 ] && scontrol requeue "$SLURM_JOB_ID"', 'exit "$code"']
    return "\n".join(["#!/bin/bash", *lines, ""])


def kubernetes(spec: LaunchSpec) -> str:
    """A TrainJob.  The runtime gives torchrun the hosts by its own variables (``PET_NNODES`` and others)."""
    gpus = spec.gpu and spec.ranks_per_host
    memory = spec.memory and f"{spec.memory}Gi"
    asked = _given({"cpu": spec.cpus * spec.ranks_per_host, "memory": memory, "nvidia.com/gpu": gpus})
    words = ["-m", "torch.distributed.run", *spec.command]
    trainer = {
        "image": spec.image,
        "numNodes": spec.hosts,
        "numProcPerNode": spec.ranks_per_host,
        "command": ["python"],
        "args": [word.replace("$", "$$") for word in words],  # Kubernetes expands $(NAME), and takes $$ for $
        "resourcesPerNode": {"requests": asked, "limits": asked},
        "env": [{"name": name, "value": value.replace("$", "$$")} for name, value in spec.variables.items()],
    }
    body = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": _given(trainer),
        "activeDeadlineSeconds": spec.minutes and 60 * spec.minutes,
    }
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return yaml({**head, "metadata": {"generateName": f"{spec.name}-"}, "spec": _given(body)})


def skypilot(spec: LaunchSpec) -> str:
    files = {f"~/plait-job/{one}": os.path.abspath(one) for one in spec.files}
    if any("$" in word for word in files.values()):
        raise ValueError("SkyPilot expands $ in the names of files: rename those files")
    resources = {
        "cpus": f"{spec.cpus * spec.ranks_per_host}+",
        "memory": spec.memory and f"{spec.memory}+",
        "accelerators": spec.gpu and f"{spec.gpu}:{spec.ranks_per_host}",
        "image_id": spec.image and f"docker:{spec.image}",
    }
    place = '--node-rank "$SKYPILOT_NODE_RANK" --master-addr "$(head -n1 <<< "$SKYPILOT_NODE_IPS")"'
    start = f"exec python {shlex.join(torchrun(spec))} {place} --master-port {PORT} {shlex.join(spec.command)}"
    task = {
        "name": spec.name,
        "num_nodes": spec.hosts,
        "resources": _given(resources),
        "envs": spec.variables,
        "file_mounts": files,
        "run": f"mkdir -p ~/plait-job && cd ~/plait-job\n{start}\n",
    }
    return yaml(_given(task))


def modal(spec: LaunchSpec) -> str:
    if spec.hosts > 1 and not spec.gpu:
        raise ValueError(f"Modal has no clusters without GPUs, and --hosts is {spec.hosts}: give --gpu, or one host")
    if not spec.image:
        raise ValueError("Modal starts from an image with torch and plait: give --image")
    image = f"modal.Image.from_registry({spec.image!r})"
    image += f".env({spec.variables!r})" if spec.environment else ""
    for one in spec.files:
        kind = "dir" if os.path.isdir(one) else "file"
        image += f".add_local_{kind}({os.path.abspath(one)!r}, {f'/root/{one}'!r})"
    asked = {
        "cpu": float(spec.cpus * spec.ranks_per_host),
        "memory": spec.memory and 1024 * spec.memory,
        "gpu": spec.gpu and f"{spec.gpu}:{spec.ranks_per_host}",
        "timeout": spec.minutes and 60 * spec.minutes,
    }
    wanted = ", ".join(f"{name}={value!r}" for name, value in _given(asked).items())
    cluster, where = "", "    rank, hosts = 0, ['127.0.0.1']\n"
    if spec.hosts > 1:
        cluster, where = f"@modal.clustered(size={spec.hosts})\n", "    cluster = modal.Cluster.from_context()\n"
        where += "    rank, hosts = cluster.container_rank(), cluster.container_ips()\n"
    return (
        f"import subprocess\nimport sys\n\nimport modal\n\n{_constants(spec)}\n"
        f"app = modal.App({spec.name!r})\nimage = {image}\n\n\n"
        f"@app.function(image=image, {wanted})\n"
        f"{cluster}def job():\n{where}"
        f"    place = ['--node-rank', str(rank), '--master-addr', hosts[0], '--master-port', '{PORT}']\n"
        f"    subprocess.run([sys.executable, *TORCHRUN, *place, *COMMAND], check=True)\n"
    )


def ray(spec: LaunchSpec) -> str:
    """A program for ``ray job submit``: one actor on each host starts its torchrun."""
    gpus, memory = spec.gpu and spec.ranks_per_host, spec.memory and spec.memory << 30
    bundle = _given({"CPU": spec.cpus * spec.ranks_per_host, "GPU": gpus, "memory": memory})
    return f'''import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

{_constants(spec)}
ENVIRONMENT = {spec.variables!r}
BUNDLE = {bundle!r}
HOSTS = {spec.hosts}


@ray.remote(num_cpus=BUNDLE["CPU"], num_gpus=BUNDLE.get("GPU", 0), memory=BUNDLE.get("memory"))
class Host:
    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, rank, address):
        place = ["--node-rank", str(rank), "--master-addr", address, "--master-port", "{PORT}"]
        words = [sys.executable, *TORCHRUN, *place, *COMMAND]
        return subprocess.run(words, env=os.environ | ENVIRONMENT).returncode


ray.init()
group = placement_group([BUNDLE] * HOSTS, strategy="STRICT_SPREAD")
ray.get(group.ready())
place = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(HOSTS)]
hosts = [Host.options(scheduling_strategy=one).remote() for one in place]
address = ray.get(hosts[0].address.remote())
left = [host.run.remote(rank, address) for rank, host in enumerate(hosts)]
while left:
    ended, left = ray.wait(left)
    if code := ray.get(ended[0]):
        sys.exit(code)
'''


def torchx(spec: LaunchSpec) -> str:
    """A component of TorchX: ``torchx run -s SCHEDULER FILE:job``.  The command is one argument of JSON without ``$``,
    which TorchX expands, and Kubernetes again."""
    words = json.dumps([torchrun(spec), list(spec.command), spec.variables]).replace("$", r"\u0024")
    asked = {"cpu": spec.cpus * spec.ranks_per_host, "gpu": spec.ranks_per_host if spec.gpu else 0}
    asked["memMB"] = 1024 * spec.memory if spec.memory else -1
    return f'''import torchx.specs as specs

START = """
import json, os, sys
torchrun, command, environment = json.loads(sys.argv[3])
first = os.environ.get(sys.argv[2]) or "localhost"
place = ["--rdzv-backend", "c10d", "--rdzv-id", sys.argv[1], "--rdzv-endpoint", first + ":{PORT}"]
os.execve(sys.executable, [sys.executable, *torchrun, *place, *command], os.environ | environment)
"""
COMMAND = {words!r}


def job() -> specs.AppDef:
    """Starts one torchrun on each host."""
    words = ["-c", START, specs.macros.app_id, specs.macros.rank0_env, COMMAND]
    role = specs.Role(name="rank", image={spec.image or ""!r}, entrypoint="python", args=words)
    role.num_replicas, role.resource, role.port_map = {spec.hosts}, specs.Resource(**{asked!r}), {{"c10d": {PORT}}}
    return specs.AppDef(name={spec.name!r}, roles=[role])
'''


def _constants(spec: LaunchSpec) -> str:
    return f"TORCHRUN = {torchrun(spec)!r}\nCOMMAND = {list(spec.command)!r}"


TARGETS = {
    "slurm": Target(slurm, "job.sh", ("sbatch",)),
    "kubernetes": Target(kubernetes, "job.yaml", ("kubectl", "create"), ("-f", "{file}")),
    "skypilot": Target(skypilot, "job.yaml", ("sky", "launch")),
    "modal": Target(modal, LAUNCHER, ("modal", "run")),
    "ray": Target(ray, LAUNCHER, ("ray", "job", "submit"), ("--working-dir", "{folder}", "--", "python", LAUNCHER)),
    "torchx": Target(torchx, "job.py", ("torchx", "run"), ("{file}:job",)),
}
