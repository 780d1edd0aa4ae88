"""Finds the values with which a training program goes on, among its attributes, and names them field by field.

    found                                 fields
    a module                              the parameter '0.weight' of program.model, the buffer ...
    an optimizer                          the exp_avg of '0.weight' in program.optimizer, the lr of group 1 of it
    a plait Engine, an EMA                the same, whole
    an object with a state_dict()         the last_epoch of program.scheduler (loss scalers, loaders, your own classes)
    random generators                     the state of program.generator, and those that the process shares
    numbers, strings, tensors, lists,     program.position
    deques, sets, dicts, objects of
    your own classes, slots too

A ``state_dict()`` is taken to hold all of its object's state.  State that it forgets, or that cannot be inspected
(Python's generators, iterators, samplers of libraries), shows in the samples, the loss or the state of the next steps.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from plait.step import EMA, Engine
from plait.zero.state.full import buffers_of
from plait.zero.state.identity import fingerprint

PLAIN = (bool, int, float, complex, str, bytes, type(None))
LIBRARIES = (
    *("torch", "torchdata", "numpy", "plait"),
    *("builtins", "functools", "pathlib", "logging", "threading", "multiprocessing", "itertools"),
)
"""Objects of these libraries' classes are not inspected."""
WITHIN_LOADER = ("sampler", "batch_sampler", "generator")


@dataclass(frozen=True)
class Field:
    """A value that a resumed program must restore."""

    kind: str
    """parameter, buffer, average, optimizer, group, state, generator; random: a generator that the process shares."""
    words: str
    """Its name in words, as in "the lr of group 1 of program.optimizer"."""


Fields = dict[Field, Any]
PROGRAM = "program"


class _Part(NamedTuple):
    """A part of a program, and the path to it."""

    path: str
    value: Any


def fields_of(program: Any, *, shared_random: bool) -> Fields:
    """Copies of all values, by field; if an engine is among them, all ranks call it together.

    ``shared_random``: include the process's own random generators.
    """
    found = list(_parts(program, PROGRAM, set()))
    names: dict[int, str] = {}
    for part in found:
        if isinstance(part.value, nn.Module):
            for name, parameter in part.value.named_parameters():
                names.setdefault(id(parameter), name)
    fields: Fields = {}
    for part in _without_owned(found):
        fields |= {one: _copied(value) for one, value in _fields(part.path, part.value, names)}
    fields |= _shared_random() if shared_random else {}
    return fields


def modules_of(program: Any) -> list[nn.Module]:
    """The modules that are not part of another one, including the models of engines."""
    values = [part.value for part in _parts(program, PROGRAM, set())]
    parts = [value.model if isinstance(value, Engine) else value for value in values]
    modules = {id(part): part for part in parts if isinstance(part, nn.Module)}
    inner = {id(module) for outer in modules.values() for module in outer.modules() if module is not outer}
    return [module for key, module in modules.items() if key not in inner]


