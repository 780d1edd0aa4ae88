"""A launch on other machines, as one value: hosts, ranks, command, environment, limits, files.  Pure.

    LaunchSpec(hosts=2, ranks_per_host=4, command=("-m", "plait", "train"))  ──►  render.py  ──►  the scheduler's client

Its fields are flags of ``plait submit``.  The environment has only variables that the user names, and none whose name
looks like a secret: others see, store and read the text of a job.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from plait.messages.escape import one_line
from plait.table.mesh import Mesh

SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE|SESSION|(^|_)(API|ACCESS)?_?KEY(_|S|$)"
)
"""Names of variables whose values are not written."""

Words = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True)
class LaunchSpec:
    """A job of ``hosts`` times ``ranks_per_host`` ranks."""

    hosts: int = 1
    """Number of hosts."""
    ranks_per_host: int = 1
    """Ranks on each host."""
    command: tyro.conf.Suppress[tyro.conf.Fixed[tuple[str, ...]]] = ()
    """The words after ``python``: a script or ``-m`` and a module, and their arguments."""
    environment: Annotated[Words, tyro.conf.arg(metavar="NAME[=VALUE]")] = ()
    """A variable that the ranks get; no other is written. May be repeated. Names of secrets are refused."""
    minutes: int | None = None
    """Longest duration of the job; None leaves it to the scheduler."""
    cpus: int = 1
    """Cores of each rank."""
    memory: int | None = None
    """GiB of memory of each host; None leaves it to the scheduler."""
    gpu: str | None = None
    """Kind of GPU, as in H100: each rank has one."""
    files: Annotated[Words, tyro.conf.arg(metavar="PATH")] = ()
    """A file or folder below this one that is copied to each host. May be repeated."""
    name: str = "plait"
    """The name of the job."""
    image: str | None = None
    """The container's image, which has torch and plait; None is the target's default,
    and Modal needs one."""
    requeue: bool = False
    """Slurm: warn the job two minutes before its time is over, and queue it again; the command has --resume auto."""

    def check(self) -> None:
        """Raises ValueError if there is no command, or a name cannot be one or looks like a secret."""
        if not self.command:
            raise ValueError("no command: give one after --, as in plait submit slurm -- train --mesh shard=4")
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ValueError(
                f"name {one_line(self.name, 60)!r}: give a small letter, then up to 39 small letters, digits and -"
            )
        for name in self.variables:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"environment {one_line(name, 60)!r}: give the name of a variable, or NAME=VALUE")
            if SECRET.search(name.upper()):
                raise ValueError(
                    f"environment {name}: the name looks like a secret, and the job's text is stored and read by "
                    f"others; use the secrets of the target"
                )

    @property
    def variables(self) -> dict[str, str]:
        return dict(word.partition("=")[::2] for word in self.environment)

    def check_mesh(self, mesh: Mesh) -> None:
        ranks = self.hosts * self.ranks_per_host
        if mesh.size != ranks:
            raise ValueError(
                f"the mesh '{mesh}' has {mesh.size} ranks, and {self.hosts} hosts x {self.ranks_per_host} ranks are "
                f"{ranks}: change --mesh, --hosts or --ranks-per-host"
            )
        if mesh.hosts not in (1, self.hosts):
            raise ValueError(f"the mesh '{mesh}' is on {mesh.hosts} hosts, and --hosts is {self.hosts}")


def with_values(words: Sequence[str], given: Mapping[str, str]) -> tuple[str, ...]:
    """Returns each word as ``NAME=VALUE``; one that is only a name has its value in ``given``, or is a ValueError."""
    for word in words:
        if "=" not in word and word not in given:
            raise ValueError(f"environment {one_line(word, 60)}: this variable is not set; give NAME=VALUE")
    return tuple(word if "=" in word else f"{word}={given[word]}" for word in words)
