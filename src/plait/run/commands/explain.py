"""``plait explain``: shows the work of each module under a tensor plan, a context and an expert axis.  Nothing runs.

plait explain --model gpt --mesh tensor=2 --sequence-parallel
plait explain --model gpt --mesh "shard=2 context=2"
plait explain --model moe --mesh "shard=2 expert=2"
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from rich.table import Table
from torch import nn

from plait.anymodel.tensor import resolve_carried
from plait.checkpoint.files.writing import write_json
from plait.predict.experts import predict_experts
from plait.run.config.settings import with_job
from plait.run.job.config import TaskConfig
from plait.run.job.job import build_model, use_axes
from plait.run.report.screen import empty_table, screen
from plait.table.mesh import Mesh
from plait.table.tensor_plan import EXPERT_BACKWARD, EXPERT_FORWARD, MESSAGES
from plait.tensor.expert_axis import cut_experts, experts_of
from plait.tensor.plan import Parallel, is_unsplit, site_of
from plait.tensor.vocabulary import LOSS


@dataclass(frozen=True, init=False)
class ExplainConfig(TaskConfig):
    """Show the style and the parameters of each module under a model's tensor plan, and its messages.

    Under a context axis, show the messages of each attention, and under an expert axis those of each layer's experts.
    """

    mesh: str = "tensor=2"
    """The axes and their sizes; only the tensor, context and expert axes matter to modules."""
    sequence_parallel: bool = False
    """Cut the stream between the cut products in time."""
    json: str | None = None
    """Write the modules here as JSON; "-" is the standard output."""


@dataclass(frozen=True)
class PlannedModule:
    """A module that a plan names: the shapes of its own parameters on rank 0, and its collectives."""

    name: str
    style: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    pending: tuple[str, ...]
    """Parameters whose gradients are summed over the axis once per step."""
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def run(config: ExplainConfig, argv: Sequence[str] = ()) -> int:
    """Shows and writes the modules.  Raises ValueError for a mesh without these axes, or a model without a plan."""
    config = with_job(config)
    mesh = Mesh.parse(config.mesh)
    if mesh.tensor * mesh.context * mesh.expert == 1:
        raise ValueError(
            f"mesh {config.mesh!r} has no tensor, context or expert axis, so each module has whole tensors: give "
            f'tensor=2, or "shard=2 context=2"'
        )
    model = use_axes(build_model(config.task), mesh)
    modules, parallel = list[PlannedModule](), Parallel()
    if mesh.tensor > 1:
        parallel = resolve_carried(model, mesh.tensor, sequence=config.sequence_parallel)
        modules += planned(model, parallel, sequence=config.sequence_parallel)
    if mesh.context > 1:
        modules += attending(model, mesh)
    if mesh.expert > 1:
        modules += sharing(model, mesh, parallel, sequence=config.sequence_parallel)
    write_json(config.json, {"mesh": str(mesh), "modules": [asdict(one) for one in modules]})
    if config.json != "-":
        screen().print(_table(f"{config.task.title} on {mesh}", modules))
        screen().print("pending: each rank has a term of the gradient; the terms are summed once per step.")
    return 0


def planned(model: nn.Module, parallel: Parallel, *, sequence: bool) -> Iterator[PlannedModule]:
    """The modules that a plan names, in the model's order.  Of siblings that share an input the first sends."""
    sites = list(parallel.sites)
    for name, style in parallel.styles.items():
        module = model.get_submodule(name)
        names = {name, site_of(name, parallel) if style.enters else name}
        if style.kind == "vocabulary" and not isinstance(module, nn.Embedding):
            names.add(LOSS.unit)
        own = [site for site in sites if site.name in names]
        sites = [site for site in sites if site not in own]
        split = sequence and not is_unsplit(name, parallel.styles)
        messages = [MESSAGES[site.kind][0 if split else 1] for site in own]
        parameters = list(module.named_parameters(recurse=False))
        cuts = parallel.cuts
        yield PlannedModule(
            name,
            str(style),
            tuple((n, cuts[id(p)].local_shape(0) if id(p) in cuts else tuple(p.shape)) for n, p in parameters),
            tuple(n for n, p in parameters if id(p) in parallel.summed),
            tuple(forward for forward, _ in messages if forward),
            tuple(backward for _, backward in messages if backward),
        )


def attending(model: nn.Module, mesh: Mesh) -> Iterator[PlannedModule]:
    """The modules that gather keys and values over the context axis; ValueError if the model has none."""
    found = [name for name, module in model.named_modules() if hasattr(module, "gathered_widths")]
    if not found:
        raise ValueError(
            f"no module of {type(model).__name__} is known to gather keys and values over context={mesh.context}: give "
            f"--model gpt or --model llama"
        )
    for name in found:
        yield PlannedModule(name, f"context={mesh.context}", (), (), ("all_gather",) * 2, ("reduce_scatter",) * 2)


def sharing(model: nn.Module, mesh: Mesh, parallel: Parallel, *, sequence: bool) -> Iterator[PlannedModule]:
    """The modules with experts, which gather the tokens of all ranks; ValueError if the model has none."""
    cuts = cut_experts(model, mesh, parallel).cuts
    for name, module in experts_of(model).items():
        mine = tuple((short, cuts[id(p)].local_shape(0)) for short, p in module.named_parameters())
        cut = sequence and not is_unsplit(name, parallel.styles)
        sent = [(e.kind, e.note.phase) for e in predict_experts({name: (1, 1)}, mesh, [1], 4, sequence=cut)]
        there, back = (tuple(kind for kind, in_ in sent if in_ == way) for way in (EXPERT_FORWARD, EXPERT_BACKWARD))
        yield PlannedModule(name, f"expert={mesh.expert}", mine, (), there, back)


def _table(title: str, modules: Iterable[PlannedModule]) -> Table:
    """Makes a table with two or more lines per module, so that it is readable at 80 columns.  Identical layers are one
    entry, named with a * for their number."""
    alike = Counter(replace(one, name=re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", one.name)) for one in modules)
    heads = ("module\n  style", "parameters on rank 0\nsends")
    table = empty_table(title, *heads, left=heads)
    for one, times in alike.items():
        cells = [
            f"{short} {'x'.join(map(str, shape))}{' pending' * (short in one.pending)}"
            for short, shape in one.parameters
        ]
        for phase, kinds in (("forward", one.forward), ("backward", one.backward)):
            cells += [f"{phase} {', '.join(kinds)}"] if kinds else []
        table.add_row(f"{one.name}{f' x{times}' * (times > 1)}\n  {one.style}", "\n".join(cells))
    return table
