"""Whole parameters between steps, to be read (for a penalty, an average, a plot) and written.

with engine.gathered(): ...                                        read; writes are refused
with engine.gathered("head.weight", modify=True), torch.no_grad(): write the same on every rank, between steps

enter    units that are at rest are gathered, and pinned: every pass meanwhile finds them whole
exit     they are compared over the ranks if they may have been written to, and go back to rest
         if a tensor that needs a gradient was computed from them: back to rest at the end of the step
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.texts import same_everywhere
from plait.forward.interceptor import EngineMode, Function
from plait.table.agreement import DATA_ORDER
from plait.table.collectives import Note
from plait.tensor.metadata import name_of
from plait.torch_private import DisableTorchFunction, tree_leaves
from plait.zero.state.identity import fingerprint
from plait.zero.storage import Flat
from plait.zero.unit import Unit
from plait.zero.unshard import Unsharding


class Reads(EngineMode):
    """Notes whether a tensor that needs a gradient is made, and makes ``p.data`` share the version of ``p``."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parameters = parameters
        self.needs_gradient = False
        """True once a tensor was made whose backward will read the parameters."""

    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if name_of(func) == "data" and func.__name__ == "__get__" and id(args[0]) in self.parameters:
            func, args = Tensor.detach, args[:1]
        result = func(*args, **(kwargs or {}))
        if not self.needs_gradient and torch.is_grad_enabled():
            leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
            if any(isinstance(tensor, Tensor) and tensor.grad_fn is not None for tensor in leaves):
                self.needs_gradient = True
        return result


def units_of(units: Sequence[Unit], names: Sequence[str], aliases: Mapping[str, str]) -> list[Unit]:
    """The units that contain the named parameters, or the parameters of the named modules; without names, all units.

    Args:
        aliases: maps each name of a parameter to its first name.

    Raises:
        ValueError: a name that is neither.
    """
    if not names:
        return list(units)
    found: set[Unit] = set()
    for name in names:
        wanted = {own for key, own in aliases.items() if key == name or key.startswith(f"{name}.")}
        here = {unit for unit in units for flat in unit.flats for slot in flat.layout.slots if slot.name in wanted}
        if not here:
            near = difflib.get_close_matches(name, aliases, n=3)
            raise ValueError(f"no parameter or module {name!r}; the nearest names are {', '.join(near) or 'none'}")
        found |= here
    return [unit for unit in units if unit in found]


@contextmanager
def gathered(unsharding: Unsharding, units: Sequence[Unit], comm: Comm, *, modify: bool) -> Iterator[None]:
    """Makes the parameters of these units whole inside; see ``Engine.gathered``."""
    flats = [flat for unit in units for flat in unit.flats]
    reads = Reads({id(p) for flat in flats for p in flat.parameters})
    with DisableTorchFunction():
        pinned = unsharding.program_reads.pin(units)
    before = [_versions(flat) for flat in flats]
    try:
        with reads:
            yield
        written = [name for flat, old in zip(flats, before, strict=True) for name in _written(flat, old)]
        if written and not modify:
            for flat in flats:
                flat.show()
            raise ValueError(
                f"parameter {written[0]!r} was written to inside `with engine.gathered(...)`: say modify=True, which "
                f"checks that every rank has written the same"
            )
        if modify:
            check_alike(flats, comm)
            try:
                for flat in flats:
                    _accept(flat)
            finally:
                comm.wrote_common()
            for unit in units:
                unit.forget()
    finally:
        with DisableTorchFunction():
            if reads.needs_gradient and not modify:
                unsharding.program_reads.pin_until_step(pinned)
            for unit in pinned:
                unit.unpin()


def _accept(flat: Flat) -> None:
    """Accepts values that a program wrote to whole parameters; raises ValueError for another shape or dtype."""
    with DisableTorchFunction():
        views = flat.views(flat.full)
        for p, view, slot in zip(flat.parameters, views, flat.layout.slots, strict=True):
            if p.is_set_to(view):
                continue
            if (p.shape, p.dtype, p.device) != (view.shape, view.dtype, view.device):
                raise ValueError(
                    f"p.data of parameter {slot.name!r} was replaced by {str(p.dtype)[6:]} of shape {tuple(p.shape)} "
                    f"on {p.device}, but the row holds {str(view.dtype)[6:]} of shape {tuple(view.shape)} on "
                    f"{view.device}: make such changes first, then build the Engine"
                )
            view.copy_(p.detach().clone())  # it may share this very memory
            p.data = view
    if flat.split:
        flat.rest.copy_(flat.full[slice(*flat.rest_place)])
    if flat.master is not None:
        same = flat.master.to(flat.updated_at_rest) == flat.updated_at_rest  # unwritten elements keep their bits
        flat.master.copy_(torch.where(same.to(flat.master.device), flat.master, flat.updated_at_rest.to(flat.master)))


def _versions(flat: Flat) -> list[int]:
    return [parameter._version for parameter in flat.parameters]


def _written(flat: Flat, before: Sequence[int]) -> list[str]:
    """The parameters that were written to in place, or got other memory."""
    replaced = flat.replaced()
    rows = zip(flat.layout.slots, before, _versions(flat), strict=True)
    return [slot.name for slot, old, new in rows if old != new or slot.name in replaced]


def check_alike(flats: Sequence[Flat], comm: Comm) -> None:
    """Raises ValueError, on every rank, if ranks that should hold the same values do not."""
    digests: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for flat in flats:
        for slot, parameter, cut in zip(flat.layout.slots, flat.parameters, flat.cuts, strict=True):
            digest = slot.name, fingerprint(parameter)
            digests.setdefault(flat.axes.of(DATA_ORDER), []).append(digest)
            if cut is None:
                digests.setdefault(flat.axes.cut, []).append(digest)
    differing = []
    for axes, rows in digests.items():
        same = same_everywhere(comm, [digest for _, digest in rows], axes, Note("state"))
        differing += [name for (name, _), alike in zip(rows, same, strict=True) if not alike]
    if differing:
        raise ValueError(
            f"inside `with engine.gathered(modify=True)` the ranks have written different values to "
            f"{len(differing)} parameters ({', '.join(differing[:3])}): write the same on every rank (draw from a "
            f"generator of one seed, gather what depends on a rank's samples from all of them)"
        )
