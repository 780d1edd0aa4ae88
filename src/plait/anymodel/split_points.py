"""Finds where a pipeline may cut a model: its links, and the links before which everything else runs.

    class Decoder:                                   links      layers.0  layers.1  layers.2
        forward(tokens):                             outside
            x = self.embed(tokens)                     embed    before link 0           the first stage has it
            for layer in self.layers:
                x = layer(x, self.bias)                bias     before 0, 1, 2 and 3    every stage has a copy
            return self.head(self.norm(x))             norm     after link 2            the last stage has it

Links are modules that run in turn.  A model names them, or they are the entries of its outermost list of modules (of
lists inside it, their entries).  The places of other modules are read from the source of the containers' forwards, or,
where that says nothing, from the order in which modules were registered.  This only decides where parameters are kept:
a stage that calls a module which it does not have refuses.
"""

import ast
import inspect
import textwrap
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import nn

from plait.pipeline.blocks import buffer_of_two, check_names, opened
from plait.pipeline.cutting import containers_of
from plait.pipeline.program import Blocks
from plait.torch_private import tree_leaves

PARSING = threading.Lock()
"""Python's parser counts its depth for all threads together."""


def split_points(model: nn.Module) -> Blocks:
    """The links of a model: its own ``pipeline_links()``, an ``nn.Sequential``'s children, the ``base_model_pp_plan``
    of a Hugging Face model, or its list of blocks.  Raises ValueError if there is none, or if the names do not fit."""
    own = getattr(model, "pipeline_links", None)
    if own is not None:
        links = tuple(own() if callable(own) else own)
    elif isinstance(model, nn.Sequential):
        links = tuple(model._modules)
    else:
        links = _decoder_blocks(model) or _outermost_list(model)
    if not links:
        raise ValueError(
            f"{type(model).__name__} does not say how a pipeline may cut it: it has no list of two or more modules "
            f"with parameters, so give it a method pipeline_links() that returns the names of its modules in the order "
            f"in which they run"
        )
    _check(model, links)
    outside, states = _outside(model, links), model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in (name for name, before in outside.items() if len(before) > 1 and name not in parameters):
        if changing := [key for key in states if key.startswith(f"{name}.") and key not in parameters]:
            raise ValueError(
                f"{changing[0]!r} belongs to no link of the pipeline ({', '.join(links[:3])}, ...), and {name!r} runs "
                f"in several places: each stage would change it for itself; put it into a module of the chain"
            )
    if why := buffer_of_two(model, links):
        raise ValueError(f"{why}, and each stage would write its own: give each block its own module")
    return Blocks(links, outside)


def _decoder_blocks(model: nn.Module) -> tuple[str, ...]:
    """The modules of a Hugging Face model's own plan: embedding, layers and norm of the base model, and the head.
    Empty if the plan names missing modules."""
    plan: Mapping[str, Any] = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    base = getattr(model, "base_model_prefix", "")
    inner: Any = getattr(model, base, model)
    prefix = f"{base}." if inner is not model else ""
    if not plan or not all(isinstance(getattr(inner, name, None), nn.Module) for name in plan):
        return ()
    head = (name for name in getattr(model, "_pp_plan", None) or {} if name.removeprefix(prefix) not in plan)
    return (*opened(model, [prefix + name for name in plan]), *(name for name in head if hasattr(model, name)))


def _entries(module: nn.Module) -> dict[str, nn.Module]:
    """The modules inside; one that occurs twice is there twice."""
    return {short: child for short, child in module._modules.items() if child is not None}


def _outermost_list(model: nn.Module) -> tuple[str, ...]:
    """The entries of the model's list of blocks.  Of the lists that are in no other list, one of modules with parts
    comes before one of single layers, an outer one before an inner one, and one with more parameters before one with
    fewer.  A list of lists of modules counts as one list of all their entries, such as pairs of layers."""

    def lists(module: nn.Module, name: str) -> Iterator[tuple[tuple[bool, int, int], tuple[str, ...]]]:
        entries = _entries(module)
        if isinstance(module, nn.ModuleList) and all(type(child) is nn.ModuleList for child in entries.values()):
            rows = entries.items()
            entries = {f"{row}.{short}": child for row, inner in rows for short, child in _entries(inner).items()}
        trained = [child for child in entries.values() if any(True for _ in child.parameters())]
        called = not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for child in trained)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(trained) > 1 and called:
            blocks = all(any(True for _ in child.children()) for child in trained)
            rank = blocks, -name.count("."), sum(p.numel() for p in module.parameters())
            yield rank, tuple(f"{name}.{short}" for short in entries)
            return
        for short, child in module.named_children():
            yield from lists(child, f"{name}.{short}" if name else short)

    return max(lists(model, ""), key=lambda found: found[0], default=((), ()))[1]


def _check(model: nn.Module, links: Sequence[str]) -> None:
    check_names(model, links, "pipeline_links()")
    for name in containers_of(links):
        module = model.get_submodule(name)
        if not _bound_to(module, forward := vars(module).get("forward")) and forward is not None:
            raise ValueError(
                f"forward of {name or type(model).__name__!r} is set on the object, to a {type(forward).__name__} that "
                f"knows the modules of the whole model: a stage runs a copy that has only some. Set it on the class, "
                f"or as a method of the object, types.MethodType(function, module)"
            )


