"""A file's digest is made of its parts' digests, in any blocks in which it is read or written."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3

from plait.checkpoint.hashing import PART, Hasher, digest_of


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART + 5])
def test_writers_and_readers_make_the_same_digest(size: int) -> None:
    content = random.Random(0).randbytes(size)
    parts = [content[start : start + PART] for start in range(0, size, PART)] or [b""]
    expected = blake3(b"".join(blake3(part).digest() for part in parts)).hexdigest()

    def read(start: int, into: memoryview) -> None:
        into[:] = content[start : start + len(into)]

    assert {digest_of(size, chunk, read) for chunk in (1 << 20, PART, 3 * PART // 2)} == {expected}
    for block in (PART - 7, PART, 2 * PART + 1):
        hasher = Hasher()
        for start in range(0, size, block):
            hasher.update(memoryview(content)[start : start + block])
        assert hasher.hexdigest() == expected, block
