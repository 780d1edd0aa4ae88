"""Worlds: the same code over processes, threads or nothing.

.. code-block:: text

    base.py            Comm: what may be asked; the same checks and ledger for all     start here
    operation.py       one operation, its group, and what is refused before anything moves
    prepared.py        one that is checked once and begun in every step
    ordered_reduce.py  the order in which a group's values are added
    ledger.py          one line per message
    agree.py           small agreements: rows of numbers, checksums, bytes, errors
    check.py           what each rank means, compared before it runs
    header.py          the shape of a message, as a small message ahead of it
    observer.py        who is told of steps, operations and waits

    thread.py          ranks are threads         tests, notebooks, lessons
    rendezvous.py      where the threads meet

    process.py         ranks are processes       torch.distributed
    init_process.py    how processes find each other
    environment.py     the variables that say who a process is
    slurm.py           the same in Slurm's words
    peer.py            who a rank is
    meeting.py         the ranks of a world, met in a store and compared
    deadline.py        the clock of deadlines; a call that may never return, given one
    transport.py       what moves single messages: started, waited for, failing
    gloo.py            over sockets
    nccl.py            between GPUs
    hosts.py           both: memory inside of each host, sockets across
    padded.py          pieces of unequal length in collectives of equal ones
    p2p_work.py        what is held of messages under way
    failures.py        what a rank reports when an operation fails

    trace.py           one rank, nothing moves   for the planner
"""

from plait.comm.base import DONE, Comm, MismatchError, Work
from plait.comm.ledger import Ledger
from plait.comm.observer import Observer
from plait.comm.ordered_reduce import ordered_sum
from plait.comm.process import ProcessComm
from plait.comm.thread import AbortedError, ThreadWorld, run
from plait.comm.trace import TraceComm

__all__ = [
    "DONE",
    "AbortedError",
    "Comm",
    "Ledger",
    "MismatchError",
    "Observer",
    "ProcessComm",
    "ThreadWorld",
    "TraceComm",
    "Work",
    "ordered_sum",
    "run",
]
