"""Buffers that are used again, and memory that a system does not give."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from plait.comm.gloo import GlooTransport
from plait.comm.operation import NO_NOTE, Group, Operation
from plait.shared_memory.segment import Segment


def test_a_spare_buffer_is_of_the_same_device() -> None:
    """A world of GPUs reduces tensors of the CPU too."""
    transport = object.__new__(GlooTransport)
    transport._spare = {}
    group = Group(("shard",), (0, 1), 0, (2,))
    for device in ("cpu", "meta", "cpu"):
        mine = torch.empty(4, device=device)
        buffer, stack = transport._receive_stack(Operation("reduce", group, NO_NOTE, 4, mine.dtype, "sum"), mine)
        assert {tensor.device.type for tensor in (buffer, *stack)} == {device}
        transport._spare[buffer.dtype, buffer.device].append(buffer)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_memory_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match=r"MiB of shared memory cannot be had .*give smaller units"):
        Segment.make(1 << 16)
