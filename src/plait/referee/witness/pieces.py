"""The sources of a witness: a model under any engine, or plait's own engine; samples, and pieces of parameters.

plain tensor                        the whole
DTensor [6, 4], [Shard(0)] of 2     rows 0 .. 2 on the one, 3 .. 5 on the other
cut by hand                         as the program declares (``pieces``)
plait's engine                      the runs that this rank's optimizer updates, in the flattened parameters

DDP(model), torch.compile(model)              the names of the model inside
model(tokens[3, 8], mask[3, 8], scale[])      3 samples: rows 0, 1, 2 of the tensors whose first dim is 3

A sample is identified by a checksum of its row of a call's tensors: two with the same numbers are the same sample.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.step import Engine
from plait.table.region import Region, extent
from plait.torch_private import tree_leaves
from plait.zero.owned import Owned

INSIDE = ("module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The names by which wrappers call the module that they wrap."""


@dataclass(frozen=True)
class Piece:
    """A rank's piece of one parameter."""

    name: str
    """Its name in the job's model."""
    region: Region
    """Start and stop in each dim of the whole."""
    trained: bool
    """True if it requires a gradient."""
    group: tuple[int, int] | None
    """The numbers of its optimizer and its group; None: no optimizer has it."""
    flat: bool = False
    """True if the region is in the flattened whole."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that have no other content."""
    while len(children := dict(model.named_children())) == 1 and (name := next(iter(children))) in INSIDE:
        if any(True for _ in model.parameters(recurse=False)):
            break
        model = children[name]
    return model


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters, each once, by their names without the wrappers' prefixes."""
    for name, parameter in model.named_parameters():
        yield _of_the_job(name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers likewise, if they exist and have real numbers."""
    for name, buffer in model.named_buffers():
        if not (buffer.is_meta or buffer.is_complex()):
            yield _of_the_job(name), buffer


def _of_the_job(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in INSIDE[1:])


def piece_of(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: a DTensor's piece, or all of it."""
    piece: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return piece.detach() if piece.layout is torch.strided else piece.detach().to_dense()


def local(tensor: Tensor) -> Tensor:
    """A CPU copy of this rank's part of a tensor."""
    return piece_of(tensor).cpu().clone().contiguous()


def region_of(name: str, tensor: Any, pieces: Mapping[str, Region]) -> Region:
    """The region of a parameter's piece in the whole.

    Raises:
        ValueError: ``pieces`` gives it a size that it does not have.
    """
    if name in pieces:
        given = tuple((int(start), int(stop)) for start, stop in pieces[name])
        if extent(given) != tuple(tensor.shape):
            raise ValueError(f"pieces has {given} for {name!r}, which has the shape {tuple(tensor.shape)} on this rank")
        return given
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{name!r} has placements {tensor.placements}: a parameter cannot be a part of a sum")
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
    return tuple((0, size) for size in tensor.shape)


# ---- sources


@dataclass(frozen=True)
class WitnessSource:
    """The model whose forwards are seen, and this rank's piece of each parameter."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    regions: Mapping[str, Region]
    buffers: Mapping[str, Tensor]
    flat: frozenset[str] = frozenset()
    """The parameters whose regions are in the flattened whole."""


def of_model(model: nn.Module, names: Mapping[str, str], pieces: Mapping[str, Region]) -> WitnessSource:
    """A model and its parameters, under their names in the job's model."""
    inside = unwrapped(model)
    parameters = {names.get(name, name): p for name, p in named(inside)}
    regions = {name: region_of(name, p, pieces) for name, p in parameters.items()}
    return WitnessSource(inside, parameters, regions, dict(named_buffers(inside)))


def of_engine(engine: Engine) -> WitnessSource:
    """The pieces that this rank owns, and whole parameters that do not train; all ranks call it together.

    Raises:
        ValueError: a tensor axis cuts a parameter, or one rank updates it for all that share it.
    """
    owner = engine.placed.owned_optimizer
    strange = [one.piece.name for ones in (owner.whole_updates if owner else {}).values() for one in ones]
    strange += [owned.name for owned in engine.placed.owned if owned.cut and engine.comm.mesh.tensor > 1]
    if strange:
        raise ValueError(f"{strange[0]!r} is cut over a tensor axis, or updated whole on one rank: take plait verify")
    frozen = {name for name, p in engine.model.named_parameters() if not p.requires_grad}
    parameters = {name: p for name, p in engine.full_state_dict().items() if name in frozen} if frozen else {}
    parameters |= {owned.name: owned.view for owned in engine.placed.owned}
    regions: dict[str, Region] = {name: tuple((0, size) for size in p.shape) for name, p in parameters.items()}
    regions |= {owned.name: _in_the_whole(owned) for owned in engine.placed.owned}
    buffers = {name: buffer for part in engine.placed.parts() for name, buffer in named_buffers(part.model)}
    flat = frozenset(owned.name for owned in engine.placed.owned if not owned.run.whole)
    return WitnessSource(engine.model, parameters, regions, buffers, flat)


def _in_the_whole(owned: Owned) -> Region:
    """The region of a rank's run in the whole parameter, or in the flattened one if the run is part of a piece."""
    run, cut = owned.run, owned.cut  # only experts are cut, in their first dim
    first, last = cut.ranges(owned.flat.tensor_rank)[0] if cut else (0, 0)
    if run.whole:
        return tuple((first, last) if cut and not dim else (0, size) for dim, size in enumerate(owned.view.shape))
    offset = first * math.prod(cut.shape[1:]) if cut else 0
    return ((offset + run.start, offset + run.stop),)


# ---- samples

Row = str
"""Sixteen hex digits."""


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Row, ...]:
    """A checksum for each sample of a call; empty if no tensor has a first dim."""
    tensors = [
        (leaf.to_local() if hasattr(leaf, "to_local") else leaf)
        for leaf in tree_leaves((args, dict(kwargs)))
        if isinstance(leaf, Tensor)
    ]
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
