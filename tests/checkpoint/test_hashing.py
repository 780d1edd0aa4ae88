"""A file's digest is that of its parts' digests, whoever took them, in whatever order."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from itertools import product

import pytest
from blake3 import blake3

from plait.checkpoint.hashing import PART, Hasher, digest_of, threads_for

SIZES = (0, 1, PART - 1, PART, PART + 1, 3 * PART + 5)
CONTENT = random.Random(0).randbytes(max(SIZES))


def naive(content: bytes) -> str:
    """As the module's docstring says it; a file of no bytes has one part of none."""
    parts = [content[start : start + PART] for start in range(0, len(content), PART)] or [b""]
    return blake3(b"".join(blake3(part).digest() for part in parts)).hexdigest()


def read_from(content: bytes, start: int, into: memoryview) -> None:
    assert start + len(into) <= len(content)
    into[:] = content[start : start + len(into)]


@pytest.mark.parametrize("size", SIZES)
def test_writers_and_readers_make_the_same_digest(size: int) -> None:
    content = CONTENT[:size]
    expected = naive(content)
    for chunk, threads in product((1 << 20, PART, 3 * PART // 2), (1, 2, 3, 8)):
        read = digest_of(size, chunk, threads, partial(read_from, content))
        assert read == expected, (chunk, threads)
    for block in (PART - 7, PART, 2 * PART + 1):
        hasher = Hasher()
        for start in range(0, size, block):
            hasher.update(memoryview(content)[start : start + block])
        assert hasher.hexdigest() == expected, block


def test_every_byte_and_the_order_of_the_parts_count() -> None:
    content, seen = bytearray(CONTENT[: 2 * PART + 3]), set[str]()
    changed = (0, PART - 1, PART, 2 * PART + 2)
    for at in changed:
        content[at] ^= 1
        damaged = bytes(content)
        seen.add(digest_of(len(damaged), 1 << 20, 2, partial(read_from, damaged)))
        content[at] ^= 1
    swapped = content[PART : 2 * PART] + content[:PART] + content[2 * PART :]
    seen |= {naive(bytes(content)), naive(bytes(swapped))}
    assert len(seen) == len(changed) + 2


def test_an_error_of_any_thread_is_raised_and_no_further_part_begins() -> None:
    begun: list[int] = []

    def read(start: int, into: memoryview) -> None:
        begun.append(start)
        if start == PART:
            raise OSError("a bad sector")
        time.sleep(0.05)

    with pytest.raises(OSError, match="a bad sector"):
        digest_of(64 * PART, PART, 2, read)
    assert len(begun) < 8
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("plait.hash")]


def test_ranks_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)), raising=False)
    assert [threads_for(ranks) for ranks in (1, 2, 3, 5, 12, 40)] == [8, 6, 4, 2, 1, 1]
