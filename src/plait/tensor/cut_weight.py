"""The parameter class of a cut weight: it carries out the functions that read it, and refuses all others.

    F.linear(x, w, b)          the product of its style: column, row, gathered, divided, or logits cut in classes
    F.embedding(tokens, w)     the lookup in a cut vocabulary
    whole(w)                   the whole weight, gathered; differentiable
    w.shape, w.dtype ...       this rank's piece
    w.t(), w.sum() ...         refused by the weight's name: they would take a piece for the whole

Torch asks a parameter's own class in each function that takes it, so no mode is active, and a function that reads no
cut weight costs nothing.  A weight is laid in its unit, gathered and resharded like any other parameter.  While it is
at rest, the class for that comes before this one.

Outside of forwards and ``loss_fn``, this rank's piece may be read and written under ``torch.no_grad()``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.table.collectives import Note
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import Style
from plait.tensor.axis import Divide, Gather, TensorAxis
from plait.tensor.linear import Entered, Pair, row, values
from plait.tensor.metadata import name_of, only_metadata
from plait.tensor.pieces import assemble, piece_of
from plait.tensor.plan import Parallel, site_of
from plait.tensor.vocabulary import CutLogits, embedding
from plait.torch_private import DisableTorchFunction, DisableTorchFunctionSubclass, tree_leaves

Function = Callable[..., Any]


class Siblings:
    """Columns that read one tensor, under the name at which it enters.

    References to the parameters are weak.  Python's collector cannot see through autograd's nodes, so a parameter that
    reached itself through its siblings would never be freed.
    """

    def __init__(self, site: str, pairs: Sequence[Pair]) -> None:
        self.site, self._pairs = site, list[Any]()
        for weight, bias in pairs:
            self.add(weight, bias)

    def add(self, weight: Tensor, bias: Tensor | None) -> int:
        """Adds a pair; returns its index."""
        self._pairs.append((ref(weight), None if bias is None else ref(bias)))
        return len(self._pairs) - 1

    @property
    def pairs(self) -> list[Pair]:
        """Weights and biases, in the order of the modules."""
        found = [(weight(), None if bias is None else bias()) for weight, bias in self._pairs]
        return cast(list[Pair], found)


@dataclass(frozen=True)
class CutSite:
    """The place of a cut weight: the module that the plan names, with its style."""

    name: str
    style: Style
    axis: TensorAxis
    cut: TensorCut
    siblings: Siblings | None = None
    """The columns that read the same tensor; None for other styles."""
    index: int = 0
    """The weight's place among its siblings."""
    whole_stream: bool = False
    """True for an embedding that leaves its stream whole, though sequence parallelism cuts it later."""

    def sizes(self) -> tuple[int, ...]:
        """The size of each part of the weight on this rank."""
        return tuple(stop - start for start, stop in self.cut.ranges(self.axis.index))


class CutWeight(nn.Parameter):
    """This rank's piece of a weight, or of a column's bias.

    ``home`` is the site where it works.  ``sites`` gives the product of ``F.linear`` and ``F.embedding``, by function
    and by the ``id`` of a cut bias.
    """

    cut: TensorCut
    label: str
    home: CutSite
    sites: dict[tuple[Function, int | None], CutSite]

    @classmethod
    def adopt(cls, parameter: nn.Parameter, cut: TensorCut) -> None:
        """Turns a parameter of any class into a cut one; ``place`` defines its products later."""
        kind = type(parameter)
        if not issubclass(kind, cls):
            parameter.__class__ = cls if kind is nn.Parameter else type(cls.__name__, (cls, kind), {})
        cast(CutWeight, parameter).cut = cut

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (carry := CARRIED.get(func)) is not None:
            with DisableTorchFunctionSubclass():
                return carry(*args, **kwargs)
        if func in PASSED or only_metadata(func, args, kwargs):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        weight = _weight_in((args, kwargs))
        inside = hasattr(weight, "home") and weight.home.axis.running
        if inside or (torch.is_grad_enabled() and func is not Tensor.detach and name_of(func) != "data"):
            raise _refusal(func, weight)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            f"the weight {self.label!r} is a piece, cut over the tensor axis, which a copy would take for the whole: "
            f"save the model by plait.save, or take its whole values by engine.full_state_dict()"
        )


