"""The suites, in the order in which they run: each is a separate command, which this only starts.

``quick`` measures the rows with goals, in few rounds; its ranges are wide, and the page says which mode ran.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

ENGINES = ("local", "ddp", "ddp-view-static", "ddp-view-static-4MB", "ddp-view-static-100MB", "redundancy", "fsdp2")
ROWS = ("ddp", "zero1", "zero2", "zero3")
OURS = tuple(f"{who}-{row}" for who in ("plait", "plait/shm") for row in ROWS)
COMPILED = ("ddp/compiled", "fsdp2/compiled", "plait/compiled-ddp", "plait/compiled-zero3", "plait-ddp", "plait-zero3")
QUICK_ENGINES = ("local", "ddp", "ddp-view-static", "fsdp2")
QUICK_OURS = tuple(f"{who}-{row}" for who in ("plait", "plait/shm") for row in ("ddp", "zero1", "zero3"))
QUICK_PLANS = ("torch-blocks", "torch-blocks-shared", "torch-loss-shared", "plait-tensor", "plait/shm-tensor")
QUICK_ORDERS = ("torch-gpipe", "torch-1f1b", "torch-zbv", "plait-gpipe", "plait-1f1b", "plait-zbv")
QUICK_ORDERS += tuple(f"plait/shm-{order}" for order in ("gpipe", "1f1b", "zbv"))


@dataclass(frozen=True)
class Suite:
    """A command, in full and quick, and the seconds after which it is stopped."""

    name: str
    script: str
    full: tuple[str, ...]
    quick: tuple[str, ...]
    deadline: float
    quick_deadline: float
    compiler: bool = False
    """Needs a C++ compiler."""

    def words(self, quick: bool) -> tuple[str, ...]:
        return (self.script, *(self.quick if quick else self.full))

    def seconds(self, quick: bool) -> float:
        return self.quick_deadline if quick else self.deadline


EVERY = (
    Suite(
        "collectives",
        "collectives/main.py",
        ("--rounds", "7"),
        ("--rounds", "3", "--sizes", "4KB", "1MB", "16MB"),
        1800,
        600,
    ),
    Suite(
        "data_parallel",
        "data_parallel/main.py",
        ("--only", *ENGINES, *OURS),
        ("--rounds", "3", "--no-memory", "--only", *QUICK_ENGINES, *QUICK_OURS),
        3600,
        1200,
    ),
    Suite(
        "compiled",
        "data_parallel/main.py",
        ("--suite", "compiled", "--model", "gpt256", "--no-memory", "--only", *COMPILED),
        ("--suite", "compiled", "--model", "gpt256", "--no-memory", "--rounds", "3", "--only", *COMPILED),
        1800,
        900,
        compiler=True,
    ),
    Suite(
        "tensor",
        "tensor/main.py",
        ("--model", "both"),
        ("--model", "both", "--rounds", "3", "--only", *QUICK_PLANS),
        1800,
        600,
    ),
    Suite(
        "dispatch",
        "tensor/main.py",
        ("--what", "dispatch"),
        ("--what", "dispatch", "--rounds", "3", "--repeats", "100"),
        300,
        200,
    ),
    Suite(
        "pipeline",
        "pipeline/main.py",
        (),
        ("--rounds", "3", "--only", *(f"{order}-balanced" for order in QUICK_ORDERS), "--split", "balanced"),
        3600,
        600,
    ),
    Suite(
        "overhead",
        "overhead/main.py",
        (),
        ("--rounds", "3"),
        1200,
        500,
    ),
    Suite(
        "checkpoint",
        "checkpoint/main.py",
        (),
        ("--rounds", "3", "--size", "middle", "--no-memory"),
        1800,
        300,
    ),
    Suite(
        "loading",
        "loading/main.py",
        (),
        (),
        600,
        300,
    ),
)
NAMES = tuple(suite.name for suite in EVERY)


def deepspeed(python: str) -> Suite:
    """DeepSpeed under the interpreter of an environment that has it."""
    start = ("--python", python)
    return Suite("deepspeed", "deepspeed_peer/main.py", start, (*start, "--rounds", "3"), 1800, 600)


def chosen(only: tuple[str, ...], python: str) -> tuple[list[Suite], list[str]]:
    """The suites to run, and what to say about those that are left out; ValueError for a name that no suite has."""
    every = [*EVERY, *([deepspeed(python)] if python else [])]
    names = [suite.name for suite in every]
    if unknown := [name for name in only if name not in names]:
        fix = "; deepspeed needs --deepspeed PYTHON" if "deepspeed" in unknown else ""
        raise ValueError(f"no suite is called {', '.join(unknown)}; there are: {', '.join(names)}{fix}")
    suites = [suite for suite in every if not only or suite.name in only]
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        return suites, []
    left = [
        f"{suite.name} is left out: it needs a C++ compiler (Debian: apt install g++)"
        for suite in suites
        if suite.compiler
    ]
    return [suite for suite in suites if not suite.compiler], left
