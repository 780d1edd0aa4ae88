"""The ``plait`` command: parses words and flags, and runs the module of the command.

Exit codes: 0 done (verify, judge: equal), 1 failed (verify, judge: not equal; prove: refuted; checkpoint: damaged,
different), 2 bad input; 128 + n for signal n.
"""

import io
import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import make_dataclass, replace
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Annotated, Any, NoReturn, Union, get_type_hints

from plait import __version__
from plait.checkpoint.files.reading import shown
from plait.checkpoint.files.writing import check_file
from plait.messages.ended import to_its_end
from plait.messages.escape import heard, one_line, say
from plait.run.config.bounds import check_values
from plait.run.job.sections import flag_hints
from plait.run.job.sections import flags as flags_of
from plait.run.job.user_code import FLAG, load_plugin, take_files
from plait.run.launch.failure import guarded, leave, open_closed

COMMANDS = {
    "train": "Train a model on a mesh; show its loss, its speed and its bytes, predicted and measured.",
    "verify": "Compare a layout with the single process: losses, every gradient, norm, parameters, optimizer state.",
    "prove": "Prove that a layout is the run of a single process, for every rank, without running it.",
    "plan": "Rank layouts of a model on a cluster: whether they fit, how long a step takes, and what bounds it.",
    "doctor": "Describe this machine: processor, memory, GPUs and links, network, limits, measured speeds.",
    "bench": "Time messages between ranks: ping-pong, and every collective by size.",
    "schedule": "Show, write, prove or draw a pipeline schedule.",
    "explain": "Show the style and the parameters of each module under a model's tensor plan, and its messages.",
    "checkpoint": "Show, verify, compare or convert a checkpoint.",
    "judge": "Compare a witnessed run of any engine with the single process; name the first thing that is wrong.",
    "submit": "Write a job for Slurm, Kubernetes, SkyPilot, Modal, Ray or TorchX, and hand it to that program's own "
    "client.",
    "lesson": "Learn by running: a course of lessons, each a file that asserts its claims.",
    "trace": "Step through a function of a file on every rank, and write a page with one column per rank.",
    "report": "Compare two reports that plait train --out or plait plan --out wrote.",
}
"""The commands.  Each has a module of the same name in this package, which is imported only when the command is used.
Its words are parsed into the config that the module's ``run(config, argv)`` takes; it returns the exit code."""

DESCRIPTION = f"""Train one model over many ranks, and prove the result equal to one process.

plait --version: the versions of plait, torch and Python. plait {FLAG} FILE.py COMMAND ...: with rows of your own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.  Prints one line for a user's mistake and the traceback for any other
    error.  Without ``argv`` this is the whole program: it ends the process with that code, so that a script which calls
    ``main()`` cannot lose it."""
    if argv is None:
        program()
    return guarded(lambda: run(list(argv)))


