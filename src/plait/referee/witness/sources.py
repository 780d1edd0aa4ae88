"""The sources of a witness: a model under any engine, or plait's own.

    model     its parameters, wrapped, sharded by DTensor, or cut by hand
    engine    the runs that this rank's optimizer updates, in the coordinates of the flattened parameters

This file is all that the witness knows of plait's engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from plait.referee.witness.pieces import named, named_buffers, region_of, unwrapped
from plait.step import Engine
from plait.table.layout import Region


@dataclass(frozen=True)
class WitnessSource:
    """The model whose forwards are seen, and what this rank has of each parameter."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    regions: Mapping[str, Region]
    buffers: Mapping[str, Tensor]
    flat: frozenset[str] = frozenset()
    """Parameters whose regions are of the flattened whole."""


def of_model(model: nn.Module, names: Mapping[str, str], pieces: Mapping[str, Region]) -> WitnessSource:
    """A model and its parameters, under the names that the job's model has for them."""
    inside = unwrapped(model)
    parameters = {names.get(name, name): p for name, p in named(inside)}
    regions = {name: region_of(name, p, pieces) for name, p in parameters.items()}
    return WitnessSource(inside, parameters, regions, dict(named_buffers(inside)))


def of_engine(engine: Engine) -> WitnessSource:
    """The pieces that this rank owns, and the parameters that do not train, whole; all ranks call it together.

    Raises:
        ValueError: a tensor axis, which cuts a parameter before it is sharded.
    """
    if cut := next((owned.name for owned in engine.placed.owned if owned.cut is not None), None):
        raise ValueError(f"{cut!r} is cut over a tensor axis, whose pieces no witness can place: take plait verify")
    frozen = {name for name, p in engine.model.named_parameters() if not p.requires_grad}
    parameters = {name: p for name, p in engine.full_state_dict().items() if name in frozen} if frozen else {}
    parameters |= {owned.name: owned.view for owned in engine.placed.owned}
    regions: dict[str, Region] = {name: tuple((0, size) for size in p.shape) for name, p in parameters.items()}
    parts = {owned.name: ((owned.run.start, owned.run.stop),) for owned in engine.placed.owned if not owned.run.whole}
    buffers = {name: buffer for part in engine.placed.parts() for name, buffer in named_buffers(part.model)}
    return WitnessSource(engine.model, parameters, regions | parts, buffers, frozenset(parts))
