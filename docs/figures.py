"""Figures of the ideas that have a shape, as SVG that stands in a page and takes its colours.

    collective("reduce_scatter")    each rank's cells before and after, as a run on four threads leaves them
    row("zero3")                    the pieces that each rank keeps, by the table
    flat_unit()                     two parameters end to end, cut as an engine cuts them
    nested("replica=2 shard=2")     the ranks of a mesh, each axis a box around the next
    pipeline("1f1b")                a schedule, played

Nothing here is drawn by hand: the table, the layouts, the schedules and a run say what is where.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from plait.comm import Comm
from plait.comm.run_threads import run
from plait.run.report.drawing import TEXT, _text, svg
from plait.schedule.orders import ORDERS, stages_per_rank, write_order
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE, Cell, find_strategy, moves
from plait.table.flat import lay
from plait.table.mesh import AXES, Mesh

PIECES = ("#7fb2e5", "#e8a35c", "#9ccc8f", "#d59ad6")
"""Colours of ranks, or of pieces."""
CELL, HEIGHT, LABEL = 22, 22, 96
LETTERS = "abcd"
RANKS = 4

Parts = list[tuple[int, int]]
"""The terms of a cell: of which rank, and which element of it."""


def figures() -> dict[str, Callable[[], str]]:
    """Every figure, by the words that a page names it with."""
    drawn = (("collective", collective, COLLECTIVES), ("row", row, TABLE), ("pipeline", pipeline, ORDERS))
    found = {f"{kind} {name}": partial(draw, name) for kind, draw, names in drawn for name in names}
    return found | {
        "rows": partial(rows, ("ddp", "zero1", "zero2", "zero3")),
        "flat unit": flat_unit,
        "nested mesh": partial(nested, "pipe=2 replica=2 shard=2"),
    }


# ---- collectives: run, with numbers whose digits say where they come from ------------------------------------


COLLECTIVES = {
    "broadcast": "one has it, then all have it",
    "scatter": "one has it, then each has a piece",
    "gather": "each has a piece, then one has all pieces",
    "all_gather": "each has a piece, then all have all pieces",
    "reduce": "each has a term, then one has the sum",
    "all_reduce": "each has a term, then all have the sum",
    "reduce_scatter": "each has a term, then each has a piece of the sum",
    "all_to_all": "each has a piece for each, then each has its piece of all",
}
PIECE_EACH, ROOT_ONLY = ("gather", "all_gather"), ("broadcast", "scatter")


def carried(kind: str) -> list[tuple[list[Parts], list[Parts]]]:
    """For each rank its cells before and after a collective, each as the terms that are in it.

    Element i of rank r is (i + 1) * 10 ** r, so the digits of a result say what was added.
    """

    def body(comm: Comm) -> tuple[list[Parts], list[Parts]]:
        count = 1 if kind in PIECE_EACH else RANKS
        x = 10**comm.rank * torch.arange(1, count + 1)
        if kind in ROOT_ONLY and comm.rank > 0:
            x = torch.zeros_like(x)
        after = _carry_out(kind, comm, x.clone())
        return [_parts(value) for value in x.tolist()], [_parts(value) for value in after.tolist()]

    return run(Mesh(shard=RANKS), body)


def _carry_out(kind: str, comm: Comm, x: Tensor) -> Tensor:
    """Returns what a rank has after a collective, which rank 0 is the root of."""
    over, root, all_of_it, piece = ("shard",), comm.rank == 0, x.new_empty(RANKS), x.new_empty(1)
    match kind:
        case "scatter":
            comm.scatter(piece, x if root else None, over, src=0).wait()
        case "gather":
            comm.gather(all_of_it if root else None, x, over, dst=0).wait()
        case "all_gather" | "all_to_all":
            getattr(comm, kind)(all_of_it, x, over).wait()
        case "reduce_scatter":
            comm.reduce_scatter(piece, x, over).wait()
        case "broadcast":
            comm.broadcast(x, over, src=0).wait()
        case "reduce":
            comm.reduce(total := x.clone(), over, dst=0).wait()
            x = total if root else x
        case "all_reduce":
            comm.all_reduce(x, over).wait()
    has_pieces = {"scatter", "reduce_scatter"}
    has_all = {"all_gather", "all_to_all"} | ({"gather"} if root else set())
    return piece if kind in has_pieces else all_of_it if kind in has_all else x


def _parts(value: int) -> Parts:
    return [(rank, value // 10**rank % 10 - 1) for rank in range(RANKS) if value // 10**rank % 10]


def collective(kind: str) -> str:
    """Draws what each of four ranks has before and after."""
    title = f"{kind}: {COLLECTIVES[kind]}"
    out = [_label(0, 14, title, bold=True)]
    for rank, (before, after) in enumerate(carried(kind)):
        y = 54 + rank * (HEIGHT + 10)
        out.append(_label(0, y + 16, f"rank {rank}"))
        for x, cells in ((LABEL, before), (LABEL + 6 * CELL + 40, after)):
            for i, parts in enumerate(cells):
                out += _cell(x + i * (CELL + 2), y, parts)
    out += [_label(LABEL, 42, "before"), _label(LABEL + 6 * CELL + 40, 42, "after")]
    middle = 54 + 2 * (HEIGHT + 10)
    out.append(_label(LABEL + 4 * CELL + 24, middle, "→"))
    return _figure(title, LABEL + 14 * CELL + 40, 54 + RANKS * (HEIGHT + 10), out)


def _cell(x: float, y: float, parts: Parts) -> Iterator[str]:
    """A cell with one strip per term, in the colours of the ranks that they come from."""
    yield f'<rect x="{x}" y="{y}" width="{CELL}" height="{HEIGHT}" fill="none" stroke="currentColor"/>'
    for k, (rank, _) in enumerate(parts):
        part = CELL / len(parts)
        yield f'<rect x="{x + k * part}" y="{y}" width="{part}" height="{HEIGHT}" fill="{PIECES[rank]}"/>'
    if parts:
        letter = LETTERS[parts[0][1]]
        sign = letter if len(parts) == 1 else f"Σ{letter}"
        yield f'<text x="{x + CELL / 2}" y="{y + 15}" text-anchor="middle" fill="{TEXT}">{sign}</text>'


# ---- rows ---------------------------------------------------------------------------------------------------

KINDS = (("params", "parameters"), ("kept", "kept for backward"), ("grads", "gradients"), ("optim", "optimizer state"))


def mesh_for(name: str) -> Mesh:
    """Four ranks: on one axis, or two by two where the row treats the axes differently."""
    row = find_strategy(name)
    cells = (row.params, row.kept, row.grads, row.optim)
    both = any(len({*cell.split, *cell.pending}) == 1 for cell in cells)
    return Mesh(replica=2, shard=2) if both else Mesh(shard=4)


def kept(cell: Cell, mesh: Mesh, rank: int) -> range:
    """The quarters of the state that a rank keeps."""
    ways = mesh.count(cell.split)
    first = mesh.index(rank, cell.split) * RANKS // ways
    return range(first, first + RANKS // ways)


def row(name: str) -> str:
    """Draws what each of four ranks keeps under one row, and the row's messages."""
    return rows((name,))


