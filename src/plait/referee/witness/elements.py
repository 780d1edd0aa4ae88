"""What is kept of a tensor: all of it, or a few of its elements and its norm.

    KeepAll      gradient/up.weight [7, 5]              a copy of the rank's piece
    KeepFew      gradient [elements of all pieces]      the same in every step, 64 of a piece, drawn by its name
                 gradient norms [pieces]                so that a fault beside them shows too
                 gradient pieces [pieces]               whose they are, as numbers

An element is exact, it adds up as the whole does, and an optimizer that goes element by element makes of it what it
would make of it inside the whole.  So factors, sums over samples and updates are held on a few elements too.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.referee.difference import Discrepancy, describe
from plait.referee.values import ROUNDING, gaps, rounding, scale_of, wide
from plait.referee.witness.pieces import Piece, local, piece_of
from plait.table.layout import Region
from plait.torch_private import foreach_norm

MOST_ELEMENTS = 10_000

KINDS = ("gradient", "pending", "after", "before")
"""What is kept in a step; ``pending`` is a gradient that is still a part of a sum."""


def places_of(name: str, region: Region, number: int) -> Tensor:
    """Which elements of a piece are kept, as places in it when it is flat, in order; all where there are no more.

    Drawn by name and region: ranks with the same piece keep the same elements, and nothing has to be sent or stored.
    """
    numel = math.prod(stop - start for start, stop in region)
    if numel <= number:
        return torch.arange(numel)
    found: set[int] = set()
    draw = 0
    while len(found) < number:
        text = f"{name} {region} {draw}".encode()
        found.add(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % numel)
        draw += 1
    return torch.tensor(sorted(found))


class Recording(Protocol):
    """What of a rank's tensors is written."""

    def kept(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a kind, by parameter, as they are written; on the CPU."""

    def changed(self, parameters: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that are not what was kept last, as ``before``."""


class KeepAll:
    """All of every tensor."""

    def kept(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{kind}/{name}": local(tensor) for name, tensor in tensors.items()}

    def changed(self, parameters: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> dict[str, Tensor]:
        now = self.kept("before", parameters)
        return {key: value for key, value in now.items() if not _same(value, last[f"after/{key.partition('/')[2]}"])}


class KeepFew:
    """A few elements of every tensor, and its norm."""

    def __init__(self, pieces: Sequence[Piece], number: int, device: torch.device) -> None:
        self._numbers = {piece.name: i for i, piece in enumerate(pieces)}
        self._places = {piece.name: places_of(piece.name, piece.region, number).to(device) for piece in pieces}

    @torch.no_grad()
    def kept(self, kind: str, tensors: Mapping[str, Tensor], *, norms: bool = True) -> dict[str, Tensor]:
        if not tensors:
            return {}
        pieces = {name: piece_of(tensor) for name, tensor in tensors.items()}
        found = {
            kind: packed([piece.reshape(-1)[self._places[name]] for name, piece in pieces.items()]),
            f"{kind} pieces": torch.tensor([self._numbers[name] for name in pieces]),
        }
        if norms:
            found[f"{kind} norms"] = norms_of(list(pieces.values()))
        return found

    def changed(self, parameters: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those whose kept elements are not what they were."""
        now = self.kept("before", parameters, norms=False)
        if not now or _same(now["before"], last["after"]):  # a rank may own nothing
            return {}
        sizes = [len(self._places[name]) for name in parameters]
        pairs = zip(parameters, now["before"].split(sizes), last["after"].split(sizes), strict=True)
        return self.kept("before", {name: parameters[name] for name, a, b in pairs if not _same(a, b)})


def packed(elements: Sequence[Tensor]) -> Tensor:
    """Elements of several tensors in one, on the CPU; of several dtypes in double precision."""
    if len({one.dtype for one in elements}) > 1:
        elements = [
            one.to(torch.complex128 if any(e.is_complex() for e in elements) else torch.float64) for one in elements
        ]
    return torch.cat([one.reshape(-1) for one in elements]).cpu()


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each, in double precision, on the CPU."""
    floats = [tensor if tensor.dtype in ROUNDING else wide(tensor) for tensor in tensors]
    return torch.stack([norm.double() for norm in foreach_norm(floats)]).cpu()


def unpacked(
    kind: str, tensors: Mapping[str, Tensor], pieces: Sequence[Piece], sizes: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The elements of a kind and the norms, by parameter; ValueError for what ``KeepFew`` does not write."""
    if kind not in tensors:
        return {}, {}
    numbers = tensors[f"{kind} pieces"].tolist()
    if len(set(numbers)) < len(numbers) or not all(type(i) is int and 0 <= i < len(pieces) for i in numbers):
        raise ValueError(f"its {kind} is of no pieces that this rank has")
    names, norms = [pieces[i].name for i in numbers], tensors.get(f"{kind} norms")
    if tensors[kind].shape != (sum(sizes[i] for i in numbers),):
        raise ValueError(f"its {kind} has another number of elements")
    if norms is not None and norms.shape != (len(names),):
        raise ValueError(f"its {kind} has another number of norms")
    if norms is None and kind != "before":
        raise ValueError(f"its {kind} has no norms")
    elements = dict(zip(names, tensors[kind].split([sizes[i] for i in numbers]), strict=True))
    return elements, {} if norms is None else dict(zip(names, map(float, norms.tolist()), strict=True))


def describe_few(
    observed: Tensor, true: Tensor, places: Tensor, sizes: Sequence[int], within: float = 0.0
) -> Discrepancy:
    """What kind of difference there is between elements of a piece and what they should be.

    Args:
        places: where they are in the flat piece.
        sizes: of the piece.
    """
    found = describe(observed, true, within)
    part = found.region is not None and found.region[0] == observed.dim()  # of complex numbers
    if found.pattern not in ("region", "permutation", "noise") or not sizes or part:
        return found
    text = f"off by up to {found.max_abs:.3g}"
    off = gaps(observed, true) > rounding(true.dtype, 1e-5) * scale_of(true)
    off = off.any(-1) if off.dim() > 1 else off
    best: tuple[float, int, int, int] | None = None
    for dim, at in enumerate(torch.unravel_index(places, list(sizes))):
        start, stop = int(at[off].min()), int(at[off].max()) + 1
        outside = (at < start) | (at >= stop)
        share = (stop - start) / sizes[dim]
        if outside.any() and (best is None or share < best[0]):
            best = share, dim, start, stop
    if best is None:
        return Discrepancy("noise", found.max_abs, found.max_rel, text=text)
    _, dim, start, stop = best
    at = torch.unravel_index(places, list(sizes))[dim]
    inside = (at >= start) & (at < stop)
    kind = describe(observed[inside], true[inside])
    simple = kind.pattern in ("nothing", "factor")
    where = f"index {start}" if stop == start + 1 else f"indices {start} to {stop - 1}"
    what = f"only {where} of {sizes[dim]} of dim {dim}, of the elements that were kept: {kind.text if simple else text}"
    region = (dim, start, stop)
    return Discrepancy("region", found.max_abs, found.max_rel, kind.factor, region, kind.pattern, what)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)) if one.numel() else True
