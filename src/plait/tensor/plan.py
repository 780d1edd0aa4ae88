"""Turns a model and a plan into cuts of parameters, siblings, and sites.

A plan comes from the user, from the model (``tensor_plan``, a dict or a method that returns one), or from a Hugging
Face model's config, which a wing reads.  It is resolved, or refused, on a model whose parameters may be on meta.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, ClassVar

from torch import nn

from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import KINDS, Site, Style, StyleKind, match_styles
from plait.tensor.vocabulary import LOSS

LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers of modules that are called one by one, each with its own input."""


WING = "plait.anymodel.tensor.plan"
"""The module whose ``translated(model, sequence=...)`` reads the plan that a Hugging Face model carries."""


class TensorPlan(dict[str, str | Style]):
    """Styles by patterns of module names.  A subclass may know more kinds of styles."""

    kinds: ClassVar[Mapping[str, StyleKind]] = KINDS


@dataclass(frozen=True)
class Parallel:
    """A plan resolved on a model; ``cuts`` and ``summed`` have parameters' ``id`` as keys, all else module names."""

    styles: Mapping[str, Style] = field(default_factory=dict)
    cuts: Mapping[int, TensorCut] = field(default_factory=dict)
    summed: frozenset[int] = frozenset()
    sites: tuple[Site, ...] = ()
    lists: frozenset[str] = frozenset()
    """The names of ``LISTS`` in the model."""
    pieces: frozenset[int] = frozenset()
    """Cut parameters that their module's own code reads, as plain tensors."""
    plan: TensorPlan = field(default_factory=TensorPlan)
    experts: frozenset[str] = frozenset()
    """The names of modules whose parameters are experts that ranks share."""

    @property
    def splits(self) -> bool:
        """True if the stream is whole until a module cuts it in time, rather than cut by the embedding."""
        return any(style.kind == "split" for style in self.styles.values())

    def kind(self, style: Style) -> StyleKind:
        """The special properties of a style."""
        return self.plan.kinds[style.kind]

    def siblings(self, name: str) -> list[str]:
        """The column-cut modules with the same parent as this one, in order; they may read one tensor."""
        parent = name.rpartition(".")[0]
        same = [n for n in self.styles if self.styles[n].enters and n.rpartition(".")[0] == parent]
        return same if name in same and parent not in self.lists else [name]


def plan_of(model: nn.Module, *, sequence: bool = False) -> TensorPlan:
    """Returns the plan that a model carries; raises ValueError if it has none, or one with a style unknown to plait.

    Args:
        sequence: the stream is cut in time; a Hugging Face plan does not provide for that.
    """
    own = getattr(model, "tensor_plan", None)
    if own is not None:
        return as_plan(own() if callable(own) else own)
    if hasattr(model, "get_input_embeddings") and getattr(model, "tp_plan", None):
        plan: TensorPlan = import_module(WING).translated(model, sequence=sequence)
        return plan
    raise ValueError(
        f"{type(model).__name__} carries no tensor plan: set model.tensor_plan = {{'blocks.*.up': 'column', "
        f"'blocks.*.down': 'row', ...}} where it is built (in the build function of a job), give Engine the same as "
        f"tensor_plan=, or leave the tensor axis out of the mesh"
    )


def as_plan(plan: Mapping[str, str | Style]) -> TensorPlan:
    return plan if isinstance(plan, TensorPlan) else TensorPlan(plan)


