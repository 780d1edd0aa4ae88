"""What a checkpoint has of this rank, taken between two steps: the pieces that no rank before it has, rank 0's values.

    model/blocks.0.weight                regions in the optimizer's precision; buffers from the first rank that has them
    optimizer/exp_avg/blocks.0.weight    what an optimizer keeps for each element
    ema/blocks.0.weight                  an average of the weights
    value/3                              any other tensor: rank 0's

The tensors are the engine's own memory until they are copied.  Where a thread writes them while the program goes on,
what an optimizer keeps is copied by that thread too: nothing but an update writes to it, and an update waits.

    program    weights copied │ forward, backward ...      │ update
    thread                    │ moments copied ──► waits no more ──► hashed, written
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.tensor_file import SAVABLE
from plait.checkpoint.values import InFile, encoded
from plait.step import EMA, Engine
from plait.table.layout import Region

ALIGNED = 64
"""Bytes to which a copy's place in memory is rounded."""


@dataclass(frozen=True)
class Written:
    """A tensor in a rank's file: a region of a whole one."""

    name: str
    shape: tuple[int, ...]
    region: Region
    tensor: Tensor
    weight: bool = False
    kept: bool = False
    """An optimizer keeps it, and nobody else writes to it."""

    def check_finite(self) -> None:
        """Raises ValueError where it is not finite."""
        if not is_finite(self.tensor):
            raise ValueError(
                f"{self.name!r} has values that are not finite in its region {self.region}: nothing is saved, and the "
                f"checkpoint before stays the newest"
            )


@dataclass(frozen=True)
class LateCopy:
    """A copy that is made while the program goes on."""

    name: str
    source: Tensor
    into: Tensor
    version: int
    """How often the source had been written to."""

    def make(self) -> None:
        """Raises ValueError where the source was written to meanwhile."""
        self.into.copy_(self.source)
        if self.source._version != self.version:
            raise ValueError(
                f"{self.name!r} was written to while it was saved, and not by optimizer.step(): call wait() on the "
                f"Saver before you change an optimizer's state, or give it background=False"
            )


@dataclass
class HostMemory:
    """Memory for copies on the host, which the next copies use again."""

    buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def copies(self, pieces: Sequence[Written]) -> tuple[list[Written], list[LateCopy]]:
        """The same pieces, in this memory, and the copies that are still to be made; earlier ones are overwritten."""
        sizes = [piece.tensor.nbytes for piece in pieces]
        starts = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        if len(self.buffer) < starts[-1]:
            self.buffer = self.buffer.new_empty(0)  # the smaller one goes first
            self.buffer = self.buffer.new_empty(starts[-1])
        copied, late = list[Written](), list[LateCopy]()
        for piece, start, size in zip(pieces, starts, sizes, strict=False):
            place = self.buffer[start : start + size].view(piece.tensor.dtype).view(piece.tensor.shape)
            copied.append(replace(piece, tensor=place))
            if piece.kept and piece.tensor.device.type == "cpu":  # an accelerator's copy would stand behind its queue
                late.append(LateCopy(piece.name, piece.tensor, place, piece.tensor._version))
            else:
                place.copy_(piece.tensor)
        return copied, late


def numbers_of(engine: Engine) -> Any:
    """The optimizers' state, with names in the place of what is saved piece by piece; None without optimizers.

    All ranks call it together.
    """
    if not engine.optimizers:
        return None
    state = engine.optimizer_state_dict(elements=False)
    named = {
        name: {
            key: InFile(f"optimizer/{key}/{name}") if isinstance(value, Tensor) and value.is_meta else value
            for key, value in own.items()
        }
        for name, own in state["state"].items()
    }
    return {**state, "state": named}


def taken(engine: Engine, ema: EMA | None, numbers: Any, extra: Any) -> tuple[list[Written], Any]:
    """What this rank writes, and the manifest's values on rank 0.

    Raises:
        ValueError: a weight that is not finite, a value that cannot be saved.
    """
    values: dict[str, Tensor] = {}
    state = None
    if not engine.comm.rank:
        decay = None if ema is None else ema.decay
        own = {"optimizer": numbers, "run": engine.step_state(), "ema": decay, "extra": extra}
        own["optimizer_classes"] = None if engine.optimizer_state is None else engine.optimizer_state.classes()
        state = encoded(own, values)
    pieces = list(_pieces(engine, ema, values))
    _check_savable(pieces)
    return pieces, state


def _pieces(engine: Engine, ema: EMA | None, values: Mapping[str, Tensor]) -> Iterator[Written]:
    shapes, aliases = engine.directory.shapes, engine.directory.aliases
    for kind, pieces in (("model", engine.pieces()), ("ema", () if ema is None else ema.pieces())):
        for piece in pieces:
            name = aliases.get(piece.name, piece.name)
            if piece.first:
                prefix = f"optimizer/{piece.key}" if piece.key else kind
                tensor = piece.tensor.detach()
                yield Written(f"{prefix}/{name}", shapes[name][0], piece.region, tensor, not piece.key, bool(piece.key))
    whole = {**{f"model/{name}": buffer for name, buffer in engine.own_buffers().items()}, **values}
    for name, tensor in whole.items():
        shape = tuple(tensor.shape)
        yield Written(name, shape, tuple((0, size) for size in shape), tensor.detach())


def _check_savable(pieces: Sequence[Written]) -> None:
    for one in pieces:
        if one.tensor.dtype not in SAVABLE:
            raise ValueError(f"{one.name!r} is of {one.tensor.dtype}, which cannot be saved")
        if one.weight:
            one.check_finite()


def is_finite(tensor: Tensor) -> bool:
    """A finite sum has finite terms, and is far cheaper than a look at each; one that overflows says nothing."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
