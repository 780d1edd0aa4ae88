"""Worlds: the same code over processes, threads or nothing.

.. code-block:: text

    base.py            Comm: what may be asked; the same checks and ledger for all     start here
    call.py            one operation, and what is refused before anything moves
    fold.py            the order in which a group's values are added
    ledger.py          one line per message
    thread.py          ranks are threads         tests, notebooks, lessons
    meeting.py         where the threads meet
    process.py         ranks are processes       torch.distributed: gloo, nccl
    join.py            how processes find each other
    messages.py        messages under way between them
    failure.py         what a rank says when an operation fails, and hears from the others
    trace.py           one rank, nothing moves   for the planner
    ring.py, tree.py   the classic algorithms, written with send and recv
    script.py          a small face for scripts
"""

from plait.comm.base import DONE, Comm, MismatchError, Work
from plait.comm.fold import ordered_sum
from plait.comm.ledger import Ledger
from plait.comm.process import ProcessComm
from plait.comm.script import ScriptWorld, init
from plait.comm.thread import AbortedError, ThreadWorld, run
from plait.comm.trace import TraceComm

__all__ = [
    "DONE",
    "AbortedError",
    "Comm",
    "Ledger",
    "MismatchError",
    "ProcessComm",
    "ScriptWorld",
    "ThreadWorld",
    "TraceComm",
    "Work",
    "init",
    "ordered_sum",
    "run",
]
