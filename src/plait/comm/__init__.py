"""Worlds: the same code over processes or threads.

.. code-block:: text

    base.py              Comm: the operations of a world, with the same checks and ledger for all   start here
    operation.py         one operation and its group; operations that are prepared once and begun in every step
    checks.py            refuses wrong tensors, groups, roots and reductions before anything moves
    ordered_reduce.py    the order in which a group's values are added
    ledger.py            one line per message
    agree.py             small agreements: rows of numbers
    texts.py             gathers texts, bytes, checksums and errors of all ranks
    padded.py            pieces of unequal length in collectives that need equal ones
    header.py            the shape of a message, as a small message ahead of it
    observer.py          is notified of steps, operations and waits

    thread.py            ranks are threads         tests, notebooks, lessons
    rendezvous.py        barriers and mailboxes of threads
    run_threads.py       runs a function on one thread per rank

    process.py           ranks are processes       torch.distributed
    init_process.py      joins a world: its store, its ranks, torch's process group
    environment.py       variables of torchrun, Slurm, SkyPilot and Modal, and the device of a rank
    process_identity.py  the process of a rank, as it describes itself; the hosts of a world
    store_rendezvous.py  the ranks of a world meet in a store and compare themselves
    deadline.py          the clock of deadlines; gives a deadline to a call that may never return
    transport.py         moves single messages: starts, waits, fails; the seam to shared memory
    gloo.py              over sockets
    nccl.py              between GPUs
    failures.py          reports of ranks whose operation failed
"""

from plait.comm.base import DONE, Comm, MismatchError, Work
from plait.comm.ledger import Ledger
from plait.comm.observer import Observer
from plait.comm.ordered_reduce import ordered_sum
from plait.comm.process import ProcessComm
from plait.comm.rendezvous import AbortedError
from plait.comm.run_threads import run
from plait.comm.thread import ThreadWorld

__all__ = [
    "DONE",
    "AbortedError",
    "Comm",
    "Ledger",
    "MismatchError",
    "Observer",
    "ProcessComm",
    "ThreadWorld",
    "Work",
    "ordered_sum",
    "run",
]