def rows(names: Sequence[str]) -> str:
    """The same for several rows, one below the other."""
    out = [_label(LABEL + 40 + k * 150, 16, title) for k, (_, title) in enumerate(KINDS)]
    y = 30
    for name in names:
        strategy, mesh = find_strategy(name), mesh_for(name)
        out.append(_label(0, y + 16, name, bold=True))
        for rank in range(RANKS):
            out.append(_label(LABEL - 14, y + 15, f"rank {rank}"))
            for k, (part, _) in enumerate(KINDS):
                cell = getattr(strategy, part)
                out += _pieces(LABEL + 40 + k * 150, y, kept(cell, mesh, rank), mesh.count(cell.pending) > 1)
            y += HEIGHT
        if len(names) == 1:
            out += [_label(LABEL - 14, y + 20 + 18 * i, line) for i, line in enumerate(sent(name))]
            y += 18 * len(sent(name)) + 12
        y += 14
    title = f"{', '.join(names)}: what each of four ranks keeps of each kind of state"
    return _figure(title, LABEL + 40 + 4 * 150, y, out)


def sent(name: str) -> list[str]:
    """A row's messages, as the table derives them."""
    strategy, mesh = find_strategy(name), mesh_for(name)
    steps = moves(strategy)
    phases = (("forward", steps.forward), ("backward", steps.backward), ("after each microbatch", steps.microbatch))
    found = []
    for phase, path in (*phases, ("at the step", steps.step), ("after the update", steps.publish)):
        sends = [(move.kind, [a for a in move.axes if mesh.axis(a) > 1]) for move in path if move.sends(mesh)]
        if sends:
            words = (f"{kind} over {', '.join(axes)}" for kind, axes in sends)
            found.append(f"{phase}: {', then '.join(words)}")
    return found


def _pieces(x: float, y: float, has: Iterable[int], pending: bool) -> Iterator[str]:
    for k in range(RANKS):
        fill = PIECES[k] if k in has else "none"
        shape = f'x="{x + k * CELL}" y="{y}" width="{CELL}" height="{HEIGHT - 5}"'
        yield f'<rect {shape} fill="{fill}" stroke="currentColor" stroke-opacity=".45"/>'
        if pending and k in has:
            yield f'<text x="{x + (k + 0.5) * CELL}" y="{y + 13}" text-anchor="middle" fill="{TEXT}">Σ</text>'


