"""Initial weights that no layout changes, on ranks that never have the whole model.

``empty_parameters()`` builds a model whose parameters are on the meta device (shapes without memory) while buffers are
computed for real.  ``initial_values`` then walks the modules once: each draws its own parameters, on their full shapes,
by its own initialiser, from a stream that depends only on (seed, module name).  The CPU's generator draws for every
device, since a GPU's gives other bits.  The caller keeps its pieces and drops the rest before the next module comes, so
a rank never has more than its pieces and one module.

A module's initialiser is the code that building the model runs on it: its ``reset_parameters()``, then, of the module
and of each module around it, the ``_reset_parameters()`` that some of torch's modules have, and the
``_init_weights(module)`` of Hugging Face's models.  Other modules are on meta meanwhile, so writes to them are lost.

Values that a model's ``__init__`` writes after that would be lost too.  Both times, the operators that write to a
parameter are noted with its memory, which also covers ``p.data``.  If the build ended with others, it is refused.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import swap_tensors

from plait.forward.random_ops import PrivateGenerator
from plait.torch_private import DisableTorchFunctionSubclass, TorchDispatchMode
from plait.zero.build import BuiltUnits, SourceModel, Unmaterialized, another
from plait.zero.place import write_at_rest
from plait.zero.state.checks import check_buffers
from plait.zero.state.weights import Weights, read_piece, whole_values

CPU = torch.device("cpu")
UNSEEN = ". Building inside plait.empty_parameters(), instead of torch.device('meta'), shows which writes count"

_EMPTY: ContextVar[bool] = ContextVar("empty_parameters", default=False)
"""True if modules built in this thread (or task) get parameters without memory."""


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
    if not _EMPTY.get() or parameter is None or parameter.is_meta:
        return None
    on_meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    writes = _writes(on_meta)
    if replaced := _writes(module._parameters.get(name)):  # an initialised parameter, by its own values
        writes[:0], writes[len(writes) :] = replaced, ["nn.Parameter"]
    on_meta._plait_writes = writes  # type: ignore[attr-defined]  # a cast after the block gives it other memory
    return on_meta


def _writes(tensor: Any) -> list[str]:
    """The operators that wrote to a tensor's memory, in order."""
    if tensor is None:
        return []
    memory = tensor.untyped_storage()
    if not hasattr(memory, "_plait_writes"):
        memory._plait_writes = getattr(tensor, "_plait_writes", [])
    found: list[str] = memory._plait_writes
    return found


