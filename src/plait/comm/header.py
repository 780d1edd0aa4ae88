"""The shape and dtype of a tensor, as a small message of fixed size, for a receiver that does not know them.

    sender     send(header_of(x))  send(x)          [dtype, number of dims, dim 0, dim 1, ...]   int64
    receiver   recv(header), shape_in(header), then recv into a tensor of that shape

Pipelines send one the first time they see a shape; scripts send one with every tensor.
"""

import torch
from torch import Tensor

MOST_DIMS = 14
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)

Shape = tuple[tuple[int, ...], torch.dtype]


def empty_header(device: torch.device) -> Tensor:
    return torch.zeros(2 + MOST_DIMS, dtype=torch.int64, device=device)


def header_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the shape and dtype of a tensor; raises ValueError if it has more than ``MOST_DIMS`` dims."""
    if tensor.dim() > MOST_DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dims: messages have at most {MOST_DIMS}, so flatten some")
    header = empty_header(device)
    numbers = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def shape_in(header: Tensor) -> Shape:
    code, dims, *sizes = header.tolist()
    return tuple(sizes[:dims]), DTYPES[code]