def parallel_plan(
    model: nn.Module, ways: int, plan: Mapping[str, str | Style] | None = None, *, sequence: bool = False
) -> Parallel:
    """Resolves a plan (None: the model's own) for an axis of ``ways`` ranks; ``sequence``: the stream is cut in time.

    Raises ValueError for a pattern that matches nothing, a parameter cut twice, heads that the ranks cannot share, or a
    module that a style does not fit.
    """
    if ways == 1 and plan is None:
        return Parallel()
    modules = dict(model.named_modules())
    plan = plan_of(model, sequence=sequence) if plan is None else as_plan(plan)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = match_styles(plan, modules, parameters, plan.kinds)
    if ways == 1:
        return Parallel()
    styles = {name: _with_heads(named[name], name, modules) for name in modules if name in named}  # in their order
    own = {name: style for name, style in named.items() if name not in modules and style.cut_dim is not None}
    if sequence:
        _check_stream(styles, modules)
    streams = {"summed", "sequence"} if sequence else {"summed"}
    summed = {id(p) for n, p in parameters.items() if n in named and named[n].kind in streams}
    cuts = {id(parameters[n]): _own_cut(n, parameters[n], s, styles, plan.kinds, ways) for n, s in own.items()}
    pieces = frozenset(cuts)
    for name, style in styles.items():
        module = modules[name]
        if style.cut_dim is not None:
            for short, cut in _cuts(name, module, style, ways).items():
                other = cuts.setdefault(id(getattr(module, short)), cut)
                if other != cut:
                    raise ValueError(
                        f"the tensor plan shards {name}.{short} twice: it is shared with a module that cuts dim "
                        f"{other.dim}, and {str(style)!r} cuts dim {cut.dim}; cut a shared parameter in one way"
                    )
            scatters = KINDS[style.kind].site == "leave" and sequence and not is_unsplit(name, styles)
            if scatters and getattr(module, "bias", None) is not None:
                summed.add(id(module.bias))
        elif style.kind in streams:
            summed |= {id(p) for p in module.parameters(recurse=False)}
    if both := [n for n, p in parameters.items() if id(p) in summed & cuts.keys()]:
        raise ValueError(
            f"the tensor plan shards {both[0]!r} twice: it is cut, and it is 'summed' or 'sequence', which is for "
            f"parameters that every rank has whole; keep one"
        )
    lists = frozenset(name for name, module in modules.items() if isinstance(module, LISTS))
    parallel = Parallel(styles, cuts, frozenset(summed), (), lists, pieces, plan)
    return replace(parallel, sites=tuple(dict.fromkeys(_sites(parallel, modules))))


def is_unsplit(name: str, styles: Mapping[str, Style]) -> bool:
    """True if a module is inside one that sequence parallelism leaves whole."""
    around = name.rpartition(".")[0]
    return bool(around) and ((around in styles and styles[around].kind == "unsplit") or is_unsplit(around, styles))


