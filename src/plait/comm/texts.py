"""Gathers texts, bytes, checksums and errors of all ranks, and lists their differences.

Every member of the group calls the same function, as with any collective.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from plait.comm.agree import gather_ints
from plait.comm.base import Comm
from plait.messages.ended import OtherRankError
from plait.messages.escape import one_line, printable
from plait.table.collectives import Note
from plait.table.mesh import AXES

LONGEST_ERROR = 1024
"""The most bytes of an error's text that reach the other ranks."""


def same_everywhere(comm: Comm, row: Sequence[int], axes: Sequence[str], note: Note) -> list[bool]:
    """For each column, True if all members have the same number; costs no more with more members."""
    low = torch.tensor(row, dtype=torch.int64, device=comm.device)
    high = low.clone()
    comm.all_reduce(low, axes, "min", note).wait()
    comm.all_reduce(high, axes, "max", note).wait()
    return list((low == high).tolist())


def same_tensors(comm: Comm, tensors: Iterable[Tensor], axes: Sequence[str], note: Note) -> bool:
    """True if all members' tensors have the same bits, by a checksum."""
    whole = (t.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in tensors)
    mine = zlib.crc32(b"".join(bytes(t.numpy().data) for t in whole))
    return len({checksum for (checksum,) in gather_ints(comm, [mine], axes, note)}) == 1


def gather_texts(comm: Comm, text: str, note: Note, error: BaseException | None = None) -> list[str]:
    """Gathers every rank's text (of any length), by rank, on every rank; raises as ``check_together`` does."""
    data = text.encode()
    told = gather_ints(comm, [len(data), error is not None], AXES, note)
    _raise_first(comm, error, AXES, [bad for _, bad in told])
    sizes = [size for size, _ in told]
    longest = max(1, *sizes)
    rows = torch.empty((len(sizes), longest), dtype=torch.uint8, device=comm.device)
    comm.all_gather(rows, _bytes(comm, data.ljust(longest, b"\0")), AXES, note).wait()
    return [row[:size].numpy().tobytes().decode() for row, size in zip(rows.cpu(), sizes, strict=True)]


def broadcast_text(comm: Comm, text: str, note: Note) -> str:
    """Returns rank 0's text (of any length) on every rank; texts of other ranks are ignored."""
    return broadcast_bytes(comm, text.encode(), note).decode()


def broadcast_bytes(comm: Comm, data: bytes, note: Note) -> bytes:
    """Returns rank 0's bytes (of any number) on every rank; bytes of other ranks are ignored."""
    size = gather_ints(comm, [len(data)], AXES, note)[0][0]
    sent = _bytes(comm, data) if not comm.rank else torch.empty(size, dtype=torch.uint8, device=comm.device)
    comm.broadcast(sent, AXES, 0, note).wait()
    return sent.cpu().numpy().tobytes()


def _bytes(comm: Comm, data: bytes) -> Tensor:
    """Returns bytes as uint8, on the world's device."""
    return (torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()).to(comm.device)


def differences(comm: Comm, fields: Mapping[str, str], note: Note) -> list[str]:
    """Lists the fields in which ranks differ: one sentence per field, with every value and its ranks, on every rank.

    It costs two messages of one number if all agree.
    """
    text = json.dumps(sorted(fields.items()))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    if all(same_everywhere(comm, [digest], AXES, note)):
        return []
    return differing({rank: dict(json.loads(row)) for rank, row in enumerate(gather_texts(comm, text, note))})


def differing(rows: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Returns the sentences of ``differences`` for the fields of each rank."""
    lines = []
    for field in dict.fromkeys(name for row in rows.values() for name in row):
        ranks: dict[str, list[int]] = {}
        for rank, row in rows.items():
            ranks.setdefault(row.get(field, "not there"), []).append(rank)
        if len(ranks) > 1:
            values = (f"{one_line(value, 90)} on {named(of_value)}" for value, of_value in ranks.items())
            lines.append(f"{field} is {', '.join(values)}")
    return lines


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0, 1, 2, ... (17 of them)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    some = ", ".join(map(str, ranks[:4]))
    return f"ranks {some}" if len(ranks) <= 4 else f"ranks {some}, ... ({len(ranks)} of them)"


def gather_bytes(comm: Comm, data: bytes) -> list[bytes] | None:
    """Gathers every rank's bytes (of any length), by rank, on rank 0; None elsewhere."""
    note = Note("collect")
    sizes = gather_ints(comm, [len(data)], AXES, note)
    if comm.rank > 0:
        comm.send(_bytes(comm, data), 0, note).wait()
        return None
    gathered = [data]
    for rank, (size,) in enumerate(sizes[1:], start=1):
        theirs = torch.empty(size, dtype=torch.uint8, device=comm.device)
        comm.recv(theirs, rank, note).wait()
        gathered.append(theirs.cpu().numpy().tobytes())
    return gathered


def check_together(comm: Comm, error: BaseException | None, axes: Sequence[str]) -> None:
    """Raises on every member if any has an error (a file, a NaN, ...): its own there, OtherRankError elsewhere."""
    _raise_first(comm, error, axes, [bad for (bad,) in gather_ints(comm, [error is not None], axes, Note("check"))])


def _raise_first(comm: Comm, error: BaseException | None, axes: Sequence[str], bad: Sequence[int]) -> None:
    """Raises the error of the first member that has one."""
    failed, ranks = [index for index, one in enumerate(bad) if one], comm.mesh.group(comm.rank, tuple(axes))
    if not failed:
        return
    mine = b"" if error is None else f"{type(error).__name__}: {error}".encode()[:LONGEST_ERROR]
    text = _bytes(comm, mine.ljust(LONGEST_ERROR, b"\0"))
    comm.broadcast(text, axes, failed[0], Note("check")).wait()
    if error is not None:
        raise error
    told = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    raise OtherRankError(f"rank {ranks[failed[0]]} failed: {printable(told)}")
