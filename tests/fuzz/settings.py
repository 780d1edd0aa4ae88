"""Odd settings, drawn from the settings themselves: every field, type, choice and bound of every command.

    fields of the dataclasses ──► values at and past their bounds, odd texts, odd files ──► a command line, or TOML
    ──► a forked process in its own folder, with limits ──► exit code, messages, leftovers

``python settings.py SEED COUNT`` prints an object for each input with a wrong answer, and a count.
"""

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import types
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

import tomli_w
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from plait.run.commands import main as command
from plait.run.config.bounds import BOUNDS
from plait.run.job.sections import flag_hints, flags
from plait.run.launch import local

SECONDS = 25
"""A processor's, so that a busy machine is no fault; ten times as many by the clock."""
NUMBERS = ["0", "-1", "1", "2", "3", str(2**31), str(2**63), str(2**64), "1e400", "nan", "inf", "-inf", "1e308", "1.5"]
NUMBERS += ["", "x", "9" * 5000, "0x10", "1_000", "²", "None", "true"]
TEXTS = ["", " ", "x", "None", "-", "--", "\x1b[31m", "a\nb", "é" * 3000, "x" * 5000, "../..", "$(id)", "%s{0}"]
TEXTS += ["\udcff"]
PLACES = ["there.txt", "folder", "pipe", "loop", "nothing/in/it", "folder/new", "there.txt/x", "broken", "binary"]
PLACES += ["/dev/full", "/dev/zero", "/dev/null", "/dev/stdin", "/proc/self/mem", "/proc/1/x", "n" * 300, ".", ".."]
PLACES += ["/", "new"]
MESHES = ["shard=2", "shard=1", "replica=2 shard=2", "pipe=2", "tensor=2", "shard=3", "pipe=2 shard=2", "shard=9" * 30]
MESHES += [f"shard={2**63}", "shard=-1", "shard=0", "replica=1000000", "shard=2000 pipe=3", "shard=2 shard=2"]
MESHES += ["shard=²"]
MEANT: dict[str, list[str]] = {
    "mesh": MESHES,
    "strategy": ["ddp", "zero1", "zero3", "hsdp", "mine: full | full | full | full", "mine: |||", "zero4"],
    "model": ["mlp", "gpt", "hf:folder", "hf:", "hf:pipe", "hf:/dev/zero", "mlpp"],
    "schedule": ["1f1b", "gpipe", "interleaved", "zbv", "order.txt", "giant.txt", "1f1c"],
    "split": ["1 1", "even", "2 1", "-1 3", "9" * 400, "1," * 900],
    "job": ["job.py:job", "job.py:none", "job.py", ":", "pipe.py:job", "broken.py:job"],
    "optimizer": ["adamw", "sgd", "adamx"],
    "sizes": ["1KB", "4KB", "64", "99999999GB", "-1", "1.5KB", "²"],
    "kinds": ["all_reduce", "all_gather", "allreduce"],
    "config": ["run.toml", "deep.toml"],
    "resume": ["auto", "run", "run/checkpoints/step-000001"],
    "inject": ["kill@rank=1,step=0", "nan@rank=9", "slow=2x@rank=0", "@", "=", "kill@step=9" * 9],
    "rows": ["kill", "none"],
    "change": ["lr", "steps", "nothing"],
    "path": ["run", "run/checkpoints"],
    "one": ["run"],
    "other": ["run", "run/checkpoints/step-000001"],
    "order": ["1f1b", "gpipe", "zb_h1", "zbv", "order.txt", "giant.txt"],
    "file": ["order.txt", "giant.txt", "run.toml"],
    "out": ["out", "run"],
}
"""More texts, for settings with their own form."""

TINY = {
    "train": {"model": "mlp", "layers": 4, "width": 8, "batch": 4, "mesh": "shard=2", "steps": 1, "world": "thread"},
    "verify": {"model": "mlp", "layers": 4, "width": 8, "batch": 4, "mesh": "shard=2", "steps": 1, "length": 8},
    "bench": {"world": "thread", "sizes": ("64",), "repeat": 1, "warmup": 0},
    "doctor": {"measure": False},
}
"""Flags of a command, unless an odd value takes their place."""
SMALL = {"layers": 4, "width": 16, "batch": 8, "steps": 2, "length": 128, "repeat": 3, "warmup": 3, "workers": 0}
SMALL |= {"eval_steps": 20, "microbatches": 4, "threads": 2, "epochs": 0}
"""Up to which numbers a run is carried out; with larger ones it ends where ranks would be started."""


@dataclass(frozen=True)
class Leaf:
    """A command or subcommand: its words, its settings."""

    words: tuple[str, ...]
    kind: type

    def hints(self) -> dict[str, Any]:
        own = get_type_hints(self.kind, include_extras=True)  # they tell positional words
        return {name: own.get(name, hint) for name, hint in flag_hints(self.kind).items() if name != "what"}


