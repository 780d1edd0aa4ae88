"""The types of activations under a tensor plan: how each module's input and output lie on the ranks of the axis.

                    reads             leaves
    column          the stream        cut       its last dim, a part on each rank
    row             cut               the stream
    vocabulary      tokens            the stream (embedding)
                    the stream        classes   logits, a part of the classes on each rank (head)
    sequence        the stream        the stream

The stream is *whole* (the same on every rank), or *time* under sequence parallelism: cut in its second dim.  A type is
that of the values, and of their gradient too: what a module would leave as a pending sum it sums itself, forward or
backward, at its ``Site``.  Only gradients of parameters stay pending: those that every rank has whole, and computes of
its own part of the activations.  They are summed once per step.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from plait.table.tensor_plan import MESSAGES, Style
from plait.tensor.plan import Parallel, is_unsplit, site_of
from plait.tensor.vocabulary import LOSS

ActivationType = Literal["whole", "time", "cut", "classes", "tokens"]

_TYPES: Mapping[str, tuple[str, str]] = {
    "column": ("stream", "cut"),
    "row": ("cut", "stream"),
    "gathered": ("stream", "whole"),
    "divided": ("whole", "stream"),
    "sequence": ("stream", "stream"),
    "summed": ("cut", "cut"),
    "shared": ("whole", "whole"),
    "experts": ("whole", "whole"),
    "once": ("whole", "whole"),
    "local": ("cut", "cut"),
    "enter": ("stream", "stream"),
    "split": ("whole", "time"),
    "unsplit": ("stream", "stream"),
    "hidden": ("cut", "cut"),
    "heads": ("cut", "cut"),
    "whole": ("whole", "whole"),
}


@dataclass(frozen=True)
class ModuleType:
    """A module that a plan names: how its activations lie, its parameters, and what it sends.

    ``weights`` has the shape of each own parameter on rank 0, with what becomes of its gradient: its own, or a pending
    sum.  ``forward`` and ``backward`` are collectives over the tensor axis; of siblings that share an input the first
    has them.
    """

    name: str
    style: str
    reads: ActivationType
    leaves: ActivationType
    weights: tuple[tuple[str, tuple[int, ...], Literal["own", "pending"]], ...] = ()
    forward: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


def module_types(model: nn.Module, parallel: Parallel, *, sequence: bool) -> Iterator[ModuleType]:
    """The types of every module that a plan names, in the model's order.

    Args:
        parallel: the plan, resolved on the model; its parameters may be on meta.
        sequence: whether the stream is cut in time.
    """
    for name, style in parallel.styles.items():
        module = model.get_submodule(name)
        split = sequence and not is_unsplit(name, parallel.styles)
        reads, leaves = (_resolved(t, split=split) for t in _pair(name, style, module, parallel))
        sites = [site for site in parallel.sites if site.name in _sites_of(name, style, module, parallel)]
        messages = [MESSAGES[site.kind][0 if split else 1] for site in sites]
        yield ModuleType(
            name,
            str(style),
            reads,
            leaves,
            tuple(_weights(module, parallel)),
            tuple(forward for forward, _ in messages if forward),
            tuple(backward for _, backward in messages if backward),
        )


def _pair(name: str, style: Style, module: nn.Module, parallel: Parallel) -> tuple[str, str]:
    if style.kind == "vocabulary":
        embeds = isinstance(module, nn.Embedding)
        return ("tokens", "whole" if parallel.splits else "stream") if embeds else ("stream", "classes")
    reads, leaves = _TYPES[style.kind]
    return "whole" if _entered(name, style, parallel) else reads, leaves


def _entered(name: str, style: Style, parallel: Parallel) -> bool:
    """Whether a module around these siblings has made their input whole."""
    around = parallel.styles.get(name.rpartition(".")[0])
    return style.enters and around is not None and around.kind == "enter"


def _resolved(kind: str, *, split: bool) -> ActivationType:
    if kind == "stream":
        return "time" if split else "whole"
    return kind  # type: ignore[return-value]


def _sites_of(name: str, style: Style, module: nn.Module, parallel: Parallel) -> set[str]:
    """The names of the sites at which a module sends: its own, that of siblings it comes first of, the loss."""
    names = {name}
    if style.enters and parallel.siblings(name)[0] == name and not _entered(name, style, parallel):
        names.add(site_of(name, parallel))
    if style.kind == "vocabulary" and not isinstance(module, nn.Embedding):
        names.add(LOSS.unit)
    return names


def _weights(
    module: nn.Module, parallel: Parallel
) -> Iterator[tuple[str, tuple[int, ...], Literal["own", "pending"]]]:  # fmt: skip
    for name, parameter in module.named_parameters(recurse=False):
        cut = parallel.cuts.get(id(parameter))
        shape = tuple(parameter.shape) if cut is None else cut.local_shape(0)
        yield name, shape, "pending" if id(parameter) in parallel.summed else "own"
