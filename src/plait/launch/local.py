"""One host: ``launch(config, body, command)`` gives every rank a ``Comm`` and runs ``body`` on it.

    torchrun's variables are set        this process is a rank: join, run, leave
    world=thread                        every rank is a thread of this process
    otherwise                           torch's elastic agent starts ``command`` once per rank, with these variables

So the same command runs alone, under torchrun, and under whatever sets torchrun's variables.  Processes that it
starts never outlive it: the agent stops them when one fails or a signal comes, and each watches its parent in case
that is killed.
"""

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from plait.comm import thread
from plait.comm.base import Comm
from plait.comm.check import check_collectives
from plait.comm.init_process import VARIABLES
from plait.config import MachineConfig, resolve_device
from plait.launch.failure import LAUNCHER, explain, recorded

Body = Callable[[Comm], int]


def launch(config: MachineConfig, body: Body, command: Sequence[str]) -> int:
    """Runs ``body`` on every rank and returns the exit code; rank 0's output is shown, and any rank's error.

    Args:
        command: what started this very process: run again, it must come here again, now as a rank.

    Raises:
        ValueError: the port is taken, or torchrun started another number of ranks than the mesh has.
    """
    if config.check_collectives:
        body = _checked(body)
    if all(name in os.environ for name in VARIABLES):
        return _be_a_rank(config, body)
    if config.world == "thread":
        with _stopped_cleanly(), contextlib.ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.threads)
            device, deadline = resolve_device(config.device), config.deadline
            return max(thread.run(config.parsed_mesh, body, device=device, deadline=deadline))
    return _start_ranks(config, command)


def _checked(body: Body) -> Body:
    return lambda comm: body(check_collectives(comm))


def _be_a_rank(config: MachineConfig, body: Body) -> int:
    from plait.comm.process import ProcessComm

    if LAUNCHER in os.environ:
        threading.Thread(target=_leave_with, args=(int(os.environ[LAUNCHER]),), daemon=True).start()
    torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # type: ignore[assignment]
    try:
        comm = ProcessComm.from_env(config.parsed_mesh, device=device, deadline=config.deadline)
    except (ConnectionError, TimeoutError) as error:  # a port that is taken, ranks that never came
        raise ValueError(str(error)) from error
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if comm.rank:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        code = body(comm)
    comm.close()
    # Rank 0 speaks for all, perhaps long after the others are done (a reference run).  They leave with 0, because the
    # agent stops all ranks at the first other code.
    return code if comm.rank == 0 else 0


def _leave_with(parent: int) -> None:
    """Ends this process soon after its launcher; a killed launcher cannot stop its ranks."""
    while os.getppid() == parent:
        time.sleep(0.25)
    os._exit(1)


@contextlib.contextmanager
def _stopped_cleanly() -> Iterator[None]:
    """Ctrl-C and SIGTERM end this process at once: in the interpreter's own exit, a thread that is still inside torch
    would abort it."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        sys.stderr.write(f"plait: stopped by {number.name}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_ranks(config: MachineConfig, command: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if config.port:
        check_port(config.port)
    mesh, env = config.parsed_mesh, shutil.which("env")
    if env is None:
        raise ValueError("no `env` command on the PATH: plait sets its ranks' environment with it")
    settings = [f"{name}={value}" for name, value in rank_environment(config).items()]
    # The agent substitutes ${local_rank} in arguments: a user's dollar must stay one.
    arguments = [text.replace("$", "$$") for text in (*settings, *command)]
    with tempfile.TemporaryDirectory(prefix="plait-") as folder, _agent_kept_quiet():
        plan = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=mesh.size,
            run_id=f"plait-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{config.port}",
            rdzv_configs={"timeout": 60},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.05,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        plan.shutdown_timeout = 5  # a torch that has no such field does not look for it
        try:
            elastic_launch(plan, env)(*arguments)
        except ChildFailedError as error:
            failures = [recorded(r, f.exitcode, f.error_file_data) for r, f in error.failures.items()]
            text, code = explain(failures, str(mesh))
            sys.stdout.flush()
            sys.stderr.write(text)
            return code
        except SignalException as stopped:
            sys.stderr.write(f"plait: stopped by {stopped.sigval.name}, with all ranks\n")
            return 128 + stopped.sigval.value
    return 0


def rank_environment(config: MachineConfig, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that ranks get besides the launcher's; what the user has set is left alone.

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
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        wanted["GLOO_SOCKET_IFNAME"] = loopback[0]
    return {LAUNCHER: str(os.getpid()), **{k: v for k, v in wanted.items() if k not in given}}


def check_port(port: int) -> None:
    """Refuses a port that is in use, or that this user may not open."""
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ValueError(
                f"port {port} cannot be opened ({reason}): give another --port, or 0 for a free one"
            ) from error


@contextlib.contextmanager
def _agent_kept_quiet() -> Iterator[None]:
    """Without elastic's own log of failures, and with the signal handlers of before, which it does not restore."""
    here = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if here else ():
            stack.callback(signal.signal, number, signal.getsignal(number))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        yield
