"""The ``plait`` command: words and flags in, an exit code out; the work is elsewhere.

    plait train | verify | prove | doctor | bench comm | schedule | explain | checkpoint | chaos | judge

Exit codes: 0 done (verify, judge: equal), 1 failed (verify, judge: not equal; prove: refuted; checkpoint: damaged,
different), 2 bad input; 128 + n for signal n.
"""

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar, Union

import tyro

from plait import __version__
from plait import config as configs
from plait.comm.agree import check_together, gather_ints
from plait.comm.base import NO_NOTE, Comm
from plait.commands.bench import run_bench
from plait.commands.chaos import ChaosConfig, run_chaos
from plait.commands.checkpoint import CheckpointCommand
from plait.commands.doctor import DoctorConfig, run_doctor
from plait.commands.explain import ExplainConfig, run_explain
from plait.commands.flags import check_flags, parse_sections
from plait.commands.judge import JudgeConfig, run_grid, run_judge, run_verify_engine
from plait.commands.prove import ProveConfig, run_prove
from plait.commands.schedule import ScheduleCommand
from plait.config import TrainConfig, VerifyConfig
from plait.config.bounds import check_values
from plait.core.ended import to_its_end
from plait.core.escape import heard, say
from plait.core.mesh import AXES
from plait.files.reading import shown
from plait.files.writing import check_file
from plait.job.user_code import FLAG, load_installed, load_plugin, take_plugins
from plait.launch import Limits, guarded, is_a_rank, launch, leave, open_closed
from plait.measure import comm as bench
from plait.train.resume import check_places, has_settings, newest_sound, restarted
from plait.train.run import run_train
from plait.verify import run_verify
from plait.verify.matrix import run_matrix
from plait.witness.run import with_engine

Config = TypeVar("Config", TrainConfig, VerifyConfig)


@dataclass(frozen=True)
class BenchCommand(bench.BenchConfig):
    """Time messages between ranks: ping-pong, and every collective by size."""

    what: tyro.conf.Positional[Literal["comm"]] = "comm"
    """What is timed."""


Command: TypeAlias = (
    TrainConfig
    | VerifyConfig
    | ProveConfig
    | DoctorConfig
    | BenchCommand
    | ScheduleCommand
    | CheckpointCommand
    | ChaosConfig
    | JudgeConfig
    | ExplainConfig
)

COMMANDS: dict[str, Any] = {
    "train": TrainConfig,
    "verify": VerifyConfig,
    "prove": ProveConfig,
    "doctor": DoctorConfig,
    "bench": BenchCommand,
    "schedule": ScheduleCommand,
    "explain": ExplainConfig,
    "checkpoint": CheckpointCommand,
    "chaos": ChaosConfig,
    "judge": JudgeConfig,
}
"""What each command is parsed into."""

NESTED = ("schedule", "checkpoint")
"""Commands that have commands of their own."""

DESCRIPTION = f"""Train one model over many ranks, and prove the result equal to one process.

plait --version: the versions of plait, torch and Python. plait {FLAG} FILE.py COMMAND ...: with rows of your own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; an error is a line (a mistake of the user) or its traceback.

    Returns:
        The exit code. Without ``argv`` this is the whole program: it ends the process with that code, so that a script
        which calls ``main()`` cannot lose it.
    """
    if argv is None:
        program()
    return guarded(lambda: run(list(argv)))