@contextmanager
def samples_seen(program: Any) -> Iterator[list[int]]:
    """Collects the digests of the inputs that enter the program's modules from outside, while the block runs."""
    seen: list[int] = []

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.extend(fingerprint(tensor) for tensor in _tensors((args, kwargs)))

    hooks = [module.register_forward_pre_hook(look, with_kwargs=True) for module in modules_of(program)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def random_kept() -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds the process's generators, and restores them after the block."""
    numpy, before, python = sys.modules.get("numpy.random"), torch.get_rng_state(), random.getstate()
    array = numpy.get_state() if numpy else None

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        if numpy:
            numpy.seed(number)

    try:
        yield seed
    finally:
        torch.set_rng_state(before)
        random.setstate(python)
        if numpy:
            numpy.set_state(array)


def _parts(value: Any, path: str, seen: set[int], *, quiet: bool = False) -> Iterator[_Part]:
    """The parts of a program, each once; ``quiet``: without the numbers and texts that it keeps."""
    if isinstance(value, PLAIN):
        if not quiet and value is not None:  # it may become an iterator, which is not inspected
            yield _Part(path, value)
        return
    if id(value) in seen or isinstance(value, type | ModuleType):
        return
    seen.add(id(value))
    known = isinstance(value, Tensor | nn.Module | Engine | EMA) or _is_array(value)
    if known or _is_stateful(value) or _random_state(value) is not None:
        yield _Part(path, value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _parts(one, f"{path}.{key}", seen, quiet=quiet)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        for number, one in enumerate(sorted(value, key=repr) if isinstance(value, set | frozenset) else value):
            yield from _parts(one, f"{path}.{number}", seen, quiet=quiet)
    elif isinstance(value, DataLoader):
        for key in WITHIN_LOADER:
            yield from _parts(getattr(value, key), f"{path}.{key}", seen)
    elif not _is_library(type(value)):
        quiet |= _is_installed(type(value)) and path != PROGRAM  # a package's objects may keep anything
        for key, one in _attributes(value).items():
            yield from _parts(one, f"{path}.{key}", seen, quiet=quiet)


def _is_library(kind: type) -> bool:
    return (kind.__module__ or "").partition(".")[0] in LIBRARIES


def _is_installed(kind: type) -> bool:
    """True if an installed package has the class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return any(folder in file for folder in ("site-packages", "dist-packages"))


def _attributes(value: Any) -> dict[str, Any]:
    """An object's attributes by name, from its ``__dict__`` and its slots."""
    state = object.__getstate__(value)
    plain, slots = state if isinstance(state, tuple) else (state, None)
    return {**(plain or {}), **(slots or {})}


def _without_owned(parts: list[_Part]) -> list[_Part]:
    """The parts without the models and optimizers that belong to an engine among them."""
    engines = [part.value for part in parts if isinstance(part.value, Engine)]
    engines += [part.value.engine for part in parts if isinstance(part.value, EMA)]
    owned = {id(one) for engine in engines for one in (engine.model, *engine.optimizers)}
    return [part for part in parts if id(part.value) not in owned]


def _fields(path: str, part: Any, names: Mapping[int, str]) -> Iterator[tuple[Field, Any]]:
    """The fields of one part."""
    if isinstance(part, Engine):
        yield from _fields_of_engine(path, part)
    elif isinstance(part, EMA):
        for name, value in part.full_state_dict().items():
            yield Field("average", f"the average of {name!r} in {path}"), value
        yield Field("average", f"the decay of {path}"), part.decay
    elif isinstance(part, nn.Module):
        for kind, tensors in (("parameter", part.named_parameters()), ("buffer", part.named_buffers())):
            for name, value in tensors:
                yield Field(kind, f"the {kind} {name!r} of {path}"), value
        for name, parameter in part.named_parameters():
            yield Field("state", f"whether {name!r} of {path} trains"), parameter.requires_grad
    elif isinstance(part, Optimizer):
        values = {names.get(id(p), f"parameter {n}"): own for n, (p, own) in enumerate(part.state.items())}
        groups = [{**g, "params": [names.get(id(p), "?") for p in g["params"]]} for g in part.param_groups]
        yield from _fields_of_optimizer(path, {"state": values, "param_groups": groups})
    elif (state := _random_state(part)) is not None:
        yield from _leaves("generator", f"the state of {path}", state)
    elif _is_stateful(part):
        for key, value in part.state_dict().items():
            yield from _leaves("state", f"the {key} of {path}", value)
    else:
        yield Field("state", path), part


def _fields_of_engine(path: str, engine: Engine) -> Iterator[tuple[Field, Any]]:
    buffers = _own_buffers(engine)
    for name, value in engine.full_state_dict().items():
        kind = "buffer" if name in buffers else "parameter"
        yield Field(kind, f"the {kind} {name!r} of {path}"), buffers.get(name, value)
    if engine.optimizers:
        yield from _fields_of_optimizer(f"{path}.optimizer", engine.optimizer_state_dict())
    for key, value in engine.step_state().items():
        yield from _leaves("state", f"the {key} of {path}", value)


def _own_buffers(engine: Engine) -> dict[str, Tensor]:
    """This rank's own buffers."""
    return {name: buffer for part in engine.placed.parts() for name, buffer in buffers_of(part.model).items()}


def _fields_of_optimizer(path: str, state: Mapping[str, Any]) -> Iterator[tuple[Field, Any]]:
    for name, own in state["state"].items():
        for key, value in (own or {}).items():  # None: another rank has it (ZeroRedundancyOptimizer)
            yield from _leaves("optimizer", f"the {key} of {name!r} in {path}", value)
    for number, group in enumerate(state["param_groups"]):
        for key, value in group.items():
            word = {"lr": "learning rate", "params": "parameters"}.get(key, key)
            value = ", ".join(value) if key == "params" else value
            yield from _leaves("group", f"the {word} of group {number} of {path}", value)


def _leaves(kind: str, words: str, value: Any) -> Iterator[tuple[Field, Any]]:
    """The leaves of nested dicts and lists; other objects are skipped."""
    if isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in items:
            yield from _leaves(kind, f"{words} / {key}", one)
    elif isinstance(value, (*PLAIN, Tensor)) or _is_array(value):
        yield Field(kind, words), value


def _shared_random() -> Fields:
    python = random.getstate()
    found: dict[str, Any] = {"torch's random numbers (CPU)": torch.get_rng_state(), "Python's random": python}
    if torch.cuda.is_initialized():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            found[f"torch's random numbers (cuda:{number})"] = state
    if numpy := sys.modules.get("numpy.random"):
        _, keys, position, *_ = numpy.get_state()
        found["numpy's random numbers"] = (keys.tolist(), position)
    return {Field("random", f"the state of {name}"): value for name, value in found.items()}


def _random_state(value: Any) -> Any:
    """The state of a generator; None for another object."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return {"digest": hash(value.getstate())}
    bits = getattr(value, "bit_generator", None)
    return None if bits is None else bits.state


def _is_stateful(value: Any) -> bool:
    """True if it has a state dict; not for a library's iterator, which its loader makes anew each time."""
    if _is_library(type(value)) and hasattr(value, "__next__"):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "__array__")


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in its own memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _local(value.detach()).detach().to("cpu", copy=True)
    if _is_array(value):
        return torch.as_tensor(value).clone() if value.dtype.kind in "biufc" else value.tolist()
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield _local(value.detach())
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)