@dataclass(frozen=True)
class Input:
    argv: tuple[str, ...]
    toml: str


def leaves() -> list[Leaf]:
    """Every command, down to its subcommands."""
    found = []
    for name in command.COMMANDS:
        kind = command.kind_of(name)
        below = get_type_hints(kind, include_extras=True).get("what")
        members = [one for one in _members(below) if is_dataclass(_bare(one))] if below is not None else []
        words = (name, "comm") if name == "bench" else (name,)
        found += [Leaf((name, _subcommand(one)), _bare(one)) for one in members] or [Leaf(words, kind)] * (
            1 + len(flag_hints(kind)) // 6
        )
    return found


def _members(hint: Any) -> list[Any]:
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _subcommand(hint: Any) -> str:
    return next(str(one.name) for one in get_args(hint)[1:] if hasattr(one, "name"))


def texts_of(name: str, hint: Any) -> list[str]:
    """Values of a field, as words: of its type, at its bounds and past them, and what is none."""
    found: list[str] = []
    for kind in (_bare(one) for one in _members(_bare(hint))):
        if get_origin(kind) is Literal:
            found += [str(one) for one in get_args(kind)] + ["other", ""]
        elif kind in (int, float):
            least, most, _ = BOUNDS[name]
            near = [least, least - 1, least + 1, most, most + 1] if kind is int else [least, most, -least, most * 10]
            found += [*(f"{int(one)}" if kind is int else f"{one}" for one in near if one < 1e300), *NUMBERS]
        elif kind is str or get_origin(kind) is tuple:
            found += [*TEXTS, *PLACES, *MEANT.get(name, []) * 4]
    return found or ["None"]


@st.composite
def inputs(draw: st.DrawFn) -> Input:
    """A command line with a few odd values among tiny ones, or the same as a TOML file."""
    leaf = draw(st.sampled_from(leaves()))
    hints = leaf.hints()
    given: dict[str, Any] = dict(TINY.get(leaf.words[0], {}))
    odd = draw(st.lists(st.sampled_from(sorted(hints)), max_size=4, unique=True)) if hints else []
    by_file = leaf.words[0] in ("train", "verify") and draw(st.integers(0, 3)) == 0
    values: dict[str, Any] = {}
    for name in odd:
        if _members(_bare(hints[name])) == [bool]:
            values[name] = draw(st.booleans())
        elif "tuple" in str(hints[name]):
            values[name] = tuple(draw(st.lists(st.sampled_from(texts_of(name, hints[name])), max_size=3)))
        else:
            values[name] = draw(st.sampled_from(texts_of(name, hints[name])))
    toml = draw(tables(values)) if by_file else ""
    given |= {} if by_file else values
    words = [*leaf.words]
    for name, value in given.items():
        words += spelled(name, value, positional="ositional" in str(hints.get(name)))
    for name in (n for n, hint in hints.items() if "ositional" in str(hint) and n not in given):
        words += [draw(st.sampled_from([*MEANT.get(name, ["new"]), *PLACES]))]
    if by_file:
        words += ["--config", draw(st.sampled_from(["drawn.toml"] * 9 + ["pipe", "/dev/full", "/dev/zero", "folder"]))]
    if draw(st.integers(0, 30)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(st.sampled_from([*TEXTS, "--no-such", "--help"])))
    return Input(tuple(word.replace("\0", "") for word in words), toml)


def spelled(name: str, value: Any, *, positional: bool) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    parts = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
    return parts if positional else [flag, *parts]


@st.composite
def tables(draw: st.DrawFn, values: dict[str, Any]) -> str:
    """TOML of these values, each as a text or in a type of its own; now and then something that is no table of them."""
    odd: list[Any] = [2**63 - 1, -1, 0, 1.5, float("inf"), float("nan"), True, [], [[1]], {}, {"a": {"b": 1}}]
    odd += ["a\0b", "", 1e308]
    drawn = {}
    for name, value in values.items():
        drawn[name] = draw(st.sampled_from([_typed(value), *odd]))
    try:
        text = tomli_w.dumps(drawn)
    except (ValueError, TypeError):
        text = ""
    return text + draw(
        st.sampled_from([""] * 20 + ["steps = 1\nsteps = 2\n", "[steps]\na = 1\n", "unknown = 1\n", "lr = 1e400\n"])
        | st.sampled_from(
            ["=", "\ufeff", f"steps = {'9' * 5000}", "a = " + "[" * 9000, "batch = 0x7fffffffffffffffffff"]
        )
    )


