"""One host: ``launch(config, body, command)`` gives every rank a ``Comm`` and runs ``body`` on it.

    torchrun's variables are set        this process is a rank: join, run, leave
    world=thread                        every rank is a thread of this process
    otherwise                           an agent starts ranks, each of which runs ``command`` again

So the same command runs alone, under torchrun, and under any launcher that sets torchrun's variables.  On one host
only the ranks' own connections on loopback listen on a port.  Ranks never outlive their launcher: the kernel ends them.
"""

import contextlib
import hashlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.files.writing import told
from plait.comm import run_threads
from plait.comm.base import Comm
from plait.comm.environment import launched
from plait.messages.ended import to_its_end
from plait.messages.escape import say
from plait.referee.sanitize.collectives import check_collectives
from plait.run.config.machine import MachineConfig, idle_devices, resolve_device, resolve_world
from plait.run.job.sections import flags
from plait.run.launch.agent import Limits, RankAgent
from plait.run.launch.failure import LAUNCHER, leave_note
from plait.run.launch.fork_server import ForkServer
from plait.run.launch.signals import Asked, announced, heard

Body = Callable[[Comm], int]

LAUNCHER_FIRST = 5.0
"""Seconds by which a launcher that got the same signal ends its ranks before they end themselves."""


def launch(
    config: MachineConfig,
    body: Body,
    command: Sequence[str],
    limits: Limits | None = None,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Runs ``body`` on every rank and returns the exit code; rank 0's output is shown, and any rank's error.

    Args:
        command: the words after ``python`` in the command that started this very process: run again, it must come here
            again, now as a rank.
        limits: restarts after a fault, and the time that a signal leaves to ``body``, which must check the ``stop`` of
            each step's result; None: no restart, no time.
        settings: all flags of the run, which are the same on all ranks; None: those of the config.
    """
    limits = limits or Limits()
    first = LAUNCHER not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0"
    if first and (why := idle_devices(config)):
        say(f"plait: {why}\n")
    run = (lambda comm: body(check_collectives(comm))) if config.check_collectives else body
    if is_a_rank(config):
        return _be_a_rank(config, run, limits, flags(config) if settings is None else settings)
    if config.world == "thread":
        return _be_all_ranks(config, run, limits)
    return _start_ranks(config, command, limits)


def is_a_rank(config: MachineConfig) -> bool:
    """True if a launcher, plait's or torchrun's, has started this process as one of the ranks.  ValueError if only some
    of a rank's variables are set, or Slurm or mpirun has started the command repeatedly."""
    fix = "start one, which starts all ranks of this host (srun -n 1), or one torchrun on each host"
    return launched(ranks=config.parsed_mesh.size, fix=fix)


def _be_a_rank(config: MachineConfig, body: Body, limits: Limits, settings: Mapping[str, Any]) -> int:
    from plait.comm.process import ProcessComm
    from plait.run.watch.joined import watch_joined

    torch.set_num_threads(config.threads)
    device = resolve_device(config)
    try:
        mesh, same = config.parsed_mesh, shared_settings(settings)
        shared = resolve_world(config) == "shared_memory"
        comm = ProcessComm.from_env(mesh, device=device, deadline=config.deadline, facts=same, shared_memory=shared)
    except (ConnectionError, TimeoutError) as error:  # the port is taken, or ranks never came
        raise ValueError(str(error)) from error
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if comm.rank:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if limits.grace:
            grace = limits.grace + (LAUNCHER_FIRST if LAUNCHER in os.environ else 0)
            stack.enter_context(heard(Asked(lambda number: _ask([comm], number), grace=grace)))
        stack.callback(comm.end_observers)
        watch_joined(comm)
        with to_its_end():
            code = body(comm)
    comm.close()
    # Rank 0 speaks for all, perhaps long after the others are done (a reference run).  They leave with 0, because the
    # launcher stops all ranks at the first other code.
    if comm.rank or not code:
        return 0
    leave_note("", final=True)
    return code


PLACES = {"config", "data", "out", "json", "export", "tensorboard", "wandb", "workers", "world"}
"""Settings in which hosts may differ: places of files, and tasks of one rank only."""


def shared_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns settings that must be the same on all ranks, by flag, and the texts of a job's file and of plugins."""
    given = {name: value for name, value in settings.items() if name not in PLACES}
    facts = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    job = str(given.get("job") or "").rpartition(":")[0]
    for name, places in (("job", (job,)), ("plugin", given.get("plugin", ()))):
        if files := [file for file in map(Path, places) if file.is_file()]:
            digests = (hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files)
            facts[f"--{name}"] = ", ".join(f"{file.name} {own}" for file, own in zip(files, digests, strict=True))
    return facts


def _ask(comms: Sequence[Comm], number: signal.Signals) -> None:
    """Asks the ranks to end; they agree on it at the end of their step."""
    for comm in comms:
        comm.stop_signal = int(number)


def _be_all_ranks(config: MachineConfig, body: Body, limits: Limits) -> int:
    comms: list[Comm] = []

    def rank(comm: Comm) -> int:
        comms.append(comm)
        return body(comm)

    def ask(number: signal.Signals) -> None:
        say(announced(number, limits.grace))
        _ask(comms, number)

    with _left_at_once(Asked(ask, grace=limits.grace)), contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads)
        device, deadline = resolve_device(config), config.deadline
        return max(run_threads.run(config.parsed_mesh, rank, device=device, deadline=deadline))


@contextlib.contextmanager
def _left_at_once(asked: Asked) -> Iterator[None]:
    """Makes a signal end this process without the interpreter's own exit, in which a thread that is still inside torch
    would abort it."""
    with heard(asked):
        try:
            yield
        except SystemExit as left:
            if threading.current_thread() is not threading.main_thread() or asked.number is None:
                raise
            say(f"plait: stopped by {asked.number.name}{', --grace is over' * asked.late}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(str(left.code)))


def _start_ranks(config: MachineConfig, command: Sequence[str], limits: Limits) -> int:
    environment = {**os.environ, **rank_environment(config)}
    with contextlib.ExitStack() as stack:
        with told(os.environ.get("TMPDIR", "/tmp"), 0):
            private = tempfile.TemporaryDirectory(prefix="plait-ranks-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(private))
        server = ForkServer(command, environment, config.deadline)
        stack.callback(server.close)
        agent = RankAgent(config.parsed_mesh, folder, server, limits, config.deadline)
        stack.enter_context(heard(agent.asked))
        try:
            agent.run()
        except SystemExit as left:
            say(f"plait: stopped by {signal.Signals(int(str(left.code)) - 128).name}, with all ranks\n")
            return int(str(left.code))
        except ConnectionError as error:
            say(f"plait: {error}\n")
            return 128 + agent.asked.number if agent.asked.number else agent.code or 1
        return agent.code


def rank_environment(config: MachineConfig, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables that ranks get in addition to the launcher's; the user's own settings stay as they are.

    - All ranks are on this host, so they talk over loopback, whatever the hostname resolves to.
    - glibc returns large freed blocks to the kernel, to be faulted in again at the next use.  A unit's storage is freed
      and refilled in every step, so that is switched off (docs/log.md).
    - When a rank dies, plait names it; gloo would also log the closed connection on all others.
    """
    wanted = {
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "OMP_NUM_THREADS": str(config.threads),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 42),
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {LAUNCHER: str(os.getpid()), **{k: v for k, v in wanted.items() if k not in given}}
