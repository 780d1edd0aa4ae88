"""Shared by all tests: cases next to the tests are imported by name, and torch computes with one thread.

One thread everywhere, because the thread count changes sums, and because ranks and workers share the cores.
``layers.py`` says in which layer a test runs; ``-m fast``, ``-m full`` and ``-m nightly`` choose one.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from plait.comm import ThreadWorld
from plait.comm.deadline import clock
from plait.run.job.families import FAMILIES
from plait.run.job.optimizer import OPTIMIZERS
from plait.schedule.orders import ORDERS
from plait.sharded.rules import RULES
from plait.table.mesh import Mesh
from plait.table.tensor_plan import KINDS
from plait.table.tensor_plan import MESSAGES as SENDS
from plait.tensor.cut_weight import LINEARS

TESTS = Path(__file__).parent
BESIDE_TESTS = sorted({file.parent for file in TESTS.rglob("*.py") if not file.name.startswith(("test_", "conftest."))})
"""Folders with modules that tests import: cases, and scripts that tests run in processes of their own."""

settings.register_profile("busy", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # in place of 200 ms for each example; under CI the parent tries the same ones each time
sys.path[:0] = map(str, BESIDE_TESTS)
torch.set_num_threads(1)
cores = sorted(os.sched_getaffinity(0))
if os.environ.get("PYTEST_XDIST_WORKER_COUNT") == str(len(cores)):  # a core each: ranks that are threads wait less
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each item with its layer, before ``-m`` chooses; long files come first."""
    layers = import_module("layers")
    nodes = {item: item.path.relative_to(TESTS).as_posix() + item.nodeid[item.nodeid.index("::") :] for item in items}
    found = layers.layers_of({nodes[item]: case_of(item) for item in items})
    for item in items:
        item.add_marker(found[nodes[item]])
    items.sort(key=lambda item: layers.place_of(nodes[item]))


def case_of(item: pytest.Item) -> tuple[str, ...]:
    """The ids of its values, one for each time that the test is parametrized."""
    return tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()


@pytest.fixture(autouse=True, scope="session")
def heard_signals() -> Iterator[None]:
    """Signals as at a terminal, here and in the processes that tests start: a shell lets what it starts in the
    background (``make test &``) ignore SIGINT, and ``nohup`` SIGHUP."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in usual if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True, scope="session")
def patient_worlds() -> Iterator[None]:
    """A deadline of 20 s and more only ends a hang: 200 s on a busy machine. pytest ends a test at 240."""
    begin = ThreadWorld.__init__

    def begin_patiently(world: ThreadWorld, mesh: Mesh, deadline: float = 30.0, *rest: Any, **more: Any) -> None:
        begin(world, mesh, deadline if deadline < 20 else max(200.0, deadline), *rest, **more)

    ThreadWorld.__init__ = begin_patiently  # type: ignore[method-assign]
    yield
    ThreadWorld.__init__ = begin  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def awake() -> None:
    """The clock of waits does not take the tests before this one for a pause of the process."""
    clock.__init__()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a program; what is left of it when the test is over is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(*command: str, **settings: Any) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        processes.append(subprocess.Popen(command, **pipes | settings))
        return processes[-1]

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            process.kill()


@pytest.fixture
def compiler_in_threads() -> None:
    """torch.compile runs where ranks are threads: torch 2.11 built for CUDA crashes now and then if there is no GPU."""
    if torch.__version__ < (2, 13) and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("torch 2.11 built for CUDA crashes when threads compile on a host without a GPU")


@pytest.fixture
def tables_as_they_were() -> Iterator[None]:
    """Rows that a test adds, as a user would from outside the package, are taken out again."""
    tables: list[dict[Any, Any]] = [ORDERS, RULES, KINDS, SENDS, LINEARS, FAMILIES, OPTIMIZERS]
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)