# ---- units, meshes, pipelines ---------------------------------------------------------------------------------


def flat_unit() -> str:
    """Draws two parameters of a unit end to end, and the pieces of four ranks."""
    layout = lay((("weight", (7, 13)), ("bias", (7,))), 4, RANKS)
    unit = 640 / layout.numel
    out = [_label(0, 44, "one flat unit"), _label(0, 94, "cut for 4 ranks")]
    for slot in layout.slots:
        x, wide = LABEL + slot.offset * unit, slot.numel * unit
        out.append(f'<rect x="{x:.1f}" y="28" width="{wide:.1f}" height="24" fill="#bbbbbb" stroke="currentColor"/>')
        shape = " x ".join(map(str, slot.shape))
        out.append(f'<text x="{x + 4:.1f}" y="44" fill="{TEXT}">{slot.name} {shape}</text>' if wide > 70 else "")
        out.append("" if wide > 70 else _label(x, 20, f"{slot.name} {shape}"))
    ends = [*(slot.offset for slot in layout.slots[1:]), layout.numel]
    for slot, end in zip(layout.slots, ends, strict=True):
        x, wide = LABEL + (slot.offset + slot.numel) * unit, (end - slot.offset - slot.numel) * unit
        out.append(f'<rect x="{x:.1f}" y="28" width="{wide:.1f}" height="24" fill="none" stroke="currentColor"/>')
        out.append(_label(x, 66, "padding"))
    for rank in range(RANKS):
        start, stop = layout.piece(RANKS, rank)
        shape = f'x="{LABEL + start * unit:.1f}" y="78" width="{(stop - start) * unit:.1f}" height="24"'
        out.append(f'<rect {shape} fill="{PIECES[rank]}" stroke="currentColor"/>')
        parts = [f"{run.slot.name}[{run.start}:{run.stop}]" for run in layout.runs(start, stop)]
        padding = stop - start - sum(run.stop - run.start for run in layout.runs(start, stop))
        runs = ", ".join([*parts, f"{padding} padding"] if padding else parts)
        out.append(f'<text x="{LABEL + start * unit + 4:.1f}" y="94" fill="{TEXT}">rank {rank}</text>')
        out.append(_label(LABEL + start * unit, 122 + 16 * (rank % 2), runs))
    return _figure(f"a unit of {layout.numel} elements, padding included, cut in {RANKS} pieces", LABEL + 660, 150, out)


def nested(text: str) -> str:
    """Draws the ranks of a mesh, each axis a box around the next one."""
    mesh = Mesh.parse(text)
    axes = [axis for axis in AXES if mesh.axis(axis) > 1]
    out: list[str] = []
    wide, high = _boxes(mesh, axes, {}, 4, 4, out)
    return _figure(f"the mesh {mesh}: {mesh.size} ranks, each axis a box around the next", wide + 8, high + 8, out)


def _boxes(
    mesh: Mesh, axes: Sequence[str], at: dict[str, int], x: float, y: float, out: list[str]
) -> tuple[float, float]:
    """Draws what is inside of one box and returns its size; axes go across and down in turn."""
    if not axes:
        rank = mesh.rank(**at)
        out.append(f'<circle cx="{x + 20}" cy="{y + 20}" r="16" fill="{PIECES[at.get("shard", 0) % len(PIECES)]}"/>')
        out.append(f'<text x="{x + 20}" y="{y + 24}" text-anchor="middle" fill="{TEXT}">{rank}</text>')
        return 40, 40
    axis, rest, across = axes[0], axes[1:], len(axes) % 2 == 1
    wide = high = 0.0
    for index in range(mesh.axis(axis)):
        left, top = (x + wide, y) if across else (x, y + high)
        inner: list[str] = []
        w, h = _boxes(mesh, rest, {**at, axis: index}, left + 8, top + 22, inner)
        w, h = max(w + 16, 76), h + 30
        shape = f'x="{left}" y="{top}" width="{w - 6}" height="{h - 6}" rx="5"'
        out.append(f'<rect {shape} fill="none" stroke="currentColor"/>')
        out.append(_label(left + 6, top + 15, f"{axis} {index}"))
        out += inner
        wide, high = (wide + w, max(high, h)) if across else (max(wide, w), high + h)
    return wide, high


def pipeline(name: str) -> str:
    """Draws a schedule for four ranks and eight microbatches, where a backward takes two forwards' time."""
    schedule = write_order(name, RANKS * stages_per_rank(name), 8)
    costs = Costs()
    timeline = simulate(schedule, costs)
    return svg(timeline, f"{name}: 4 ranks, 8 microbatches", costs)


# ---- SVG ----------------------------------------------------------------------------------------------------


def _label(x: float, y: float, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor"{weight}>{_text(text)}</text>'


def _figure(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f"<title>{_text(title)}</title>", *filter(None, parts), "</svg>", ""])
