"""Reads a witnessed folder, and checks that its sizes, dtypes and ranks agree.

start, end      read at once: they are small, and say which rank has which piece
steps           read one at a time, as they are judged; as many as every rank has completely written
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from plait.checkpoint.files.reading import memory, read_file, shown
from plait.referee.values import ROUNDING, unpacked
from plait.referee.witness.pieces import Piece
from plait.referee.witness.record import BUFFER, FORMAT, rank_folder, step_file
from plait.table.region import Region, extent

STEP = {"step", "calls", "stepped", "options"}
"""The fields of a step's JSON."""


@dataclass(frozen=True)
class RankStep:
    """One rank's record of one step."""

    about: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def of(self, kind: str) -> dict[str, Tensor]:
        """The tensors of a kind (gradient, pending, after, before), by parameter."""
        return {
            name.removeprefix(f"{kind}/"): value for name, value in self.tensors.items() if name.startswith(f"{kind}/")
        }

    @property
    def calls(self) -> list[list[str] | None]:
        """The samples of each forward; None if they were not asked for."""
        found: list[list[str] | None] = self.about["calls"]
        return found


@dataclass(frozen=True)
class RankRun:
    """One rank's files."""

    rank: int
    ranks: int
    place: Path
    pieces: tuple[Piece, ...]
    start: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    """The buffers at the start."""
    end: RankStep | None
    """None: the run was killed, or failed."""

    @cached_property
    def regions(self) -> dict[str, Region]:
        return {piece.name: piece.region for piece in self.pieces}

    @cached_property
    def flat(self) -> set[str]:
        return {piece.name for piece in self.pieces if piece.flat}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """The rank's piece of a whole parameter, or gradient: a view if the whole is contiguous."""
        return (whole.reshape(-1) if name in self.flat else whole)[tuple(slice(*ends) for ends in self.regions[name])]

    @cached_property
    def steps(self) -> int:
        """The number of consecutive steps that have a file."""
        step = 0
        while step_file(self.place, step).exists():
            step += 1
        return step

    def step(self, number: int) -> RankStep:
        """A step; ValueError for a damaged file."""
        path = step_file(self.place, number)
        about, tensors = _read(path)
        if about.get("step") != number or not about.keys() >= STEP:
            raise _damaged(path, "it is not a step of a witness")
        step = _kept(path, about, tensors, self)
        if missing := sorted(self.regions.keys() - step.of("after").keys()):
            raise _damaged(path, f"it has no {missing[0][:80]!r} after the step")
        return step


@dataclass(frozen=True)
class Witnessed:
    """All ranks' files."""

    folder: Path
    runs: tuple[RankRun, ...]

    @property
    def steps(self) -> int:
        """The number of whole steps: that of the rank with the fewest."""
        return min(run.steps for run in self.runs)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers at the start; the first of several ranks counts."""
        return {name: value for run in reversed(self.runs) for name, value in run.buffers.items()}

    def whole(self, pieces: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Assembles each parameter (or gradient) that any rank has from the ranks' pieces.

        If several ranks have an element, the first counts; elements that no rank has are zero.
        """
        found: dict[str, Tensor] = {}
        for run, own in reversed(list(zip(self.runs, pieces, strict=True))):
            for name, piece in own.items():
                whole = found.setdefault(name, piece.new_zeros(shapes[name]))
                run.part(name, whole).copy_(piece)
        return found


def read_witnessed(folder: str | Path) -> Witnessed:
    """Reads the ranks' files in a folder.

    Raises:
        ValueError: there is no such folder, a rank is missing, a file is damaged, or no step is whole.
    """
    place = Path(folder)
    try:
        names = [path.name for path in place.iterdir()]
    except (OSError, ValueError) as error:  # a ValueError: a name with a NUL
        gone = isinstance(error, FileNotFoundError)
        why = "there is no such folder" if gone else getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{shown(folder)}: {why}; give the one that plait.witness has written") from error
    there = {int(m[1]) for name in names if (m := re.fullmatch(r"rank-(\d{5})", name))}
    if not there:
        raise ValueError(f"{shown(folder)} has no rank-00000: give the folder that plait.witness has written")
    count = _run(place, min(there)).ranks
    if missing := sorted(set(range(count)) - there):
        raise ValueError(
            f"{shown(folder)} has {len(there)} of {count} ranks, and rank {missing[0]} is missing: copy what every "
            f"rank has written into one folder"
        )
    if extra := sorted(there - set(range(count))):
        raise ValueError(f"{shown(folder)} has a rank {extra[0]}, and the run had {count} ranks: it holds two runs")
    witnessed = Witnessed(place, tuple(_run(place, rank) for rank in range(count)))
    for run in witnessed.runs:
        if run.ranks != count:
            raise ValueError(f"{shown(folder)}: rank {run.rank} was one of {run.ranks}, rank 0 of {count}: two runs")
    if not witnessed.steps:
        rank = next(run.rank for run in witnessed.runs if not run.steps)
        raise ValueError(f"{shown(folder)}: rank {rank} has no whole step, so there is nothing to judge")
    return witnessed


def _run(place: Path, rank: int) -> RankRun:
    path = rank_folder(place, rank) / "start.safetensors"
    about, tensors = _read(path)
    if about.get("format") != FORMAT or about.get("rank") != rank:
        raise _damaged(path, f"it is not what {FORMAT!r} writes for rank {rank}")
    try:
        pieces = tuple(_pieces(about["pieces"], tensors))
        ranks = int(about["ranks"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its pieces are not listed ({error})") from error
    buffers = {key.removeprefix(BUFFER): value for key, value in tensors.items() if key.startswith(BUFFER)}
    start = {piece.name: tensors[piece.name] for piece in pieces}
    run = RankRun(rank, ranks, path.parent, pieces, start, buffers, None)
    last = path.with_name("end.safetensors")
    if not last.exists():
        return run
    about, ending = _read(last)
    if "calls" not in about:
        raise _damaged(last, "it is not the end of a witness")
    return replace(run, end=_kept(last, about, ending, run))


def _kept(path: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor], run: RankRun) -> RankStep:
    """Checks a file's record of a step."""
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        own = run.regions.get(name)
        fits = own is not None and tuple(tensor.shape) == extent(own)
        if not fits or not _is_of(tensor, kind, run.start[name].dtype):
            raise _damaged(path, f"its {key[:80]!r} is not a piece that this rank has")
    return RankStep(about, tensors)


def _is_of(tensor: Tensor, kind: str, dtype: torch.dtype) -> bool:
    """True if a tensor of a kind may have its dtype: a parameter its own, a gradient a wider or a narrower one."""
    if kind in ("after", "before"):
        return tensor.dtype == dtype
    return (tensor.dtype.is_complex, tensor.dtype in ROUNDING) == (dtype.is_complex, dtype in ROUNDING)


def _pieces(told: Any, tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    for one in told:
        region = tuple((int(start), int(stop)) for start, stop in one["region"])
        if extent(region) != tuple(tensors[one["name"]].shape):
            raise ValueError(f"{one['name'][:80]!r} has another size")
        group = None if one["group"] is None else (int(one["group"][0]), int(one["group"][1]))
        yield Piece(str(one["name"]), region, bool(one["trained"]), group, bool(one["flat"]))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    data = read_file(path, "the witnessed file", memory())
    try:
        about, tensors = unpacked(data)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {str(error)[:100]}") from error
    if not isinstance(about, dict):
        raise _damaged(path, "it is not what a witness writes")
    return about, tensors


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{shown(path)} is damaged, {why}: witness the run again, or copy the file again")
