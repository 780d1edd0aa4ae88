"""The contents of a checkpoint, taken between two steps: this rank's pieces, and on rank 0 all other values.

    model/blocks.0.weight                regions in the optimizer's precision; buffers from the first rank with them
    optimizer/exp_avg/blocks.0.weight    optimizer state with a value for each element
    ema/blocks.0.weight                  an average of the weights
    value/3                              any other tensor, from rank 0

The tensors are the engine's own memory until they are copied, before the program goes on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.manifest import SAVABLE
from plait.checkpoint.values import InFile, encoded
from plait.step import EMA, Engine
from plait.table.region import Region
from plait.zero.state.full import buffers_of

WEIGHT, OPTIMIZER = "weight", "optimizer"
ALIGNED = 64
"""The bytes to which a copy's address is rounded."""


@dataclass(frozen=True)
class RankPiece:
    """A region of a whole tensor, as this rank holds it."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    region: Region
    tensor: Tensor
    kind: str = ""
    """``weight``, ``optimizer``, or empty for buffers and values."""

    def check_finite(self) -> None:
        """Raises ValueError for inf or NaN."""
        if not is_finite(self.tensor):
            raise ValueError(
                f"{self.name!r} has values that are not finite in its region {self.region}: nothing is saved, and the "
                f"last checkpoint stays the newest"
            )


@dataclass
class HostMemory:
    """Memory of the host for copies, reused by each save."""

    buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def copies(self, pieces: Sequence[RankPiece]) -> list[RankPiece]:
        """Copies the pieces into this memory; earlier copies are overwritten."""
        starts = list(accumulate((-(-one.tensor.nbytes // ALIGNED) * ALIGNED for one in pieces), initial=0))
        if len(self.buffer) < starts[-1]:
            self.buffer = self.buffer.new_empty(0)  # frees the smaller one first
            self.buffer = self.buffer.new_empty(starts[-1])
        copied = []
        for one, start in zip(pieces, starts, strict=False):
            place = self.buffer[start : start + one.tensor.nbytes].view(one.tensor.dtype).view(one.tensor.shape)
            copied.append(replace(one, tensor=place.copy_(one.tensor)))
        return copied


def values_of(engine: Engine, ema: EMA | None, extra: Any) -> Any:
    """Returns all values but pieces, with names instead of the optimizer's pieces; all ranks call it together."""
    optimizer = None
    if engine.optimizers:
        optimizer = engine.optimizer_state_dict(elements=False)
        optimizer["state"] = {
            name: {
                key: InFile(f"optimizer/{key}/{name}") if isinstance(value, Tensor) and value.is_meta else value
                for key, value in own.items()
            }
            for name, own in optimizer["state"].items()
        }
    return {
        "optimizer": optimizer,
        "run": engine.step_state(),
        "ema": None if ema is None else ema.decay,
        "extra": extra,
        "optimizer_classes": None if engine.placed.optimizer_state is None else engine.placed.optimizer_state.classes(),
    }


def taken(engine: Engine, ema: EMA | None, values: Any) -> tuple[list[RankPiece], Any]:
    """Returns the pieces that this rank writes, because no lower rank has them, and on rank 0 the manifest's values.
    Raises ValueError if a weight is not finite, or a value cannot be saved."""
    tensors: dict[str, Tensor] = {}
    state = None if engine.comm.rank else encoded(values, tensors)
    pieces = [*_cut_pieces(engine, ema), *_whole_pieces(engine, tensors)]
    for one in pieces:
        if one.tensor.dtype not in SAVABLE:
            raise ValueError(f"{one.name!r} is of {one.tensor.dtype}, which cannot be saved")
        if one.kind == WEIGHT:
            one.check_finite()
    return pieces, state


def _cut_pieces(engine: Engine, ema: EMA | None) -> Iterator[RankPiece]:
    """Yields pieces of parameters, optimizer state and the average."""
    shapes, aliases = engine.placed.directory.shapes, engine.placed.directory.aliases
    for kind, pieces in (("model", engine.placed.pieces()), ("ema", () if ema is None else ema.pieces())):
        for one in (one for one in pieces if one.first):
            name = aliases.get(one.name, one.name)
            full = f"optimizer/{one.key}/{name}" if one.key else f"{kind}/{name}"
            what = OPTIMIZER if one.key else WEIGHT
            yield RankPiece(full, shapes[name][0], one.region, one.tensor.detach(), what)


def _whole_pieces(engine: Engine, values: Mapping[str, Tensor]) -> Iterator[RankPiece]:
    """Yields the buffers that this rank writes, and tensors among the values."""
    placed, here = engine.placed, engine.comm.mesh.coordinates(engine.comm.rank)
    first = not any(place for axis, place in here.items() if axis != "pipe")
    whole: dict[str, Tensor] = {}
    for name, one in (item for part in placed.parts() for item in buffers_of(part.model).items() if first):
        if placed.directory.homes[name] == here["pipe"]:
            whole.setdefault(f"model/{name}", one)
    for name, tensor in (whole | dict(values)).items():
        region = tuple((0, size) for size in tensor.shape)
        yield RankPiece(name, tuple(tensor.shape), region, tensor.detach())


def is_finite(tensor: Tensor) -> bool:
    """True without inf and NaN.  A finite sum proves it, and is much cheaper than a check of each value."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