class _NotesWrites(TorchDispatchMode):
    """Notes with each memory which operators write to it; a copy has the notes of its original."""

    def __init__(self, *, on_meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_meta = on_meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        arguments = func._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
        result = func(*args, **(kwargs or {}))
        for argument in arguments:
            written: Any = given.get(argument.name)
            if argument.is_write and type(written) in (Tensor, nn.Parameter) and written.is_meta == self.on_meta:
                options = [_text(value) for key, value in given.items() if key != "generator"]
                _writes(written).append(f"{func._schema.name.removeprefix('aten::')}({', '.join(options)})")
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            _writes(result)[:] = _writes(args[0])
        return result


def _text(value: Any) -> str:
    return f"{tuple(value.shape)} at {value.storage_offset()}" if isinstance(value, Tensor) else repr(value)


def _lost(shape: Sequence[int], built: list[str], drawn: list[str]) -> bool:
    """True if building's last values differ from an initialiser's.  Either may have left out the first ones, and
    building writes once for each module that shares the parameter."""
    shorter, longer = sorted((built, drawn), key=len)
    last = longer[len(longer) - len(shorter) :]
    return last != shorter and drawn[: len(built)] != built and _final(shape, built) != _final(shape, drawn)


def _final(shape: Sequence[int], writes: list[str]) -> list[str]:
    """The writes from the last one that overwrites a whole parameter of this shape."""
    whole = tuple(f"{name}_({tuple(shape)} at 0" for name in ("normal", "uniform", "fill", "zero"))
    return writes[max((i for i, write in enumerate(writes) if write.startswith(whole)), default=0) :]


register_module_parameter_registration_hook(_to_meta)  # for good: torch's dict of hooks is not safe under threads


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Gives modules that this thread builds inside parameters on the meta device; computes buffers as usual.

    ``Engine`` gives each rank the values of its own pieces, drawn from the seed or read from ``weights``.
    """
    token = _EMPTY.set(True)
    try:
        with _NotesWrites(on_meta=True):
            yield
    finally:
        _EMPTY.reset(token)


def initial_values(
    model: nn.Module,
    seed: int,
    shapes: Mapping[int, tuple[int, ...]] | None = None,
    wanted: Container[int] | None = None,
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields every parameter on meta and its whole initial value, on the CPU, valid until the next module comes.

    Args:
        shapes: whole shapes, by ``id``, of parameters that are already cut.
        wanted: the parameters, by ``id``, whose values are needed; None: all. Modules without any are left out.

    Raises:
        ValueError: a parameter on meta that no initialiser writes, or that was written to afterwards.
    """
    done: set[int] = set()
    versions = {id(p): p._version for p in model.parameters()}  # initialisers write to other modules, on meta, too
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        own = {k: p for k, p in module._parameters.items() if p is not None}
        new = {k: p for k, p in own.items() if p.is_meta and id(p) not in done and (wanted is None or id(p) in wanted)}
        if not new:
            continue
        fresh = {k: _unwritten(p, (shapes or {}).get(id(p), p.shape)) for k, p in own.items()}
        try:
            for k, p in own.items():
                module._parameters[k] = nn.Parameter(fresh[k], requires_grad=p.requires_grad)
            start = {k: value._version for k, value in fresh.items()}
            with torch.no_grad(), PrivateGenerator(CPU, "init", seed, name), _NotesWrites(on_meta=False):
                for initialise in initialisers(model, name):
                    initialise()
        finally:
            module._parameters.update(own)
        if missing := [k for k in new if fresh[k].isnan().any()]:
            raise ValueError(
                f"module {name or 'root'!r} ({type(module).__name__}) has parameters on meta ({', '.join(missing)}) "
                f"and neither its reset_parameters() nor an _init_weights(module) of the model around it gives them "
                f"values: add one, or build the model with values"
            )
        for k, p in new.items():
            built, drawn = _writes(p), _writes(fresh[k])
            more = versions[id(p)] > uses[id(p)] * (fresh[k]._version - start[k])
            unseen = not hasattr(p, "_plait_writes") and more and hasattr(module, "reset_parameters")
            if unseen or _lost(p.shape, built, drawn):
                raise ValueError(
                    f"{f'{name}.{k}'.removeprefix('.')!r} was written to after its {type(module).__name__} had "
                    f"initialised it (by {'an operator' if unseen else built[-1]}), and on meta such values are lost: "
                    f"write them in its module's reset_parameters(), or in an _init_weights(self, module) of the "
                    f"model, which the engine calls; or build the model with values, or give Engine(weights=...)"
                    f"{UNSEEN if unseen else ''}"
                )
            done.add(id(p))
            yield p, fresh[k]


def initialisers(model: nn.Module, name: str) -> Iterator[Callable[[], object]]:
    """Yields the calls that give the named module's parameters their values, in the order of building the model."""
    path = [model]
    for child in name.split(".") if name else ():
        path.append(path[-1].get_submodule(child))
    reset = getattr(path[-1], "reset_parameters", None)
    if reset is not None:
        yield reset
    for owner in reversed(path):  # nn.MultiheadAttention and nn.Transformer also write to the modules inside
        method = getattr(owner, "_reset_parameters", None)
        if method is not None and not inspect.signature(method).parameters:
            yield method
    for depth in range(len(path), 0, -1):
        around = (getattr(module, "_init_weights", None) for module in reversed(path[:depth]))
        nearest = next((method for method in around if method is not None), None)
        if nearest is not None and len(inspect.signature(nearest).parameters) == 1:
            yield partial(nearest, path[depth - 1])


def _unwritten(parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory full of NaN, which shows the elements that an initialiser leaves out."""
    value = torch.empty(tuple(shape), dtype=parameter.dtype, device=CPU)
    return value.fill_(torch.nan) if value.is_floating_point() else value


def materialise(model: nn.Module, seed: int, device: torch.device, weights: Weights | None = None) -> None:
    """Gives a whole model its values in this process, drawn or read: the same that a single process would train.

    Parameters that have values, and buffers, are moved to the device with them.
    """
    check_buffers(model)
    there = [(p, p.detach()) for p in model.parameters() if not p.is_meta and p.device.type != device.type]
    values = initial_values(model, seed) if weights is None else whole_values(model, weights, device)
    for old, value in (*there, *values):
        swap_tensors(old, another(old, value.to(device)))
    for module in model.modules():
        module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})


def give_values(whole: SourceModel, stages: Sequence[BuiltUnits], seed: int, weights: Weights | None = None) -> None:
    """Reads or draws the values of all parameters that are still on meta, and gives them memory."""
    wanted: dict[int, list[Unmaterialized]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for stage in stages:
        shapes |= stage.shapes
        for fresh in stage.fresh:
            wanted.setdefault(id(fresh.origin), []).append(fresh)
            if weights is not None:
                read_piece(weights, whole.names[id(fresh.origin)], fresh.flat, fresh.index)
    if weights is None:
        for old, value in initial_values(whole.model, seed, shapes, wanted):
            for fresh in wanted[id(old)]:
                write_at_rest(fresh.flat, fresh.index, value)
    for stage in stages:
        for fresh in stage.fresh:
            try:
                with DisableTorchFunctionSubclass():  # one at rest refuses
                    swap_tensors(fresh.old, fresh.flat.parameters[fresh.index])  # others hold the old object
            except RuntimeError as error:
                who = f"parameter {whole.names[id(fresh.origin)]!r} on meta has"
                fix = "build the Engine before these, or drop them"
                raise ValueError(f"{who} weak references, or outputs computed from it: {fix}") from error
            fresh.flat.parameters[fresh.index] = fresh.old
