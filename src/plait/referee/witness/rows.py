"""Samples are told by what enters the model: a checksum of each row of a call's tensors.

    model(tokens[3, 8], mask[3, 8], scale[])      3 samples: rows 0, 1, 2 of the tensors whose first dim is 3

Two samples with the same numbers are the same sample.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.torch_private import tree_leaves

Row = str
"""Sixteen hex digits."""


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Row, ...]:
    """A checksum for each sample of a call; none where no tensor has a first dim."""
    tensors = [_local(leaf) for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    tensors = [tensor for tensor in tensors if tensor.dim()]
    if not tensors:
        return ()
    count = len(tensors[0])
    parts = [_bytes(tensor) for tensor in tensors if len(tensor) == count]
    return tuple(
        hashlib.blake2b(b"".join(part[i].tobytes() for part in parts), digest_size=8).hexdigest() for i in range(count)
    )


def _bytes(tensor: Tensor) -> Any:
    """[samples, bytes of one]"""
    flat = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    return flat.view(torch.uint8).numpy() if flat.numel() else flat.new_zeros((len(flat), 0), dtype=torch.uint8).numpy()


def _local(tensor: Tensor) -> Tensor:
    piece: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return piece