def _weight_in(arguments: Any) -> Any:
    return next(value for value in tree_leaves(arguments) if isinstance(value, CutWeight))


def _refusal(func: Function, weight: Tensor) -> ValueError:
    name = getattr(weight, "label", "of a model without its engine")
    return ValueError(
        f"{name_of(func)!r} reads a parameter that is cut over the tensor axis, {name!r}: on this rank it is a piece, "
        f"and the plan covers F.linear and F.embedding of the modules that it names; name the module that reads it, "
        f"leave the parameter whole, or read plait.tensor.whole(weight)"
    )


def place(model: nn.Module, parallel: Parallel, axis: TensorAxis) -> None:
    """Gives each cut weight of a model its sites, by the plan that was resolved on this model."""
    modules: dict[str, Any] = dict(model.named_modules())
    names = {id(p): name for name, p in model.named_parameters()}
    groups: dict[str, Siblings] = {}
    for name, style in parallel.styles.items():
        if style.cut_dim is None or name not in modules:
            continue
        module, group, members = modules[name], None, parallel.siblings(name)
        embeds = isinstance(module, nn.Embedding)
        if not embeds and style.cut_dim == 0:
            entry = site_of(name, parallel)
            pairs = [(modules[n].weight, modules[n].bias) for n in members]
            group = groups.setdefault(f"{entry} of {members[0]}", Siblings(entry, pairs))
        for parameter in (module.weight, getattr(module, "bias", None)):
            if isinstance(parameter, CutWeight):
                site = CutSite(name, style, axis, parameter.cut, group, members.index(name), parallel.splits)
                parameter.label = names[id(parameter)]
                parameter.home = site
                if "sites" not in vars(parameter):
                    parameter.sites = {}
                if parameter is module.weight:
                    _add_site(parameter, F.embedding if embeds else F.linear, site, getattr(module, "bias", None))
    for name, style in parallel.styles.items():
        if style.kind == "enter" and axis.sequence and name in modules:
            inside = [n for n, s in parallel.styles.items() if s.enters and n.rpartition(".")[0] == name]
            group = cast(Siblings, modules[inside[0]].weight.home.siblings)
            changes_stream(modules[name], name, "enter", partial(_entered, axis, group))
        elif name in modules and (install := parallel.kind(style).install) is not None:
            install(axis, parallel, name, modules[name])


def _add_site(weight: CutWeight, function: Function, site: CutSite, bias: Tensor | None) -> None:
    """Adds a site.  A weight of several modules sends under the first one's name; each may have its own bias."""
    first = weight.sites.setdefault((function, None), site)
    if isinstance(bias, CutWeight) and first.siblings is not None:
        index = site.index if site.siblings is first.siblings else first.siblings.add(weight, bias)
        weight.sites.setdefault((function, id(bias)), replace(first, index=index))