def _bound_to(module: nn.Module, function: Any) -> bool:
    return isinstance(function, MethodType) and function.__self__ is module


# ---- outside of the links -----------------------------------------------------------------------------------------


def _outside(model: nn.Module, links: Sequence[str]) -> dict[str, frozenset[int]]:
    """The modules and parameters outside of the links, and the links before which they may run."""
    containers, found = containers_of(links), defaultdict[str, set[int]](set)

    def inside(name: str) -> list[int]:
        within = f"{name}." if name else ""
        return [i for i, link in enumerate(links) if f"{link}.".startswith(within) or within.startswith(f"{link}.")]

    def outermost(name: str) -> str:
        parts = name.split(".")
        return next(n for n in (".".join(parts[: i + 1]) for i in range(len(parts))) if n not in containers)

    for container in containers:
        uses = [(name, inside(name), loops) for name, loops in _Uses.of(model, container)]
        if not any(indices for _, indices, _ in uses):
            continue
        behind = max(inside(container)) + 1
        for place, (name, indices, loops) in enumerate(uses):
            if indices:
                continue
            together = {i for _, others, their in uses if their & loops for i in others}
            before = [i for _, others, _ in uses[:place] for i in others]
            after = next((others for _, others, _ in uses[place:] if others), [behind])
            found[outermost(name)] |= {*range(min(together), max(together) + 2)} if together else {min(after)}
            if behind - 1 in before and not together:
                found[outermost(name)].add(behind)
    for container in sorted(containers):
        module, behind = model.get_submodule(container), max(inside(container)) + 1
        prefix = f"{container}." if container else ""
        for name in module._parameters:
            found.setdefault(f"{prefix}{name}", {*range(len(links) + 1)})
        for short in reversed(module._modules):  # where the source says nothing: the order of registration
            if indices := inside(f"{prefix}{short}"):
                behind = min(indices)
            elif module._modules[short] is not None:
                found.setdefault(f"{prefix}{short}", {behind})
    return {part: frozenset(before) for name, before in found.items() for part in _parts(model, name)}


def _child(model: nn.Module, name: str) -> nn.Module | None:
    """A module by its name; None for a parameter, and for an entry that is None."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path)._modules.get(last)


def _parts(model: nn.Module, name: str) -> Iterator[str]:
    """The parts of a module that have a place: the module itself or, if it cannot be called (a list, a dict), its
    entries; none if it is None."""
    path, _, last = name.rpartition(".")
    module = _child(model, name)
    if module is None:
        if model.get_submodule(path)._parameters.get(last) is not None:
            yield name
        return
    if type(module).forward is not nn.Module.forward:
        yield name
        return
    for short in (*module._parameters, *module._modules):
        yield from _parts(model, f"{name}.{short}")


class _Uses(ast.NodeVisitor):
    """The names that a forward uses of its module, in the order of evaluation."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.module, self.name = model, model.get_submodule(name), name
        self.found: list[tuple[str, frozenset[int]]] = []
        """Names in the model, with the loops around them."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._loops: frozenset[int] = frozenset()
        self._num_loops = 0
        self._read: set[str] = set()
        self._own: str | None = None
        """The function's own name for the module: its first parameter."""

    @classmethod
    def of(cls, model: nn.Module, name: str) -> list[tuple[str, frozenset[int]]]:
        uses = cls(model, name)
        uses.read("forward")
        return uses.found

    def read(self, method: str) -> None:
        """Reads the source of a method or a property; does nothing if there is none, or it has been read."""
        function: Any = inspect.getattr_static(type(self.module), method, None)
        function = function.fget if isinstance(function, property) else function
        if method in vars(self.module):
            own = vars(self.module)[method]
            function = own.__func__ if _bound_to(self.module, own) else None
        known = method in self._read or (method != "forward" and hasattr(nn.Module, method))
        if known or not inspect.isfunction(function):
            return
        self._read.add(method)
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
            with PARSING:
                tree = ast.parse(source)
        except (OSError, TypeError, SyntaxError):
            return
        functions = (node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda))
        before, self._own = self._own, next((a.arg for f in functions for a in (*f.posonlyargs, *f.args)), None)
        self.visit(tree)
        self._own = before

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords, node.func):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            path, base = [base.attr, *path], base.value
        if not (isinstance(base, ast.Name) and base.id == self._own):
            self.generic_visit(node)
            return
        module, names = self.module, [self.name] if self.name else []
        for attribute in path:
            if attribute in module._parameters:
                self.found.append((".".join([*names, attribute]), self._loops))
                return
            child = module._modules.get(attribute)
            if child is None:
                break
            module, names = child, [*names, attribute]
        if module is not self.module:
            self.found.append((".".join(names), self._loops))
            return
        held = [id(one) for one in tree_leaves(vars(self.module).get(path[0])) if isinstance(one, nn.Module)]
        self.found += [(self._names[one], self._loops) for one in held if one in self._names]
        self.read(path[0])

    def _loop(self, node: ast.AST) -> None:
        self._num_loops += 1
        before, self._loops = self._loops, self._loops | {self._num_loops}
        self.generic_visit(node)
        self._loops = before

    visit_For = visit_While = visit_ListComp = visit_GeneratorExp = _loop  # noqa: N815 (ast's names)
