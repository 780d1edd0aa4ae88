"""``plait submit``: shows a job for a scheduler, and hands it to the scheduler's own client.

plait submit slurm --hosts 2 --ranks-per-host 4 -- train --mesh "replica=2 shard=4"

Exit codes: 0 shown (--dry-run), 2 bad input, otherwise the client's.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from plait.checkpoint.files.writing import told
from plait.messages.escape import one_line, say
from plait.run.commands.main import COMMANDS, parse
from plait.run.config.room import check_job
from plait.run.config.settings import RunConfig
from plait.run.launch.render import TARGETS
from plait.run.launch.spec import LaunchSpec, Words, with_values


@dataclass(frozen=True, kw_only=True)
class SubmitConfig(LaunchSpec):
    """Write a job for Slurm, Kubernetes, SkyPilot, Modal, Ray or TorchX, and hand it to that program's own client.

    The command follows after --: one of plait's, or a script of Python. Exit code: the client's.
    """

    target: tyro.conf.Positional[Literal["slurm", "kubernetes", "skypilot", "modal", "ray", "torchx"]]
    """The scheduler."""
    dry_run: bool = False
    """Only show the job, and on standard error the client's command."""
    option: Annotated[Words, tyro.conf.arg(metavar="WORD")] = ()
    """A word for the client, as in --option=--partition=gpu. May be repeated."""


def run(config: SubmitConfig, argv: Sequence[str]) -> int:
    spec = spec_of(config, command_of(argv))
    target = TARGETS[config.target]
    say(text := target.render(spec), sys.stdout)
    client, *words = target.client
    words += config.option
    last = [word.format(file=target.file, folder="FOLDER") for word in target.last]
    say(f"plait: {shlex.join([client, *words, *last])}\n", sys.stderr)
    if config.dry_run:
        return 0
    if not (program := shutil.which(client)):
        raise ValueError(
            f"{client} is not installed here: install it, or save the text (--dry-run) and submit it there"
        )
    with tempfile.TemporaryDirectory(prefix="plait-submit-") as name:  # clients read it before they return
        folder = Path(name)
        file = folder / target.file
        with told(name, 0):
            for one in spec.files if config.target == "ray" else ():  # Ray sends one folder
                where = folder / one
                where.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(one, where, dirs_exist_ok=True) if os.path.isdir(one) else shutil.copy(one, where)
            file.write_text(text, encoding="utf-8")
        last = [word.format(file=file, folder=folder) for word in target.last]
        return subprocess.run([program, *words, *last]).returncode


def command_of(argv: Sequence[str]) -> tuple[str, ...]:
    """Returns the words after ``--`` as words after ``python``: plait's own commands are those of its module."""
    words = tuple(argv)[list(argv).index("--") + 1 :] if "--" in argv else ()
    return ("-m", "plait", *words) if words[:1] and words[0] in COMMANDS else words


def spec_of(config: SubmitConfig, command: tuple[str, ...]) -> SubmitConfig:
    """Adds the command and the values of variables.  ValueError for a mesh of another number of ranks than the job, or
    a setting that the target does not support."""
    spec = replace(config, command=command, environment=with_values(config.environment, os.environ))
    spec.check()
    if command[:2] == ("-m", "plait"):
        asked = parse(command[2:])
        own = asked if hasattr(asked, "parsed_mesh") and getattr(asked, "calibrate", "") is not None else None
        if machine := getattr(asked, "machine", None) or own:
            spec.check_mesh(machine.parsed_mesh)
        if isinstance(asked, RunConfig):
            check_job(asked, spec.ranks_per_host, config.gpu, config.memory)
    elif not command[0].endswith(".py"):
        raise ValueError(f"{one_line(command[0], 60)!r} is neither a command of plait nor a script: give one after --")
    elif not config.image and not os.path.isfile(command[0]):
        raise ValueError(f"script {one_line(command[0], 200)!r}: there is no such file here, and no --image has it")
    elif not config.image and config.target in ("ray", "skypilot") and not _sent(command[0], config.files):
        raise ValueError(
            f"script {one_line(command[0], 200)!r}: {config.target} runs it in a folder that has only --files: add "
            f"--files {shlex.quote(command[0])}"
        )
    for one in config.files:
        if os.path.isabs(one) or ".." in Path(one).parts or not os.path.exists(one):
            raise ValueError(f"files {one_line(one, 200)!r}: give the relative path of a file that is there")
    if config.requeue and config.target != "slurm":
        raise ValueError(f"requeue is for slurm: leave it out for {config.target}")
    for flag, instead in UNUSED.get(config.target, {}).items():
        if getattr(config, flag):
            raise ValueError(f"{config.target} has no place for --{flag}: {instead}")
    return spec


def _sent(script: str, files: Sequence[str]) -> bool:
    return os.path.isabs(script) or any(Path(script).is_relative_to(Path(one)) for one in files)


UNUSED = {
    "slurm": {"image": "leave it out", "files": "use a folder that all hosts share"},
    "kubernetes": {"files": "put them into the image, or use a volume of the runtime"},
    "skypilot": {"minutes": "leave it out"},
    "ray": {"minutes": "leave it out", "image": "leave it out"},
    "torchx": {"minutes": "leave it out", "files": "it sends its own workspace"},
}
"""Flags that a target's job would ignore, with the fix: they are refused, since an ignored limit costs money."""
