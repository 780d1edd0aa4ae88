"""One message between two stages: tensors, and a form that describes them.

    tensors   [hidden, first]
    form      shapes   fp32 [2, 7, 16], fp32 [2, 7, 16]
              told     text for the next stage's program: how to put them together

One tensor travels as it is; several travel as one message of bytes.  The form travels ahead of the first message for a
batch's shapes, as text; all later messages for them have the same form.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm.header import DTYPES, Shape

ALIGNED = 16
"""Each tensor of a packed message begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class MessageForm:
    """Describes the tensors of a message.

    Args:
        told: text for the next stage's program; a later message for the same batch shapes has the same.
        more: further text for it, which may differ.
    """

    shapes: tuple[Shape, ...]
    told: str = ""
    more: str = field(default="", compare=False)

    @property
    def packed(self) -> Shape:
        """The shape and dtype of the tensor that travels."""
        if len(self.shapes) == 1:
            return self.shapes[0]
        return (sum(map(_room, self.shapes)),), torch.uint8

    @property
    def text(self) -> str:
        return json.dumps([coded(self.shapes), self.told, self.more])

    @classmethod
    def read(cls, text: str) -> "MessageForm":
        shapes, told, more = json.loads(text)
        return cls(tuple(decoded(shapes)), told, more)

    def __str__(self) -> str:
        return shapes_in_words(self.shapes)


class Handed(NamedTuple):
    """One microbatch on its way from a stage to the next, or its gradients on their way back."""

    tensors: list[Tensor]
    form: MessageForm


def shape_of(tensor: Tensor) -> Shape:
    return tuple(tensor.shape), tensor.dtype


def shapes_in_words(shapes: Sequence[Shape]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in shapes)


def coded(shapes: Sequence[Shape]) -> list[Any]:
    """Encodes shapes for JSON."""
    return [[list(shape), DTYPES.index(dtype)] for shape, dtype in shapes]


def decoded(shapes: Sequence[Any]) -> list[Shape]:
    return [(tuple(shape), DTYPES[code]) for shape, code in shapes]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Packs the tensors into one: itself if there is only one, otherwise bytes."""
    if len(tensors) == 1:
        return tensors[0].resolve_conj().resolve_neg().contiguous()
    sizes = [_room(shape_of(tensor)) for tensor in tensors]
    packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
    for tensor, part in zip(tensors, packed.split(sizes), strict=True):
        part[: tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
    return packed


def unpack(packed: Tensor, form: MessageForm) -> list[Tensor]:
    """Returns the tensors again, each with its own memory."""
    if len(form.shapes) == 1:
        return [packed]
    parts = zip(packed.split([_room(shape) for shape in form.shapes]), form.shapes, strict=True)
    return [part[: math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes).clone() for part, (sizes, dtype) in parts]


def _room(shape: Shape) -> int:
    """The tensor's bytes, up to the next multiple of ``ALIGNED``."""
    return -(-math.prod(shape[0]) * shape[1].itemsize // ALIGNED) * ALIGNED