def _typed(value: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except (ValueError, TypeError):
            pass
    return list(value) if isinstance(value, tuple) else value


# ---- where they run -----------------------------------------------------------------------------------------


def furnish(folder: Path) -> None:
    """Files of all kinds to be named, and a run with a checkpoint."""
    (folder / "there.txt").write_text("some text. " * 200)
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    (folder / "folder").mkdir()
    for name in ("pipe", "pipe.py"):
        os.mkfifo(folder / name)
    (folder / "loop").symlink_to("loop")
    (folder / "broken").symlink_to("nowhere")
    (folder / "broken.py").write_text("job = 3\n")
    (folder / "order.txt").write_text("0F0 0B0\n1F0 1B0\n")
    (folder / "giant.txt").write_text(f"{10**15}F0 0B{10**12}\n")
    (folder / "run.toml").write_text("steps = 1\n")
    (folder / "deep.toml").write_text("a = " + "[" * 100_000)
    (folder / "job.py").write_text(JOB)


JOB = """import plait, torch
job = plait.UserJob(
    build=lambda: torch.nn.Linear(4, 4),
    loss_fn=lambda model, batch: model(batch).square().sum(),
    batches=[torch.ones(8, 4)],
)
"""


def launched(config: Any, *rest: Any, settings: dict[str, Any] | None = None) -> int:
    """Ranks are started where the run is a tiny one."""
    given = settings or flags(config)
    big = any((given.get(n) or 0) > most for n, most in SMALL.items()) or config.parsed_mesh.size > 4
    if big or config.world != "thread" or given.get("eval_every") is not None:
        return 0
    return int(LAUNCH(config, *rest, settings=settings))


LAUNCH = local.launch

CHANGED: dict[str, dict[str, Any]] = {
    "train": {"launch": launched},
    "verify": {"launch": launched, "run_matrix": lambda config: 0},
    "bench": {"launch": launched},
    "doctor": {"measured": dict},  # it takes seconds, and how many depends on the machine
}
"""Functions that a child has instead of ours, by command."""


def child(one: Input, place: Path) -> None:
    """Runs the command in this process, which ends with it."""
    with open(place / "said", "wb") as said, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.chdir(place / "here")
    tempfile.tempdir = str(place / "tmp")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "torch")  # which torch makes itself
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with ExitStack() as stack:
            for name, changed in CHANGED.items():
                stack.enter_context(mock.patch.multiple(command.module_of(name), **changed))
            code = command.main(list(one.argv))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 2
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def outcome(one: Input, place: Path) -> tuple[str, str]:
    """(what is wrong, what was said); nothing is wrong: the exit code."""
    outside = contents(place / "outside")
    (place / "here" / "drawn.toml").write_text(one.toml, errors="replace")
    if not (pid := os.fork()):
        child(one, place)
    _, status, used = os.wait4(pid, 0)
    seconds = used.ru_utime + used.ru_stime
    said = (place / "said").read_text(errors="replace")
    code = os.waitstatus_to_exitcode(status)
    lines = [line for line in said.splitlines() if line.startswith("plait: error: ")]
    usage = "For full helptext, " in said
    if code < 0:
        return (
            "late" if -code in (signal.SIGALRM, signal.SIGPROF) else f"killed by {signal.Signals(-code).name}"
        ), said
    if "Traceback" in said:
        return "a traceback", said
    if code not in (0, 2) and not (code == 1 and one.argv[0] in ("verify", "checkpoint")):
        return f"exit code {code}", said
    if code == 2 and len(lines) != 1 and not (usage and not lines):
        return f"{len(lines)} messages", said
    if any(not line.isprintable() or len(line) > 3000 for line in lines):
        return "a message that is long, or obeyed by a terminal", said
    if contents(place / "outside") != outside or list((place / "tmp").iterdir()):
        return "something outside", f"{contents(place / 'tmp')} {said}"
    return f"{code}{' late' if code == 2 and seconds > 15 else ''}", said


def contents(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(f), f.lstat().st_size, f.lstat().st_mtime_ns) for f in folder.rglob("*"))


def campaign(number: int, count: int) -> tuple[Counter[str], list[dict[str, Any]]]:
    """So many inputs: how often each outcome came, and those that are wrong."""
    seen: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        template = Path(name) / "template"
        for place in (template, template / "here", template / "tmp", template / "outside"):
            place.mkdir()
        furnish(template / "here")
        words = (
            "train --model mlp --layers 2 --width 4 --batch 4 --mesh shard=1 --steps 1 --world thread --save-every 1"
        )
        found, said = outcome(Input((*words.split(), "--out", "run"), ""), template)
        assert found == "0", (found, said)
        (template / "here" / "run").rename(run := template / "run")

        @seed(number)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(inputs())
        def each(one: Input) -> None:
            shutil.rmtree(template / "here")
            (template / "here").mkdir()
            furnish(template / "here")
            shutil.copytree(run, template / "here" / "run")
            found, said = outcome(one, template)
            seen[f"{one.argv[0] if one.argv[0] in command.COMMANDS else 'other'} {found}"] += 1
            if found not in ("0", "1", "2"):
                wrong.append({"found": found, "argv": one.argv, "toml": one.toml[:300], "said": said[-1500:]})
                print(json.dumps(wrong[-1]), flush=True)

        each()
    return seen, wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    totals, _ = campaign(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"seen": dict(sorted(totals.items()))}), flush=True)