def _check_stream(styles: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if a plan lacks a style that sequence parallelism needs."""
    if all(style.kind != "sequence" for style in styles.values()):
        raise ValueError(
            "sequence parallelism cuts the stream between the products in time, and the tensor plan names no module "
            "that works on it: say 'sequence' for its norms and dropouts, or leave sequence parallelism out"
        )
    begins = [n for n, s in styles.items() if s.kind == "vocabulary" and isinstance(modules[n], nn.Embedding)]
    if not begins and all(style.kind != "split" for style in styles.values()):
        raise ValueError(
            "sequence parallelism begins at an embedding that is cut by vocabulary, which scatters its sum in time: "
            "say 'vocabulary' for it (or 'split' for the first module that gets the stream cut), or leave sequence "
            "parallelism out"
        )


def _own_cut(
    name: str,
    parameter: nn.Parameter,
    style: Style,
    styles: Mapping[str, Style],
    kinds: Mapping[str, StyleKind],
    ways: int,
) -> TensorCut:
    """The cut of a parameter that its module's own code reads."""
    owner = styles.get(name.rpartition(".")[0])
    if owner is None or not kinds[owner.kind].own_code:
        raise ValueError(
            f"the tensor plan says {str(style)!r} for the parameter {name!r}, but not what its module does with a "
            f"piece: say 'experts' (what it returns is added up) or 'local' for {name.rpartition('.')[0]!r}"
        )
    dim = parameter.dim() - 1 - (style.kind == "column" and parameter.dim() > 1)
    each, rest = divmod(parameter.shape[dim], style.packed)
    if style.kind not in ("column", "row") or style.parts or rest:
        raise ValueError(
            f"the tensor plan says {str(style)!r} for the parameter {name!r} of shape {list(parameter.shape)}: a "
            f"module's own parameters are cut by 'column' or 'row', or in parts of one size, as in 'column in 2'"
        )
    return TensorCut(tuple(parameter.shape), dim, ways, (each,) * style.packed, style.grain)


def _with_heads(style: Style, name: str, modules: Mapping[str, nn.Module]) -> Style:
    """Makes the cuts of an attention module's projections respect whole heads, if it gives their size or number."""
    around: Any = modules[name.rpartition(".")[0]]
    head, heads = getattr(around, "head_dim", None), getattr(around, "num_heads", None)
    weight, dim = getattr(modules[name], "weight", None), style.cut_dim
    if style.kind not in ("column", "row") or style.parts or style.grain > 1 or style.packed > 1:
        return style
    if not isinstance(head, int) or not isinstance(weight, nn.Parameter) or dim is None:
        return style
    each, rest = divmod(weight.shape[dim], heads) if isinstance(heads, int) else (0, 0)
    grain = head if rest else max(head, each)  # more per head in a latent attention, or with a gate
    return replace(style, grain=grain)


def _cuts(name: str, module: nn.Module, style: Style, ways: int) -> dict[str, TensorCut]:
    """The cuts of a module's own parameters, by their short names."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(module, nn.Linear | nn.Embedding) or not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"the tensor plan says {str(style)!r} for {name!r}, a {type(module).__name__}: only nn.Linear and "
            f"nn.Embedding (and what inherits them) are cut"
        )
    if isinstance(module, nn.Embedding) and style.kind != "vocabulary":
        raise ValueError(f"the tensor plan says {str(style)!r} for the embedding {name!r}: say vocabulary")
    dim = style.cut_dim
    assert dim is not None
    size = weight.shape[dim]
    if style.kind == "vocabulary" and (ways - 1) * -(-size // ways) >= size:
        raise ValueError(f"{name!r}: a vocabulary of {size} rows leaves a rank of tensor={ways} without any; use fewer")
    cuts = {}
    for short, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and dim < parameter.dim():
            try:
                cuts[short] = cut_by(style, tuple(parameter.shape), ways)
            except ValueError as error:
                raise ValueError(f"the tensor plan's {str(style)!r} for {name!r}: {error}") from None
    return cuts


def cut_by(style: Style, shape: tuple[int, ...], ways: int) -> TensorCut:
    """Returns the cut of a linear layer's or an embedding's parameter of this whole shape."""
    dim = style.cut_dim
    assert dim is not None
    parts = tuple(p * style.grain for p in style.parts) or (shape[dim] // style.packed,) * style.packed
    return TensorCut(shape, dim, ways, parts, style.grain)


def _sites(parallel: Parallel, modules: Mapping[str, nn.Module]) -> Iterator[Site]:
    """The sites that send messages in one forward and backward, in the model's order; siblings repeat theirs."""
    width = 0
    first = next((n.rpartition(".")[0] for n, p in modules[""].named_parameters() if p.requires_grad), "")
    known: dict[tuple[int, bool], str] = {}
    for name, style in parallel.styles.items():
        module: Any = modules[name]
        kind = parallel.kind(style)
        embeds = style.kind == "vocabulary" and isinstance(module, nn.Embedding)
        head = style.kind == "vocabulary" and not embeds
        if kind.cut_dim is not None:  # a weight of several modules sends under the first one's name
            name = known.setdefault((id(module.weight), embeds), name)
        if kind.enters or head:
            trains = first not in parallel.siblings(name)  # otherwise the input seems to be the batch
            yield Site("enter", site_of(name, parallel), module.weight.shape[1], trains)
        if embeds:
            width = module.weight.shape[1]
            yield Site("sum" if parallel.splits else "leave", name, width)
        if head:
            yield Site("loss", LOSS.unit, 0)
        if style.kind == "divided":
            yield Site("part", name, module.weight.shape[1])
        if kind.sites is not None:
            yield from kind.sites(name, style, module, parallel, width)
        elif kind.site:
            yield Site(kind.site, name, module.weight.shape[0])


def site_of(name: str, parallel: Parallel) -> str:
    """The name under which a module's input enters: its parent's if it has siblings, otherwise its own."""
    return name.rpartition(".")[0] if len(parallel.siblings(name)) > 1 else name