def program() -> NoReturn:
    """Entry point of the program ``plait``."""
    open_closed()
    os.environ["PYTHONSAFEPATH"] = "1"  # for every child Python, also those of torch and multiprocessing
    leave(main(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Runs the command in ``argv``.  Raises on mistakes."""
    if argv[:1] == ["--version"]:
        say(f"plait {__version__} (torch {version('torch')}, Python {platform.python_version()})\n", sys.stdout)
        return 0
    command = parse(argv)
    for file in flags_of(command).get("plugin", ()):  # a settings file may name plugins
        load_plugin(file)
    with to_its_end():
        check_values(command)
        if (place := flags_of(command).get("json")) not in (None, "-"):
            check_file("json", place)
        return int(module_of(take_files(own_words(argv))[0][0]).run(command, argv))


def own_words(argv: Sequence[str]) -> Sequence[str]:
    """The words without those after ``--`` that ``plait submit`` passes on."""
    before = argv[: list(argv).index("--")] if "--" in argv else argv
    return before if "submit" in before else argv


def module_of(name: str) -> ModuleType:
    return import_module(f"plait.run.commands.{name}")


def kind_of(name: str) -> Any:
    """The class into which a command's words are parsed; a union of those of its subcommands."""
    return get_type_hints(module_of(name).run, include_extras=True)["config"]


def parse(argv: Sequence[str]) -> Any:
    """Parses the command line into one of the configs; ValueError for words that it does not take."""
    import tyro

    argv, plugins = take_files(own_words(argv))
    for file in plugins:  # the help texts list its rows too
        load_plugin(file)
    name, *words = argv or [""]
    of_a_run, flat = name in ("train", "verify"), (tyro.conf.OmitArgPrefixes,)
    if name in COMMANDS:  # a separate parser, so that errors refer to the command's help
        kind, prog = kind_of(name), f"plait {name}"
        with heard():  # a help text may be printed
            default = {"default": _defaults(kind, words)} if of_a_run else {}
            about = None if isinstance(kind, type) else COMMANDS[name]
            command = read_words(kind, prog=prog, description=about, args=words, config=flat, **default)
    else:
        named = ((name, tyro.conf.subcommand(name, description=text)) for name, text in COMMANDS.items())
        completing = any(word.startswith("--tyro-") for word in argv)  # a script that knows every flag
        kinds: Any = Union[
            *(Annotated[kind_of(name) if completing else make_dataclass(name, ()), word] for name, word in named)
        ]
        with heard():
            command = read_words(kinds, prog="plait", description=DESCRIPTION, args=list(argv), config=flat)
    if plugins and of_a_run:
        command = replace(command, plugin=plugins)
    flags = {word.partition("=")[0] for word in argv}
    if of_a_run and command.task.samples.epochs is not None and "--steps" in flags:
        samples, file = command.task.samples, command.files.config
        where = f" of {file}" if file and "--epochs" not in flags else ""
        raise ValueError(
            f"--steps {samples.steps} beside epochs {samples.epochs}{where}, which are a number of steps too: "
            f"leave --steps out, or give --epochs None"
        )
    return command


def read_words(*args: Any, **settings: Any) -> Any:
    """Calls ``tyro.cli``; for words that it does not take, raises ValueError instead of showing its box."""
    import tyro

    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(*args, **settings)
    except SystemExit as left:
        if not left.code:  # a help text
            raise
        raise ValueError(one_line(in_a_line(box.getvalue()), longest=1000)) from None


def in_a_line(box: str) -> str:
    """Turns tyro's box into a line: the mistake, the likely intention, and the command whose help says more."""
    rows = re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()[1:]
    rows = [re.sub(r"^[│|╰+] ?| ?[│|╯+]$", "", row).strip() for row in rows]
    parts = "\n".join(row if row.strip("─-") else "" for row in rows).split("\n\n")
    said = [" ".join(part.split()) for part in parts if part.strip()]
    if len(said) < 2:
        return " ".join(box.split())
    wrong, *hints, last = said
    wrong = re.sub(r"(?<=[:)] )[A-Z|]+ (?=[A-Z])| \(required\)", "", wrong)  # types of words that have no flag
    more = " ".join(hints)
    if value := re.match(r"Error parsing (--\S+): .*'(.*?)'", wrong):
        kind = re.search(rf"{re.escape(value[1])} (\S+)", more)
        wrong = f"{value[1]} {value[2]!r}: give {kind[1].replace('{None}', 'None') if kind else 'another value'}"
    near = re.search(r"(?<=meant: )--\S+|Available .*", more)
    meant = "" if near is None else f": did you mean {near[0]}?" if near[0][0] == "-" else f": {near[0].lower()}"
    if re.match(r"Unrecognized options: \w.*plait submit", wrong + last):
        meant = ": the command to submit comes after --"
    return f"{wrong[:1].lower()}{wrong[1:].rstrip('.')}{meant}; see plait {last.partition('plait ')[2]}"


def _defaults(kind: Any, words: Sequence[str]) -> Any:
    """The defaults of a command, read from the file that ``--config`` names, if any."""
    from plait.run.config.file import from_toml
    from plait.run.config.settings import TrainConfig

    _, files = take_files(words, "--config")
    if len(files) > 1:
        raise ValueError(f"--config is given {len(files)} times ({', '.join(map(shown, files))}): give one file")
    if not files:
        return kind()
    return from_toml(kind, files[0], others=flag_hints(TrainConfig))  # verify reads a run's file too
