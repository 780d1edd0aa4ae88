"""Where a rank's tensor lies in the whole parameter, and whose names the parameters have.

plain tensor                        the whole
DTensor [6, 4], [Shard(0)] of 2     rows 0 .. 2 on the one, 3 .. 5 on the other
cut by hand                         as the program says (``pieces``)

DDP(model), torch.compile(model)    the names of the model inside
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.table.layout import Region

INSIDE = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What wrappers call the module that they wrap."""


@dataclass(frozen=True)
class Piece:
    """What a rank has of one parameter."""

    name: str
    """In the model of the job."""
    region: Region
    """Start and stop in each dim of the whole."""
    trained: bool
    """Whether it asks for a gradient."""
    group: tuple[int, int] | None
    """The numbers of the optimizer and of its group that have it; None: none has."""
    flat: bool = False
    """The region is of the flattened whole."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that have nothing else."""
    while len(children := dict(model.named_children())) == 1 and (name := next(iter(children))) in INSIDE:
        if any(True for _ in model.parameters(recurse=False)):
            break
        model = children[name]
    return model


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters, each once, by their names without those of wrappers."""
    for name, parameter in model.named_parameters():
        yield _of_the_job(name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers likewise, of real numbers that are there."""
    for name, buffer in model.named_buffers():
        if not (buffer.is_meta or buffer.is_complex()):
            yield _of_the_job(name), buffer


def _of_the_job(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in INSIDE[1:])


def piece_of(tensor: Tensor) -> Tensor:
    """What this rank has of it: a DTensor's piece, or all."""
    piece: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return piece.detach() if piece.layout is torch.strided else piece.detach().to_dense()


def local(tensor: Tensor) -> Tensor:
    """The same as a copy on the CPU."""
    return piece_of(tensor).cpu().clone().contiguous()


def region_of(name: str, tensor: Any, pieces: Mapping[str, Region]) -> Region:
    """Where a parameter's piece lies in the whole.

    Raises:
        ValueError: ``pieces`` gives it another size than it has.
    """
    if name in pieces:
        given = tuple((int(start), int(stop)) for start, stop in pieces[name])
        if tuple(stop - start for start, stop in given) != tuple(tensor.shape):
            raise ValueError(f"pieces has {given} for {name!r}, which has the shape {tuple(tensor.shape)} on this rank")
        return given
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name!r} has placements {tensor.placements}: a parameter cannot be a part of a sum")
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
    return tuple((0, size) for size in tensor.shape)
