"""The table: the place of state decides what is sent.

A training step holds four kinds of state.  A *cell* says over which data axes a unit's flat storage is split (outermost
cut first) and over which axes a sum is still *pending*; everything else is replicated.  A *strategy* is one row of four
cells, and every collective on a unit's state is the move from one cell to the next:

                       kept                      after each microbatch
      params ──────► full ──────► kept ──────► full          full, pending(all) ──────► grads
        ▲    forward       free        backward                                           │
        │                                                                                 │ at the step
        └───────────────────────── publish ───────────────────────── optim ◄──────────────┘

      start                 end       collective
      pending(a)            full      all_reduce over a
      pending(a)            split a   reduce_scatter over a
      split a               full      all_gather over a
      full                  split a   none: a slice

A cell may also give its state a dtype, and the optimizer's cell a device.  That is mixed precision: parameters and
computation in 16 bits, gradients accumulated and reduced in fp32, and the optimizer updating an fp32 copy of its piece
(the *master* weights), from which the parameters are rounded after each step:

      params shard bf16     kept shard bf16     grads shard fp32     optim shard fp32 @cpu

ZeRO stage 1 splits the optimizer state, stage 2 the gradients as well, stage 3 the parameters too (see ``TABLE``).
``replica`` and ``shard`` are two axes only so that some rows can treat them differently, for example inside a host and
across hosts.  A collective over both is split by host if only one of them crosses hosts (``by_host``).

Sources: ZeRO (Rajbhandari et al. 2020), PyTorch FSDP (Zhao et al. 2023), ZeRO++ (Wang et al. 2023, ``hpz``),
MiCS (Zhang et al. 2022, ``hsdp``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

from plait.messages.wording import did_you_mean
from plait.table.mesh import DATA_AXES, ONE_HOST, Mesh

ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""The bytes of an element, by a dtype's name in a table."""

LONG = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Maps each dtype of the table to torch's name for it."""