def program() -> NoReturn:
    """The program ``plait``."""
    open_closed()
    leave(main(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """The command in ``argv``; mistakes are raised."""
    if argv[:1] == ["--version"]:
        say(f"plait {__version__} (torch {version('torch')}, Python {platform.python_version()})\n", sys.stdout)
        return 0
    load_installed()
    command = parse(argv)
    for file in getattr(command, "plugin", ()):  # a file of settings may name some
        load_plugin(file)
    with to_its_end():
        return carry_out(command, argv)


def carry_out(command: Command, argv: list[str]) -> int:
    """A command that was parsed from ``argv``."""
    check_values(command)
    if (place := getattr(getattr(command, "what", command), "json", None)) not in (None, "-"):
        check_file("json", place)
    body: Callable[[Comm], int]
    limits = Limits()
    match command:
        case DoctorConfig():
            return run_doctor(command)
        case ProveConfig():
            return run_prove(command)
        case ChaosConfig():
            return run_chaos(command)
        case JudgeConfig():
            return run_judge(command, argv)
        case ExplainConfig():
            return run_explain(command)
        case ScheduleCommand():
            command.what.run()
            return 0
        case CheckpointCommand():
            return command.run()
        case BenchCommand():
            bench.validate(command)
            body = partial(run_bench, command)
        case TrainConfig():
            command = configs.with_job(command)
            if is_a_rank(command):  # how often it was started, all know together
                body = partial(train_again, command, argv=argv)
            else:
                configs.validate(command)
                if done := check_places(command):
                    say(f"{done}\n", sys.stderr if command.json == "-" else sys.stdout)
                    return 0
                body = partial(run_train, command, argv=argv)
            limits = Limits(command.restarts, command.grace, partial(newest_sound, command))
        case VerifyConfig(grid=True):
            return run_grid(configs.with_job(command), argv)
        case VerifyConfig(engine=None, matrix=None):
            command = configs.with_job(command)
            configs.validate(command)
            body = partial(run_verify, command, argv=argv)
        case VerifyConfig(engine=str()):
            command = configs.with_job(command)
            configs.validate(command)
            command = with_engine(command)
            body = partial(run_verify_engine, command, argv=argv)
        case VerifyConfig():
            return run_matrix(command)
    return launch(command, body, ["-m", "plait", *argv], limits)


def train_again(config: TrainConfig, comm: Comm, argv: Sequence[str]) -> int:
    """A rank's run, which goes on where the attempts before came to; nothing is written before all have looked."""
    done, wrong = None, None
    # An agent that was started anew is younger than what the others have written.
    begun = any(row[0] for row in gather_ints(comm, [has_settings(config)], AXES, NO_NOTE))
    try:
        config = restarted(config, comm.attempt, begun)
        configs.validate(config)
        done = check_places(config)
    except Exception as error:
        wrong = error
    check_together(comm, wrong, AXES)
    if done:
        say(f"{done}\n", sys.stderr if config.json == "-" else sys.stdout)
        return 0
    return run_train(config, comm, argv=argv)


def parse(argv: Sequence[str]) -> Command:
    """The command line as one of the configs; usage errors leave with exit code 2, as argparse's do."""
    argv, plugins = take_plugins(argv)
    for file in plugins:  # its rows are in the help texts too
        load_plugin(file)
    name, *words = argv or [""]
    command: Command
    if name in COMMANDS:  # a parser of its own, so that its errors lead to its own help
        kind, prog = COMMANDS[name], f"plait {name}"
        if name not in NESTED:
            check_flags(name, kind, words)
        with heard():  # a help text may be printed
            if kind in (TrainConfig, VerifyConfig):
                command = parse_sections(_defaults(kind, words), prog, words)
            else:
                command = tyro.cli(kind, prog=prog, args=words)
    else:
        kinds: Any = Union[*(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())]
        with heard():
            command = tyro.cli(kinds, prog="plait", description=DESCRIPTION, args=list(argv))
    if plugins and isinstance(command, TrainConfig | VerifyConfig):
        command = replace(command, plugin=plugins)
    flags = {word.partition("=")[0] for word in argv}
    if isinstance(command, TrainConfig | VerifyConfig) and command.epochs is not None and "--steps" in flags:
        where = f" of {command.config}" if command.config and "--epochs" not in flags else ""
        raise ValueError(
            f"--steps {command.steps} beside epochs {command.epochs}{where}, which are a number of steps too: "
            f"leave --steps out, or give --epochs None"
        )
    return command


def _defaults(kind: type[Config], words: Sequence[str]) -> Config:
    """The defaults of a command: the file that its words name by ``--config``, if they do."""
    files = []
    for word, following in zip_longest(words, words[1:]):
        flag, equals, path = word.partition("=")
        if flag == "--config" and (equals or following is not None):
            files.append(path if equals else following)
    if len(files) > 1:
        raise ValueError(f"--config is given {len(files)} times ({', '.join(map(shown, files))}): give one file")
    if not files:
        return kind()
    of_a_run = [field.name for field in fields(TrainConfig)]  # plait verify, too, reads the file that a run wrote
    return configs.from_toml(kind, files[0], others=of_a_run)
