"""Shows plans: the ranked list, and the bytes, seconds and messages of one."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from plait.predict.cluster import Cluster
from plait.predict.memory import formula, state_bytes
from plait.predict.plan import Plan
from plait.predict.search import Candidate, room
from plait.predict.sent import messages
from plait.run.report.screen import empty_table
from plait.table.cells import Strategy
from plait.table.mesh import Mesh


def described(cluster: Cluster) -> str:
    hosts = f"{cluster.hosts} host{'s' * (cluster.hosts > 1)} of " if cluster.hosts > 1 else ""
    return f"{hosts}{cluster.devices} x {cluster.name}"


def gb(size: float) -> str:
    """Bytes in powers of 1,000, as memories are sold: three digits, GB at most."""
    value, unit = (size / 1e9, "GB") if size >= 1e8 else (size / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"


def table_of(found: Sequence[Candidate], console: Console) -> Table:
    """The layouts, the best first.  Values are never cut: a narrow terminal gets fewer columns, a file all of them."""
    least = console.options.update(max_width=1000)
    for left_out in ((), ("tokens/s",), ("tokens/s", "bound by")):
        table = _layouts(found, left_out)
        needed = Measurement.get(console, least, table)
        if not console.is_terminal or needed.minimum <= console.width:
            break
    table.width = max(needed.minimum, min(needed.maximum, console.width)) if console.is_terminal else needed.maximum
    return table


def _layouts(found: Sequence[Candidate], left_out: Sequence[str]) -> Table:
    rows = [_row(place, one, found[0]) for place, one in enumerate(found, 1)]
    shown = [name for name in rows[0] if name not in left_out and any(row[name] for row in rows)]
    heads = (name.replace("microb", "micro-\nb") for name in shown)
    left = ("mesh", "row", "order", "stream", "recompute", "tokens go by", "bound by", "loses")
    table = empty_table("", *heads, left=left, padding=(0, 1, 0, 0), pad_edge=False)
    for name, column in zip(shown, table.columns, strict=True):
        column.no_wrap = name not in ("mesh", "order", "memory", "loses")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _row(place: int, one: Candidate, best: Candidate) -> dict[str, str]:
    plan = one.plan
    return {
        "": str(place),
        "mesh": str(plan.mesh),
        "row": plan.strategy.name,
        "order": "" if plan.order is None else plan.order + (f" x{plan.chunks}" if plan.chunks else ""),
        "microbatches": f"{plan.microbatches} x {plan.samples}",
        "stream": "cut in time" * (plan.sequence_parallel and plan.mesh.tensor > 1),
        "recompute": plan.recompute or "",
        "tokens go by": ("all_to_all" if plan.all_to_all else "gather") * (plan.mesh.expert > 1),
        "s/step": f"{one.duration.total:.3g}",
        "tokens/s": f"{one.tokens:,.0f}",
        "MFU": f"{100 * one.mfu:.1f} %",
        "memory": gb(one.fullest.total) if one.fits else f"{gb(-one.spare)} over",
        "bound by": one.duration.bound,
        "loses": loses(one, best),
    }


def loses(one: Candidate, best: Candidate) -> str:
    """The part of the step with the largest extra cost over the best layout."""
    if one is best or one.fits != best.fits:
        return ""
    parts = vars(one.duration)
    name = max(parts, key=lambda part: parts[part] - getattr(best.duration, part))
    return f"{name} +{parts[name] - getattr(best.duration, name):.2g} s"


def link_of(mesh: Mesh, over: Sequence[str]) -> tuple[list[str], str]:
    """The axes that a message really goes over, and the slowest link that it crosses, in words."""
    axes = [axis for axis in over if mesh.axis(axis) > 1]
    return axes, "between hosts" if any(map(mesh.crosses, axes)) else "inside a host"


def details(one: Candidate) -> list[Table]:
    """Bytes of the fullest rank by kind, seconds by part, and messages by axis."""
    plan, fullest = one.plan, one.fullest
    rank = plan.mesh.rank(pipe=fullest.pipe)
    memory = Table(title=f"bytes of rank {rank}, the fullest, of {gb(room(plan))} that may be used", **LOOK)
    for name, size in {**fullest.kinds, "together": fullest.total}.items():
        if size:
            memory.add_row(name, gb(size))
    seconds = Table(title="seconds of a step", **LOOK)
    for name, part in vars(one.duration).items():
        if part:
            seconds.add_row(name, f"{part:.3g}", f"{100 * part / one.duration.total:.0f} %")
    sent = Table(title="messages of that rank in a step", **LOOK)
    for row in messages(plan, plan.shares[fullest.pipe]):
        axes, link = link_of(plan.mesh, row.axes)
        sent.add_row(row.phase, f"{row.times:,} {row.kind}", ", ".join(axes), gb(row.bytes), link)
    return [memory, seconds, sent] if sent.row_count else [memory, seconds]


LOOK: dict[str, Any] = {"box": None, "show_header": False, "title_justify": "left", "padding": (0, 2)}


def states_table(
    count: int, mesh: Mesh, rows: Sequence[Strategy], dtype: str, memory: float
) -> tuple[list[dict[str, Any]], Table]:
    """Bytes between steps of a number of parameters under each row, for a program and for the screen."""
    heads = ("row", "parameters", "gradients", "optimizer", "together", f"of {gb(memory)}")
    table, found = empty_table("", *heads, left=("row",)), []
    for row in rows:
        held = formula(count, mesh, row, **state_bytes(row, dtype))
        spare = memory - held.total
        state = "fits" if spare >= 0 else f"{gb(-spare)} over"
        table.add_row(row.name, gb(held.params), gb(held.grads), gb(held.optimizer), gb(held.total), state)
        found.append({"row": row.name, **asdict(held), "fits": spare >= 0})
    return found, table


def settings_of(plan: Plan) -> dict[str, Any]:
    """The settings of a layout, by the names of the flags."""
    found = {"mesh": str(plan.mesh), "strategy": plan.strategy.name, "schedule": plan.order}
    names = ("chunks", "microbatches", "recompute", "all_to_all", "sequence_parallel")
    return found | {name: getattr(plan, name) for name in names}


def as_json(one: Candidate) -> Mapping[str, object]:
    """Describes a layout for a program."""
    plan, part = one.plan, one.duration
    return {
        **settings_of(plan),
        **{"batch": plan.batch, "length": plan.length},
        "fits": one.fits,
        "bytes": {"rank": plan.mesh.rank(pipe=one.fullest.pipe), **one.fullest.kinds, "total": one.fullest.total},
        "seconds": {**vars(part), "total": part.total},
        "tokens_per_second": one.tokens,
        "mfu": one.mfu,
        "bound": part.bound,
        "messages": [asdict(row) for row in messages(plan, plan.shares[one.fullest.pipe])],
    }