@dataclass(frozen=True)
class Cell:
    """One kind of state: cut over ``split`` (nested, outermost first), its sum still due over ``pending``."""

    split: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    dtype: str = ""
    """A name of ``ITEMSIZE``; empty for the dtype of the parameters."""
    device: str = ""
    """``cpu``; empty for the device on which the rank computes."""

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in ITEMSIZE:
            raise ValueError(f"a cell's dtype is one of {', '.join(ITEMSIZE)}, not {self.dtype!r}")
        if self.device not in ("", "cpu"):
            raise ValueError(f"a cell's device is cpu, or left out, not {self.device!r}")
        for axis in self.split + self.pending:
            if axis not in DATA_AXES:
                raise ValueError(f"a cell names data axes ({', '.join(DATA_AXES)}), not {axis!r}")
        if len({*self.split, *self.pending}) != len(self.split + self.pending):
            raise ValueError(f"cell '{self}' names an axis twice")

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Parses ``"full"``, ``"shard/replica"``, ``"shard, pending(replica)"`` or ``"shard fp32 @cpu"``."""
        match = re.fullmatch(
            r"\s*([a-z/]+)(?:\s+([a-z]+\d+))?(?:\s+@([a-z]+))?\s*(?:,\s*pending\(([a-z, ]*)\))?\s*", text
        )
        if match is None:
            raise ValueError(
                f"cannot read the cell {text!r}: write full, shard, shard/replica or 'shard, pending(replica)', and "
                f"after the place a dtype or a device, as in 'shard fp32 @cpu'"
            )
        place, dtype, device, pending = match.groups()
        split = () if place == "full" else tuple(place.split("/"))
        return cls(split, tuple((pending or "").replace(",", " ").split()), dtype or "", device or "")

    def __str__(self) -> str:
        place = "/".join(self.split) or "full"
        where = " ".join([place, *filter(None, [self.dtype, self.device and f"@{self.device}"])])
        return f"{where}, pending({', '.join(self.pending)})" if self.pending else where

    def itemsize(self, own: int) -> int:
        """The bytes of an element of parameters whose own dtype has ``own`` bytes."""
        return ITEMSIZE.get(self.dtype, own)


FULL = Cell()
UNREDUCED = Cell(pending=DATA_AXES)
"""The state after a backward pass: every rank has a full gradient of its own samples."""


@dataclass(frozen=True)
class Move:
    """One step from cell to cell: a collective over ``axes`` on an array that is already cut over ``outer``.

    The whole array of the collective has ``numel / count(outer)`` elements.  ``slice`` sends nothing.
    """

    kind: str
    axes: tuple[str, ...]
    outer: tuple[str, ...] = ()

    def sends(self, mesh: Mesh) -> bool:
        """True if the move sends anything on this mesh."""
        return self.kind != "slice" and mesh.count(self.axes) > 1

    def __str__(self) -> str:
        inside = f" inside {'/'.join(self.outer)}" if self.outer else ""
        return f"{self.kind}({', '.join(self.axes)}){inside}"


def move(start: Cell, end: Cell) -> tuple[Move, ...]:
    """Returns the collectives that lead from one cell to another, in order.

    Raises:
        ValueError: neither cut refines the other (a full reshuffle), or the end has a pending sum that the start lacks.
    """
    common = [a for a, b in takewhile(lambda ab: ab[0] == ab[1], zip(start.split, end.split, strict=False))]
    if len(common) < min(len(start.split), len(end.split)):
        raise ValueError(
            f"'{start}' to '{end}' is a full reshuffle: the outermost cut must be the same on both sides "
            f"(nest one inside the other, as shard and shard/replica)"
        )
    if not set(end.pending) <= set(start.pending):
        raise ValueError(f"'{start}' to '{end}': a finished sum cannot become pending again")
    due = [a for a in start.pending if a not in end.pending]
    path: list[Move] = []
    here = start.split
    for axis in end.split[len(start.split) :]:
        kind = "reduce_scatter" if axis in due else "slice"
        if path and path[-1].kind == kind:
            path[-1] = Move(kind, (*path[-1].axes, axis), path[-1].outer)
        else:
            path.append(Move(kind, (axis,), here))
        here = (*here, axis)
    if rest := tuple(a for a in DATA_AXES if a in due and a not in end.split):
        path.append(Move("all_reduce", rest, here))
    if gone := start.split[len(end.split) :]:
        path.append(Move("all_gather", gone, end.split))
    return tuple(path)


@dataclass(frozen=True)
class Strategy:
    """A row of the table.  The cells of one row are nested: each cut is a prefix of the optimizer's.

    Raises:
        ValueError: a row that is impossible (no move finishes a gradient sum) or wasteful, with the reason.
    """

    name: str
    params: Cell
    kept: Cell
    grads: Cell
    optim: Cell

    def __post_init__(self) -> None:
        def refuse(reason: str) -> None:
            raise ValueError(f"strategy {self.name!r} ({self.row()}): {reason}")

        for part in ("params", "kept", "optim"):
            if getattr(self, part).pending:
                refuse(f"{part} cannot be pending: only gradients are sums")
        if {*self.grads.split, *self.grads.pending} != set(DATA_AXES):
            lost = [a for a in DATA_AXES if a not in self.grads.split + self.grads.pending]
            refuse(
                f"gradients are neither split nor pending over {', '.join(lost)}, so an all-reduce would run after "
                f"every microbatch; write pending({', '.join(lost)}) and the sum is taken once per step"
            )
        whole = self.optim.split
        for part in ("params", "grads"):
            cut = getattr(self, part).split
            if cut == whole[: len(cut)]:
                continue
            if cut[: len(whole)] == whole:
                refuse(
                    f"{part} are cut over {'/'.join(cut)}, the optimizer only over {'/'.join(whole) or 'nothing'}: "
                    f"every step would gather {part} to repeat one update on many ranks; cut the optimizer over "
                    f"{'/'.join(cut)} as well"
                )
            refuse(
                f"the optimizer is cut over {'/'.join(whole)} and {part} over {'/'.join(cut)}: each step would pay a "
                f"full reshuffle; nest them with the same outermost axis ({'/'.join(cut)}, then the others)"
            )
        if self.kept.split != self.params.split[: len(self.kept.split)]:
            refuse(
                f"kept is cut over {'/'.join(self.kept.split)}, which is no beginning of params at rest "
                f"({self.params}): keep full, the parameters' own cut, or an outer part of it"
            )
        if any(cell.device for cell in (self.params, self.kept, self.grads)):
            refuse("only the optimizer state may have its own device")
        if self.kept.dtype != self.params.dtype:
            refuse("kept is a copy of the parameters: give both the same dtype")
        for part in ("grads", "optim"):
            wide = getattr(self, part).dtype
            if wide and wide != self.params.dtype and ITEMSIZE[wide] <= ITEMSIZE.get(self.params.dtype, 2):
                refuse(f"{part} in {wide} would be no wider than the parameters: leave the dtype out, or write fp32")

    def row(self) -> str:
        """The four cells as text; ``parse_strategy(f"{name}: {row}")`` reads it back."""
        return f"{self.params} | {self.kept} | {self.grads} | {self.optim}"

    def __str__(self) -> str:
        return f"{self.name}: {self.row()}"

    def __repr__(self) -> str:
        return f"parse_strategy({str(self)!r})"

    def mixed(self, narrow: str, wide: str = "fp32") -> Strategy:
        """Returns the row in mixed precision: parameters and computation in ``narrow``, sums and optimizer in ``wide``.

        In fp16 give the engine a ``LossScale`` as well: without it small gradients become zero.

        Source: Mixed Precision Training (Micikevicius et al. 2018).
        """
        return replace(
            self,
            params=replace(self.params, dtype=narrow),
            kept=replace(self.kept, dtype=narrow),
            grads=replace(self.grads, dtype=wide),
            optim=replace(self.optim, dtype=wide),
        )

    def offloaded(self) -> Strategy:
        """Returns the row with the optimizer's state, and the copy of the parameters that it updates, on the CPU.

        Source: ZeRO-Offload (Ren et al. 2021).
        """
        return replace(self, optim=replace(self.optim, device="cpu"))


def parse_strategy(text: str) -> Strategy:
    """Parses ``"name: params | kept | grads | optim"``: ``"my: shard | full | shard, pending(replica) | shard"``.

    Raises:
        ValueError: the text is not of this form, or the row is impossible or wasteful.
    """
    name, colon, row = text.partition(":")
    cells = row.split("|")
    if not colon or not name.strip() or len(cells) != 4:
        raise ValueError(f"cannot read the strategy {text!r}: write 'name: params | kept | grads | optimizer state'")
    return Strategy(name.strip(), *(Cell.parse(cell) for cell in cells))


TABLE: dict[str, Strategy] = {
    row.name: row
    for row in map(
        parse_strategy,
        (
            # name      params at rest | kept forward to backward | grads while accumulating | optimizer state
            "ddp:        full          | full          | full, pending(shard, replica) | full",
            "zero1:      full          | full          | full, pending(shard, replica) | shard/replica",
            "zero2:      full          | full          | shard/replica                 | shard/replica",
            "zero3:      shard/replica | shard/replica | shard/replica                 | shard/replica",
            "zero3_keep: shard/replica | full          | shard/replica                 | shard/replica",
            "hsdp:       shard         | shard         | shard, pending(replica)       | shard",
            "psdp:       shard         | shard         | shard, pending(replica)       | shard/replica",
            "hpz:        shard/replica | shard         | shard/replica                 | shard/replica",
        ),
    )
}


ELSEWHERE = {
    **dict.fromkeys(("fsdp", "fsdp2", "full_shard", "stage3"), "zero3"),
    **dict.fromkeys(("stage2",), "zero2"),
    **dict.fromkeys(("shard_grad_op",), "zero3_keep"),
    **dict.fromkeys(("hybrid_shard", "hybrid", "mics"), "hsdp"),
    **dict.fromkeys(("dp", "no_shard", "data_parallel"), "ddp"),
    **dict.fromkeys(("zeroredundancyoptimizer", "stage1"), "zero1"),
}
"""Maps other engines' names of rows to names in ``TABLE``."""


