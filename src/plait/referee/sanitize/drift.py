"""Checks at regular steps that replicated state is still bitwise identical on all its ranks.

After a bit flip in memory, or a write on one rank only, training would go on in silence.

    parameters         params cell shard: on the replicas   ─┐  one small all_gather of a checksum for each kind; where
    optimizer state    optim cell full: on all data ranks    ├► two ranks differ that should not, they show each other
    whole over tensor  on the tensor ranks too               │  all checksums by name, and every rank raises with the
    tied weights       on their stages                      ─┘  tensors and the ranks

A cell cuts its state over some data axes; over the others all ranks hold the same.  State that a single rank holds
cannot be compared.  The check comes before the update, so no parameter of that step was changed.

The only buffers that are compared are those that all ranks make together (nn.SyncBatchNorm).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.comm.agree import gather_ints
from plait.comm.texts import gather_texts, named
from plait.step.engine import Engine
from plait.table.agreement import AGREEING
from plait.table.cells import DENSE, EXPERTS, Cell, StateAxes
from plait.table.collectives import Note
from plait.table.mesh import AXES, DATA_AXES, Mesh
from plait.zero.state.optimizer_state import is_plain
from plait.zero.storage import Flat

NOTE = Note("state", "drift")
NAMED = 6
"""The largest number of tensors that an error names."""

FULL = Cell()


class DriftError(RuntimeError):
    """Ranks hold different bits of a tensor that should be the same on all of them."""


def alike(cell: Cell, mesh: Mesh, *, whole: bool, axes: StateAxes = DENSE) -> tuple[str, ...]:
    """The axes with several ranks over which the state of a cell is the same.

    Args:
        whole: it is not cut before the row splits it.
        axes: the axes over which it is kept.
    """
    same = axes.of(a for a in AXES if a in DATA_AXES and a not in cell.split) + (axes.cut if whole else ())
    return tuple(a for a in same if mesh.axis(a) > 1)


@dataclass(frozen=True)
class Replica:
    """A tensor that a rank and all ranks over some axes hold together."""

    axes: tuple[str, ...]
    what: str
    """The same text on every rank that has the same elements of the same tensor."""
    tensor: Tensor


def odd_ones(rows: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """Returns, for each name that differs, a text that names the ranks: those outside a majority, or all.

    Args:
        rows: by rank, the checksums of its tensors.
    """
    found = {}
    for what in dict.fromkeys(name for row in rows for name in row):
        holders: dict[int, list[int]] = {}
        for rank, row in enumerate(rows):
            if what in row:
                holders.setdefault(row[what], []).append(rank)
        if len(holders) < 2:
            continue
        everyone = sorted(rank for ranks in holders.values() for rank in ranks)
        most = max(holders.values(), key=len)
        if 2 * len(most) > len(everyone):
            few = [rank for rank in everyone if rank not in most]
            found[what] = f"is another on {named(few)} than on {named(most)}"
        else:
            found[what] = f"differs between {' and '.join(map(named, holders.values()))}"
    return found


class DriftCheck:
    """Compares an engine's state with the other ranks, every ``every`` steps; 0: never."""

    def __init__(self, engine: Engine, every: int) -> None:
        if every < 0:
            raise ValueError(f"check_drift {every}: it is the number of steps between two checks, 0 for none")
        placed = engine.placed
        self.placed, self.every, self._last = placed, every, -1
        strategy, mesh = placed.strategy, placed.comm.mesh
        cells = (strategy.params, strategy.optim, FULL)
        dense = [alike(cell, mesh, whole=whole) for cell in cells for whole in (True, False)]
        if mesh.pipe > 1:
            dense += [(*kind, "pipe") for kind in dense]  # weights that several stages use
        shared = [alike(cell, mesh, whole=False, axes=EXPERTS) for cell in cells] if placed.parallel.experts else []
        self.kinds = list(dict.fromkeys((*dense, *shared)))
        self.kinds = [kind for kind in self.kinds if kind]

    def __call__(self, event: str, engine: Engine) -> None:
        """Runs a due check after the ranks have agreed on a step and before its update.

        Raises:
            DriftError: some ranks differ; raised on all ranks, with the tensors and the ranks.
        """
        step = engine.steps
        if event != "agreed" or not self.every or not self.kinds or (step + 1) % self.every:
            return
        numbers = {"the seed": engine.seed, "the loss scale": engine.reducer.scale}
        comm, sums = self.placed.comm, dict[str, int]()
        of_kind = dict.fromkeys(self.kinds, 0)
        for held in (one for one in self.held() if one.axes):
            sums[held.what] = checksum = _checksum(held.tensor)
            of_kind[held.axes] = zlib.crc32(f"{held.what} {checksum}".encode(), of_kind[held.axes])
        sums |= {what: zlib.crc32(repr(value).encode()) for what, value in numbers.items()}
        mine = [*of_kind.values(), zlib.crc32(repr(numbers).encode())]
        rows = gather_ints(comm, mine, AGREEING, NOTE)
        suspicious = any(row[-1] != rows[0][-1] for row in rows) or any(
            len({rows[rank][i] for rank in group} - {0}) > 1  # 0: no tensor of that kind, such as a tied weight
            for i, axes in enumerate(self.kinds)
            for group in comm.mesh.groups(axes)
        )
        told = gather_texts(comm, json.dumps(sums), NOTE) if suspicious else []
        if found := odd_ones([json.loads(text) for text in told]):
            raise DriftError(self._told(step, found))
        self._last = step

    def _told(self, step: int, found: Mapping[str, str]) -> str:
        lines = [f"{what} {where}" for what, where in found.items()]
        more = f"; and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        before = f"after the check of step {self._last}" if self._last >= 0 else "before the first check"
        return (
            f"step {step} (counted from 0): ranks differ in shared state: {'; '.join(lines[:NAMED])}{more}. "
            f"It happened {before}; the program wrote on some ranks only, or memory or a processor has failed. Go on "
            f"from an earlier checkpoint, without that host if it happens again"
        )

    def held(self) -> Iterator[Replica]:
        """Yields this rank's tensors, with the axes over which others also hold them."""
        placed, row, mesh = self.placed, self.placed.strategy, self.placed.comm.mesh
        tied = {edge.name for edge in placed.ties.edges}

        def replica(cell: Cell, what: str, name: str, flat: Flat, place: tuple[int, int], tensor: Tensor) -> Replica:
            cut = next(cut for cut, slot in zip(flat.cuts, flat.layout.slots, strict=True) if slot.name == name)
            axes = alike(cell, mesh, whole=cut is None, axes=flat.axes)
            axes = (*axes, "pipe") if name in tied and mesh.pipe > 1 else axes
            of_piece = "" if cut is None else f" of {flat.axes.cut[0]} rank {flat.tensor_rank}"
            elements = f" (elements {place[0]} to {place[1] - 1}{of_piece})"
            return Replica(axes, f"{what} {name!r}{elements}", tensor)

        for flat in (flat for unit in placed.units for flat in unit.flats):
            for run in flat.layout.runs(*flat.rest_place):
                values = flat.rest[run.offset : run.offset + run.numel]
                yield replica(row.params, "parameter", run.slot.name, flat, (run.start, run.stop), values)
        for o in placed.owned:
            kept = {key: v for one in placed.optimizers for key, v in one.state.get(o.view, {}).items()}
            if o.flat.master is not None:
                kept["master weights"] = o.view.detach()
            for key, value in kept.items():
                if is_plain(value):
                    place = o.run.start, o.run.stop
                    yield replica(row.optim, f"{key} of", o.name, o.flat, place, value)
        for stage in placed.stages.values():
            for path, module in stage.model.named_modules():
                if isinstance(module, nn.SyncBatchNorm):
                    for name, buffer in module.named_buffers(path, recurse=False):
                        yield Replica(alike(FULL, mesh, whole=True), f"buffer {name!r}", buffer)


def _checksum(tensor: Tensor) -> int:
    whole = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return zlib.crc32(whole.view(-1).view(torch.uint8).numpy().data)
