"""Two hosts on one Linux machine, with a link between them that can be cut, for real network faults.

    host a  10.77.0.1 ◄──── a pair of virtual interfaces ────► 10.77.0.2  host b

Each is a set of the kernel's namespaces, with its own network, hostname, processes and /dev/shm, so ranks on one can
neither see nor signal those on the other.  Files are common, as on a cluster.  Needs root, ``unshare``, ``nsenter`` and
``ip`` (util-linux, iproute2).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plait.run.launch.fork_server import PYTHON, die_with

NEEDED = ("unshare", "nsenter", "ip", "mount")
ADDRESSES = {"plait-a": "10.77.0.1", "plait-b": "10.77.0.2"}
STORE_PORT = 29500
"""Each host has all ports to itself."""
LINK = "plait-link"
PATIENCE = 20.0
"""Seconds for what takes a moment."""


def missing() -> str:
    """Why there can be no hosts here; empty if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "two hosts on one machine need Linux and root"
    if absent := [name for name in NEEDED if shutil.which(name) is None]:
        return f"two hosts on one machine need {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else "this system makes no namespaces"


@dataclass(frozen=True)
class NamespaceHost:
    """One of them."""

    name: str
    address: str
    pid: int
    """The id of its first process, as the machine counts."""

    def program(self, *words: str) -> list[str]:
        """A command that runs there."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", "--", *words]

    def run(self, *words: str) -> None:
        """Runs it to its end; OSError if it fails."""
        _run(*self.program(*words))


@dataclass(frozen=True)
class TwoHosts:
    """Both, and the link."""

    a: NamespaceHost
    """That of rank 0."""
    b: NamespaceHost

    def cut(self) -> None:
        """From now on nothing passes between them."""
        self.a.run("ip", "link", "set", LINK, "down")

    def mend(self) -> None:
        """The link is there again."""
        self.a.run("ip", "link", "set", LINK, "up")

    def torchrun(self, *words: str, ranks: Sequence[int] = (1, 2)) -> list[list[str]]:
        """The command of each host, a's first; together they run ``words`` with so many ranks on each."""
        run = (*PYTHON, "-m", "torch.distributed.run", f"--nnodes={len(ranks)}")
        meet = (f"--master-addr={self.a.address}", f"--master-port={STORE_PORT}")
        return [
            host.program(*run, *meet, f"--node-rank={node}", f"--nproc-per-node={count}", *words)
            for node, (host, count) in enumerate(zip((self.a, self.b), ranks, strict=True))
        ]


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Makes them, and afterwards removes them, with all their processes.

    Raises:
        OSError: they cannot be made.
    """
    if why := missing():
        raise OSError(why)
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in ADDRESSES.items()))
    started = [_start(name, names) for name in ADDRESSES]
    try:
        pids = [_first_process(child) for child in started]
        a, b = (NamespaceHost(name, ip, pid) for (name, ip), pid in zip(ADDRESSES.items(), pids, strict=True))
        into_a = ("nsenter", "--target", str(a.pid), "--net", "ip", "link")
        _run(*into_a, "add", LINK, "type", "veth", "peer", "name", "plait-peer")
        _run(*into_a, "set", "plait-peer", "netns", str(b.pid))
        b.run("ip", "link", "set", "plait-peer", "name", LINK)
        for host in (a, b):
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", LINK)
            host.run("ip", "link", "set", LINK, "up")
        yield TwoHosts(a, b)
    finally:
        for child in started:
            with child:
                child.kill()  # unshare --kill-child: and so its first process, and so all of them


def _start(name: str, names: Path) -> subprocess.Popen[str]:
    """A host's first process, which waits for ever once the host is made."""
    script = f"""
        set -e
        hostname {name}
        mount -t tmpfs tmpfs /dev/shm
        mount --bind "$1" /etc/hosts
        mount -t proc proc /proc
        ip link set lo up
        echo ready
        exec sleep infinity
    """
    apart = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child")
    return subprocess.Popen(
        [*apart, "sh", "-c", script, "sh", str(names)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(die_with, os.getpid()),
    )


def _first_process(unshare: subprocess.Popen[str]) -> int:
    """Once the host is there; OSError with what was said if it never is."""
    assert unshare.stdout is not None and unshare.stderr is not None
    if unshare.stdout.readline() != "ready\n":
        raise OSError(f"a host could not be made: {unshare.stderr.read().strip()}")
    return int(Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()[0])


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
