"""A launch on other machines, as one value: hosts, ranks, command, environment, limits, files.  Pure.

    LaunchSpec(hosts=2, ranks_per_host=4, command=("-m", "plait", "train"))  ──►  render.py  ──►  the scheduler's client

The environment has only variables that the user names, and none whose name looks like a secret: the text of a job is
shown, stored and read by others.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.messages.escape import one_line
from plait.table.mesh import Mesh

SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE|SESSION|(^|_)(API|ACCESS)?_?KEY(_|S|$)"
)
"""Names of variables whose values are not written."""


@dataclass(frozen=True)
class JobLimits:
    """Resources that a job asks for.  None leaves the choice to the scheduler."""

    minutes: int | None = None
    """Longest duration."""
    cpus: int = 1
    """Cores of each rank."""
    memory: int | None = None
    """GiB of memory of each host."""
    gpu: str | None = None
    """Kind of GPU, as in H100; each rank has one."""


@dataclass(frozen=True)
class LaunchSpec:
    """A job of ``hosts`` times ``ranks_per_host`` ranks.

    Raises:
        ValueError: there is no command, a word cannot be an argument, or a variable's name looks like a secret.
    """

    hosts: int
    ranks_per_host: int
    command: tuple[str, ...]
    """The words after ``python``: a script or ``-m`` and a module, and their arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every rank."""
    limits: JobLimits = JobLimits()
    files: tuple[str, ...] = ()
    """Files and folders that are copied into the working directory of every host."""
    name: str = "plait"
    image: str | None = None
    """The container's image, where the target has containers."""
    requeue: bool = False
    """Slurm: warn the job two minutes before its time is over, and queue it again."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no command: give one after --, as in plait submit slurm -- train --mesh shard=4")
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ValueError(
                f"name {one_line(self.name, 60)!r}: give a small letter, then up to 39 small letters, digits and -"
            )
        for word in (*self.command, *self.environment.values()):
            if "\0" in word or any(0xD800 <= ord(c) < 0xE000 for c in word):
                raise ValueError(f"a word is '{one_line(word, 80)}', which no program can be given: leave that out")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise ValueError(f"environment {one_line(name, 60)!r}: give the name of a variable, or NAME=VALUE")
            if SECRET.search(name.upper()):
                raise ValueError(
                    f"environment {name}: the name looks like a secret, and the job's text is stored and read by "
                    f"others; use the secrets of the target"
                )

    @property
    def ranks(self) -> int:
        """Ranks on all hosts together."""
        return self.hosts * self.ranks_per_host

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises ValueError for a mesh of another number of ranks or hosts."""
        if mesh.size != self.ranks:
            raise ValueError(
                f"the mesh '{mesh}' has {mesh.size} ranks, and {self.hosts} hosts x {self.ranks_per_host} ranks are "
                f"{self.ranks}: change --mesh, --hosts or --ranks-per-host"
            )
        if mesh.hosts not in (1, self.hosts):
            raise ValueError(f"the mesh '{mesh}' is on {mesh.hosts} hosts, and --hosts is {self.hosts}")


def variables(words: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the words ask for: ``NAME`` with its value in ``given``, or ``NAME=VALUE``.

    Raises:
        ValueError: a variable is not set.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name not in given:
            raise ValueError(f"environment {one_line(name, 60)}: this variable is not set; give NAME=VALUE")
        found[name] = value if equals else given[name]
    return found