def find_strategy(which: str | Strategy) -> Strategy:
    """Finds a row by name or by its text, or returns the row itself; ValueError names the nearest rows."""
    if isinstance(which, Strategy):
        return which
    if which in TABLE:
        return TABLE[which]
    if ":" in which:
        return parse_strategy(which)
    hint = did_you_mean(ELSEWHERE.get(which.lower(), which), TABLE)
    raise ValueError(
        f"unknown strategy {which!r}: {hint}{' ' * bool(hint)}the rows are {', '.join(TABLE)}; or write your own as "
        f"'name: params | kept | grads | optimizer state'"
    )


@dataclass(frozen=True)
class StateAxes:
    """The axes over which a unit's state is split: for experts, a row's ``shard`` is ``expert_shard``."""

    shard: str
    cut: tuple[str, ...]
    """The axes that cut its parameters before a row splits them."""

    def of(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes of a row's cell, as they apply to this unit."""
        return tuple(self.shard if axis == "shard" else axis for axis in axes)


DENSE = StateAxes("shard", ("tensor",))
EXPERTS = StateAxes("expert_shard", ("expert", "tensor"))


@dataclass(frozen=True)
class Moves:
    """Every move of a step, by phase.

    ``forward`` and ``backward`` happen per use of a unit in a microbatch, ``microbatch`` when its last gradient has
    come, ``step`` and ``publish`` once a step.  ``keep`` leads from the forward to what stays for the backward; it
    sends nothing.  ``masters`` gathers the weights that the optimizer updates, for a state dict.  ``summed`` comes
    before ``step`` if a gradient is pending over the tensor axis too: one more sum, taken once per step on the piece
    that the gradient cell leaves here.
    """

    forward: tuple[Move, ...]
    keep: tuple[Move, ...]
    backward: tuple[Move, ...]
    microbatch: tuple[Move, ...]
    summed: tuple[Move, ...]
    step: tuple[Move, ...]
    publish: tuple[Move, ...]
    masters: tuple[Move, ...]


def moves(strategy: Strategy, mesh: Mesh = ONE_HOST, axes: StateAxes = DENSE) -> Moves:
    """Derives the collectives of a step from the row, for units whose state is over ``axes``.  On several hosts they
    are split by host (``by_host``)."""

    def path(start: Cell, end: Cell) -> tuple[Move, ...]:
        whole = [Move(one.kind, axes.of(one.axes), axes.of(one.outer)) for one in move(start, end)]
        return tuple(part for one in whole for part in by_host(one, mesh))

    return Moves(
        forward=path(strategy.params, FULL),
        keep=path(FULL, strategy.kept),
        backward=path(strategy.kept, FULL),
        microbatch=path(UNREDUCED, strategy.grads),
        summed=(Move("all_reduce", ("tensor",), axes.of(strategy.grads.split)),),
        step=path(strategy.grads, strategy.optim),
        publish=path(strategy.optim, strategy.params),
        masters=path(strategy.optim, FULL),
    )


def by_host(whole: Move, mesh: Mesh) -> tuple[Move, ...]:
    """Splits a collective that crosses hosts: inside every host, and across hosts with the pieces that remain.

    .. code-block:: text

        all_reduce(shard, replica)       reduce_scatter(shard), all_reduce(replica) inside shard, all_gather(shard)
        reduce_scatter(shard, replica)   reduce_scatter(shard), reduce_scatter(replica) inside shard
        all_gather(shard, replica)       all_gather(replica) inside shard, all_gather(shard)

    The bytes that cross hosts are divided by the ranks of a host.  The first axes are folded first
    (``comm/ordered_reduce.py``), so the order of additions is the same.

    Source: hierarchical all-reduce, as in Horovod (Sergeev and Del Balso 2018) and ZeRO++ (Wang et al. 2023).
    """
    crossing = tuple(axis for axis in whole.axes if mesh.crosses(axis))
    inside = whole.axes[: len(whole.axes) - len(crossing)]
    if whole.axes != (*inside, *crossing) or not crossing or mesh.count(inside) == 1:
        return (whole,)
    outer = (*whole.outer, *inside)
    match whole.kind:
        case "all_reduce":
            first, last = Move("reduce_scatter", inside, whole.outer), Move("all_gather", inside, whole.outer)
            return first, Move("all_reduce", crossing, outer), last
        case "reduce_scatter":
            return Move("reduce_scatter", inside, whole.outer), Move("reduce_scatter", crossing, outer)
        case "all_gather":
            return Move("all_gather", crossing, outer), Move("all_gather", inside, whole.outer)
    return (whole,)
