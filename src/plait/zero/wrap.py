"""Cuts a model into units: groups of parameters that travel together.

Automatic wrapping takes, in the order of ``named_modules``:

- every child with parameters of the outermost ``ModuleList`` or ``Sequential`` containers: the *blocks*; a
  ``Sequential`` among them is one if a ``ModuleList`` holds it and its layers have no modules inside;
- outside the blocks, every module that owns a parameter of two or more dims: embedding, head, convolution;
- the rest (final norms, scalars) stays with the model itself, the root unit.

If a row, or a mesh, leaves parameters whole, nothing is gathered for a unit, and small neighbours are laid as one
(``bucketed``): their separate messages become one message, as in DDP's buckets, without a copy.

A user can name the units instead; they may nest, and a parameter belongs to the innermost one around it.  A parameter
that several units use is laid in the first; the others *borrow* it.  A unit that reads another's parameter without
being tied to it (a head that is a product with the embedding) is noticed when it runs, and borrows it from then on.
"""

import difflib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from plait.table.flat import buckets

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without their own forward: nothing would unshard them."""


@dataclass(frozen=True)
class Wrapped:
    """A unit to be built: its module, the parameters laid in it, and the names of the units it borrows from."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    borrows: tuple[str, ...]


def bucketed(wrapped: Sequence[Wrapped], most: int) -> tuple[Wrapped, ...]:
    """Joins small neighbours into units; a joined unit has no module that runs when its parameters are read."""
    wrapped = [w for w in wrapped if w.parameters]
    sizes = [[(p.numel(), p.element_size()) for _, p in w.parameters] for w in wrapped]
    return tuple(
        Wrapped(
            f"{run[0].name or 'root'} .. {run[-1].name}" if run[1:] else run[0].name,  # as ``prove.decoder`` has it
            run[0].module,
            tuple(parameter for one in run for parameter in one.parameters),
            (),
        )
        for run in ([wrapped[number] for number in numbers] for numbers in buckets(sizes, most))
    )


def automatic(model: nn.Module) -> tuple[str, ...]:
    """The names of the modules that automatic wrapping makes units, the root (``""``) first; a module with several
    names goes by its first."""
    names: list[str] = []
    first = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{unit}.") for unit in names):
            continue
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for child in module.children():
                layers = isinstance(module, nn.ModuleList) and isinstance(child, nn.Sequential) and _of_leaves(child)
                called = layers or not isinstance(child, (*CONTAINERS, nn.Sequential))
                if called and any(True for _ in child.parameters()):
                    names.append(first[id(child)])
        elif name and not isinstance(module, CONTAINERS) and any(p.dim() >= 2 for p in module.parameters(False)):
            names.append(name)
    return tuple(dict.fromkeys(("", *names)))


def _of_leaves(sequential: nn.Sequential) -> bool:
    return not any(True for layer in sequential for _ in layer.children())


def wrap(model: nn.Module, units: Iterable[str] | None = None, experts: Collection[str] = ()) -> tuple[Wrapped, ...]:
    """Cuts the model into units, in the order of ``named_modules``; the root is always a unit.

    Args:
        units: names of modules; None wraps automatically.
        experts: modules that are units in any case, because their state is split over other ranks.

    Raises:
        ValueError: a name that is not a module of the model (it shows the nearest), or is just a container.
    """
    modules = dict(model.named_modules())
    chosen = {"", *(automatic(model) if units is None else units), *experts}
    if unknown := sorted(chosen - modules.keys()):
        near = difflib.get_close_matches(unknown[0], modules, n=3)
        raise ValueError(
            f"no module {unknown[0]!r} to make a unit of; the nearest names are {', '.join(near) or 'none'}"
        )
    for name in chosen:
        if isinstance(modules[name], CONTAINERS):
            children = [f"{name}.{child}" for child, _ in modules[name].named_children()]
            raise ValueError(
                f"unit {name!r} is a {type(modules[name]).__name__}, which has no forward that could gather it: name "
                f"its children ({', '.join(children[:3])}, ...) or the module around it"
            )
    owner: dict[int, str] = {}
    laid: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in modules if name in chosen}
    borrows: dict[str, dict[str, None]] = {name: {} for name in laid}
    under_all_names = dict(model.named_modules(remove_duplicate=False))
    unit_of = {id(modules[name]): name for name in laid}
    for module_name, module in under_all_names.items():
        around = module_name  # the innermost unit around it, under any of the names that it has there
        while id(under_all_names[around]) not in unit_of:
            around = around.rpartition(".")[0]
        unit = unit_of[id(under_all_names[around])]
        for short, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in owner:
                owner[id(parameter)] = unit
                laid[unit].append((f"{module_name}.{short}" if module_name else short, parameter))
            elif owner[id(parameter)] != unit:
                borrows[unit].setdefault(owner[id(parameter)])
    return tuple(
        Wrapped(name, modules[name], tuple(laid[name]), tuple(borrows[name]))
        for name in laid
        if not name or laid[name] or borrows[name]
    )
