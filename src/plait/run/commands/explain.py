"""``plait explain``: shows how a tensor axis distributes a model over its ranks, by module.  Nothing runs.

plait explain --model gpt --mesh tensor=2 --sequence-parallel
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from rich import box
from rich.table import Table

from plait.anymodel.tensor import resolve_carried
from plait.anymodel.tensor.types import ModuleType, module_types
from plait.checkpoint.files.writing import write_json
from plait.run.config import with_job
from plait.run.job.config import TaskConfig
from plait.run.job.job import build_model
from plait.run.report.screen import screen
from plait.table.mesh import Mesh


@dataclass(frozen=True, init=False)
class ExplainConfig(TaskConfig):
    """Show the types of activations and parameters under a model's tensor plan, and what each module sends."""

    mesh: str = "tensor=2"
    """The axes and their sizes; only the tensor axis matters here."""
    sequence_parallel: bool = False
    """Cut the stream between the cut products in time."""
    json: str | None = None
    """Write the types here as JSON; "-" is the standard output."""


def run(config: ExplainConfig, argv: Sequence[str] = ()) -> int:
    """Shows and writes the types.  Raises ValueError for a mesh without a tensor axis, or a model without a plan."""
    config = with_job(config)
    mesh = Mesh.parse(config.mesh)
    if mesh.tensor == 1:
        raise ValueError(f"mesh {config.mesh!r} has no tensor axis, so each module has whole tensors: give tensor=2")
    model = build_model(config.task)
    parallel = resolve_carried(model, mesh.tensor, sequence=config.sequence_parallel)
    types = list(module_types(model, parallel, sequence=config.sequence_parallel))
    if config.json:
        write_json(config.json, {"mesh": str(mesh), "modules": [asdict(one) for one in types]})
    if config.json != "-":
        screen().print(_table(f"{config.task.title} on {mesh}", _together(types)))
        screen().print(
            "whole: the same on every rank; time: cut in the dim of time; cut: in the last dim; pending: each rank "
            "has a term of the sum, which is made once per step. An activation's gradient lies as the activation does."
        )
    return 0


def _together(types: Iterable[ModuleType]) -> list[tuple[ModuleType, int]]:
    """Merges identical layers into one entry, named with a * for their number, and counts them."""
    found: dict[ModuleType, int] = {}
    for one in types:
        general = replace(one, name=re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", one.name))
        found[general] = found.get(general, 0) + 1
    return list(found.items())


def _table(title: str, types: Iterable[tuple[ModuleType, int]]) -> Table:
    """Makes a table with two or more lines per module, so that it is readable at 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for heading in ("module\n  style: reads > leaves", "parameters on rank 0\nsends"):
        table.add_column(heading, overflow="fold")
    for one, times in types:
        cells = [
            " ".join([name, "x".join(map(str, shape)), *(["pending"] if sums == "pending" else [])])
            for name, shape, sums in one.weights
        ]
        for phase, kinds in (("forward", one.forward), ("backward", one.backward)):
            cells += [f"{phase} {', '.join(kinds)}"] if kinds else []
        name = f"{one.name} x{times}" if times > 1 else one.name
        table.add_row(f"{name}\n  {one.style}: {one.reads} > {one.leaves}", "\n".join(cells))
    return table
