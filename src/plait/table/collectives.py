"""The bytes that a collective moves.

Bytes are *logical*: those that the collective needs mathematically, not those that a transport happens to send.
``bytes`` is the size of the whole array (as nccl-tests counts it), ``sent`` the bytes that one rank must send if every
byte goes straight to its destination; for equal pieces a ring sends the same.

    kind            whole array S               sent per rank, group of n
    all_gather      a piece on each -> S        (n-1) S/n
    reduce_scatter  S pending -> a piece        (n-1) S/n
    all_reduce      S pending -> S              2 (n-1) S/n
    all_to_all      a row of pieces on each     (n-1) S/n
    broadcast       S on the root -> S          (n-1) S on the root, 0 elsewhere
    reduce          S pending -> S on the root  0 on the root, S elsewhere
    scatter         S on the root -> a piece    (n-1) S/n on the root, 0 elsewhere
    gather          a piece on each -> S        0 on the root, S/n elsewhere
    send            S -> one other rank         S on the sender, 0 on the receiver (``recv``)

Source: the volume terms of Thakur, Rabenseifner & Gropp (2005) and the nccl-tests performance notes.
"""

from dataclasses import dataclass

CUT_EVENLY = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")
"""The kinds for which each rank has an equal piece of the array."""

UPDATE = "update"
"""The phase of messages around an update of whole parameters."""


@dataclass(frozen=True)
class Note:
    """The purpose of a message: the phase of the step, the unit it serves, the microbatch (-1: none)."""

    phase: str = ""
    unit: str = ""
    microbatch: int = -1


@dataclass(frozen=True)
class Entry:
    """One line of a ledger, measured or predicted; equal lines are equal objects."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    """The size of the whole array."""
    sent: int
    """The bytes that this rank sends."""
    note: Note = Note()


def bytes_sent(kind: str, size: int, ranks: int, *, root: bool = False) -> int:
    """Returns the bytes that one rank sends in a collective over ``ranks`` ranks on a whole array of ``size`` bytes.

    Raises:
        ValueError: an array that the group cannot cut into equal pieces.
    """
    if kind in ("barrier", "recv"):
        return 0
    if kind == "send":
        return size
    if kind == "broadcast":
        return (ranks - 1) * size if root else 0
    if kind == "reduce":
        return 0 if root else size
    if kind == "all_reduce":
        return 2 * (ranks - 1) * size // ranks
    piece, rest = divmod(size, ranks)
    if rest:
        raise ValueError(f"{kind} of {size} bytes over {ranks} ranks: the pieces are not equal")
    if kind == "scatter":
        return (ranks - 1) * piece if root else 0
    if kind == "gather":
        return 0 if root else piece
    return (ranks - 1) * piece


def bus_factor(kind: str, ranks: int) -> float:
    """The ratio of bus bandwidth to algorithm bandwidth, as nccl-tests defines it (size S of the whole array)."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if kind in CUT_EVENLY else 1.0