def changes_stream(module: nn.Module, name: str, style: str, change: Callable[[Tensor], Tensor]) -> None:
    """Adds a hook that changes a module's stream, the first argument or ``hidden_states``, before its code sees it."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        with DisableTorchFunction():  # no mode of a forward sees it
            if args:
                return (change(args[0]), *args[1:]), kwargs
            if "hidden_states" in kwargs:
                return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}
        raise ValueError(
            f"{name!r}, {style!r} in the tensor plan, is called with {', '.join(kwargs)}: give it the stream as the "
            f"first argument, or as hidden_states"
        )

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _entered(axis: TensorAxis, siblings: Siblings, x: Tensor) -> Tensor:
    return enter(x, axis, siblings).tensor


# ---- what it carries out -------------------------------------------------------------------------------------------


def whole(weight: Tensor) -> Tensor:
    """Returns the whole of a cut weight, plain, on every rank of its axis: an all_gather.  Others come unchanged.

    Every rank must compute the same with it; its gradient is that of this rank's piece.
    """
    return cast(Tensor, GatherWhole.apply(weight, weight.home)) if isinstance(weight, CutWeight) else weight


class GatherWhole(torch.autograd.Function):
    """Gathers all pieces; backward keeps this rank's piece."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, site: CutSite) -> Tensor:
        axis, cut = site.axis, site.cut
        ctx.cut, ctx.index = cut, axis.index
        lengths = [cut.local_shape(index)[cut.dim] for index in range(axis.ways)]
        gathered = axis.start_gather_of(values(weight), cut.dim, lengths, Note("state"))()
        return assemble(gathered.split(lengths, cut.dim), cut)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return piece_of(gradient, ctx.cut, ctx.index).contiguous(), None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    site = None
    if isinstance(weight, CutWeight) and not isinstance(input, CutWeight):
        site = weight.sites.get((F.linear, id(bias) if isinstance(bias, CutWeight) else None))
    if site is None or (site.siblings is not None and bias is not None and not isinstance(bias, CutWeight)):
        raise _refusal(F.linear, _weight_in((input, weight, bias)))
    if input.size(-1) != (site.cut.shape[1] if site.style.kind == "divided" else weight.shape[1]):
        raise ValueError(
            f"{site.name!r}, {str(site.style)!r} in the tensor plan, reads {input.size(-1)} features where its weight "
            f"on this rank has {weight.shape[1]}: it needs "
            f"{'a column output' if site.style.kind == 'row' else 'a whole activation'}; see the plan's style of "
            f"the module before it"
        )
    return LINEARS[site.style.kind](site, input, weight, bias)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    site = weight.sites.get((F.embedding, None)) if isinstance(weight, CutWeight) else None
    if site is None:
        raise _refusal(F.embedding, weight)
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise ValueError(
            f"embedding {site.name!r} is cut by vocabulary, which max_norm, scale_grad_by_freq and sparse do not go "
            f"with: leave them out, or leave the embedding whole"
        )
    return embedding(input, weight, site.cut.shape[0], padding_idx, site.axis, site.name, whole=site.whole_stream)


CARRIED: dict[Function, Function] = {F.linear: _linear, F.embedding: _embedding}
"""The functions that a cut weight carries out itself."""

PASSED = {torch.autograd.grad, torch.autograd.backward}
"""Functions that take a weight and do not read its values."""


def enter(input: Tensor, axis: TensorAxis, siblings: Siblings) -> Entered:
    """Returns the tensor that siblings read.  It enters once, when the first of them is called."""
    entered: Entered | None = axis.entered
    if entered is None or not entered.is_of(input, siblings.site):
        axis.entered = entered = Entered(input, axis, siblings.site, siblings.pairs)
    return entered


def _multiply(site: CutSite, input: Tensor, bias: Tensor | None) -> Tensor:
    """Maps a whole activation to a cut one."""
    assert site.siblings is not None
    return enter(input, site.axis, site.siblings).column(site.index, bias=bias is not None)


def _column(site: CutSite, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = _multiply(site, input, bias)
    site.axis.left(site.cut.shape[0], y.shape, fused=len(site.cut.parts) > 1)
    return y


def _row(site: CutSite, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Maps a cut activation to a whole one."""
    site.axis.left(0)
    y = row(input, weight, site.axis, site.name)
    return y if bias is None else y + bias


def _gathered(site: CutSite, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Maps a whole activation to a whole one."""
    y = _multiply(site, input, bias)
    return cast(Tensor, Gather.apply(y, site.axis, y.dim() - 1, site.cut.shape[0], site.name))


def _divided(site: CutSite, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Maps a whole activation to a whole one; each rank multiplies its part."""
    part = cast(Tensor, Divide.apply(input, site.axis, input.dim() - 1, site.name))
    return _row(site, part, weight, bias)


def _head(site: CutSite, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Maps a whole activation to logits; each rank has some of the classes."""
    if site.axis.whole_logits:
        return _gathered(site, input, weight, bias)
    return CutLogits.of(_multiply(site, input, bias), site.axis, site.cut.shape[0], site.name)


LINEARS: dict[str, Callable[[CutSite, Tensor, Tensor, Tensor | None], Tensor]] = {
    "column": _column,
    "row": _row,
    "gathered": _gathered,
    "divided": _divided,
    "vocabulary": _head,
}
"""``F.linear`` for a weight of each style, as a function of (site, input, weight, bias)."""
