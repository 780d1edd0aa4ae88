"""Units whose forward is compiled, between the engine's hooks.

    hooks before     the unit is gathered; the module is entered                      eager, as usual
    forward          torch.compile, one graph                                         compiled
    hooks after      the unit is left; its outputs will gather it in the backward     eager, as usual

Units that have no other unit inside are compiled.  Blocks of one class share their code, and each shape of a batch has
its own, so every layout runs the code of the single process.

The handlers do their work around the graph: stand-ins replace parameters, and nodes of the backward gather the unit.

A unit that does not become one graph (it reads a tensor's value, say), or that draws random numbers, runs without a
compiler, after a warning that says why.
"""

import builtins
import functools
import importlib.util
import os
import shutil
import sysconfig
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.forward.interceptor import EngineMode, Interceptor, active_modes
from plait.forward.products import Products
from plait.forward.random_ops import draws_nothing, seeded
from plait.table.parallelism import Parallelism
from plait.torch_private import (
    global_forward_hooks,
    global_forward_pre_hooks,
    pop_torch_function_stack,
    push_on_torch_function_stack,
    tree_leaves,
)

MOST = 512
"""The most compilations: one for each class of units, shape of inputs and mode (training, evaluation)."""


def check_compile(parallelism: Parallelism, tensor: int, device: torch.device) -> None:
    """Raises ValueError where units cannot be compiled: incompatible settings, or no compiler."""
    if not parallelism.compile:
        return
    if tensor > 1:
        raise ValueError(
            f"compile with a mesh of tensor={tensor}: the messages inside of cut modules cannot be compiled; leave the "
            f"tensor axis or compile out"
        )
    if parallelism.recompute == "selective":
        raise ValueError(
            "compile with recompute 'selective': the compiler itself decides what a block recomputes; give "
            "'full', or leave one of them out"
        )
    if why := missing_compiler(device):
        raise ValueError(f"compile needs {why}; or leave compile out")


def missing_compiler(device: torch.device) -> str:
    """Says what the device's compiler lacks on this machine, and how to get it; an empty string if it is complete."""
    if device.type != "cpu":
        there = importlib.util.find_spec("triton") is not None
        return "" if there else f"Triton for {device}, which is not there: install it (pip install triton)"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "a C++ compiler, and there is none: install g++ (Debian: apt install g++), or name one in CXX"
    if not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return "the headers of Python, and they are not there: install them (Debian: apt install python3-dev)"
    return ""


def closed_units(model: nn.Module, names: Iterable[str], links: Iterable[str] = ()) -> list[str]:
    """The names of the units that are compiled: those without another unit, or a link of a pipeline, inside.  A stock
    layer alone in its unit (``nn.Linear``) is left out, being one operator, and so is a unit that sends messages."""
    modules, stops = dict(model.named_modules()), {*names, *links}
    closed = []
    for name in (name for name in modules if name in set(names)):
        prefix = f"{name}." if name else ""
        inside = any(other != name and other.startswith(prefix) for other in stops)
        module = modules[name]
        stock = not list(module.children()) and type(module).forward.__module__.startswith("torch.nn.")
        if not inside and not stock and not any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
            closed.append(name)
    return closed


def check_units(model: nn.Module, names: Iterable[str], links: Iterable[str]) -> None:
    """Raises ValueError where no unit is compiled."""
    if not closed_units(model, names, links):
        raise ValueError(
            "compile has nothing to do: each unit of this model is a stock layer, which is one operator, or has other "
            "units inside; put repeated layers into a ModuleList, name larger units (units=[...]; [] is one), "
            "or leave compile out"
        )


class NotCompiledError(ValueError):
    """A unit has something that only works without a compiler; the message names it."""


class CompiledUnits:
    """The compiled forwards of a stage, or of a single process, and their code.

    Args:
        interceptor: follows the model, and leaves the insides of these units to this object.
        names: the names of the units.
    """

    def __init__(self, interceptor: Interceptor, model: nn.Module, names: Collection[str]) -> None:
        self.interceptor, self.current, self.graphs = interceptor, interceptor.current, 0
        """``graphs``: the number of graphs that were compiled."""
        self._products = next((one for one in interceptor.handlers if isinstance(one, Products)), None)
        self._modes: list[EngineMode] = []
        """The modes that see functions around the unit that runs."""
        self._eager: set[str] = set()
        self._told: set[str] = set()
        self._alone: set[str] = set()
        """Units that could not share their code with the others of their class."""
        self._codes: dict[Any, Callable[..., Any]] = {}
        self._inside = {name: list(model.get_submodule(name).modules())[1:] for name in names}
        for name in names:
            module = model.get_submodule(name)
            module.forward = self._forward(model, name, module)

    def _compile(self) -> Callable[..., Any]:
        code = _call.__code__.replace(co_name="unit")  # its own code, and so its own cache
        own = types.FunctionType(code, {"__builtins__": builtins})
        return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=False)

    def _code(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Callable[..., Any]:
        """The code that blocks of one class share for these shapes, or a unit's own; Dynamo's guards do the rest."""
        leaves = tree_leaves((args, kwargs))
        shapes = tuple((x.shape, x.dtype, x.requires_grad) for x in leaves if isinstance(x, Tensor))
        of_class = type(module), name * (name in self._alone), _changes(self._inside[name])
        key = of_class, module.training, torch.is_grad_enabled(), shapes
        if key not in self._codes:
            if len(self._codes) == MOST:
                raise ValueError(
                    f"units were compiled for {MOST} shapes of their inputs, and here are others: pad batches to a few "
                    f"lengths, or leave compile out"
                )
            self._codes[key] = self._compile()
        return self._codes[key]

    def _forward(self, model: nn.Module, name: str, module: nn.Module) -> Callable[..., Any]:
        once = module.forward

        @functools.wraps(once)
        def forward(*args: Any, **kwargs: Any) -> Any:
            boundary = self.current.context.boundary
            if name in self._eager or (boundary is not None and boundary.output is not None):
                return once(*args, **kwargs)  # after the stage's last link nothing computes
            try:
                return self._run(name, module, once, args, kwargs)
            except NotCompiledError as why:
                shown = repr(name) if name else "the model"
                if str(why) not in self._told:
                    self._told.add(str(why))
                    warnings.warn(f"unit {shown} runs without the compiler: {why}; others like it do too", stacklevel=2)
                self._eager.add(name)
                self.interceptor.open(model, name)
            return once(*args, **kwargs)

        return forward

    def _run(self, name: str, module: nn.Module, once: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from torch._dynamo import convert_frame, exc

        try:
            with _hidden_modes() as self._modes, convert_frame.compile_lock:  # torch compiles in one thread at a time
                try:
                    return self._code(name, module, args, kwargs)(once, args, kwargs)
                except exc.FailOnRecompileLimitHit:  # too many blocks that differ
                    self._alone.add(name)
                    return self._code(name, module, args, kwargs)(once, args, kwargs)
        except exc.FailOnRecompileLimitHit as error:  # it differs from call to call
            raise NotCompiledError(_first_line(error)) from None
        except exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, NotCompiledError):
                raise error.inner_exception from None
            raise  # it should have worked
        except exc.TorchDynamoException as error:
            raise NotCompiledError(_first_line(error)) from None

    # ---- the compiler's part ------------------------------------------------------------------------------------

    def _backend(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns the compiled form of a unit's graph; Dynamo calls this."""
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(module, list(inputs), inner_compile=_compile_checked)
        self.graphs += 1

        def run(*values: Any) -> Any:
            if self._products is not None:
                values = tuple(map(self._products.stand_in, values))
            outputs = functools.reduce(_as_seen_by, reversed(self._modes), compiled)(*values)
            self._gather_in_backward(outputs)
            return outputs

        return run

    def _gather_in_backward(self, outputs: Sequence[Any]) -> None:
        """Makes each node of the unit's outputs gather the unit before it runs."""
        units = self.current.context.units
        if not units or not torch.is_grad_enabled():
            return
        unshard = units[-1].open_again
        for node in {out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None}:
            node.register_prehook(lambda *gradients: unshard())


def _changes(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """Ids of the hooks and replaced forwards of these modules, which Dynamo's guards do not compare."""
    found = [*global_forward_hooks, *global_forward_pre_hooks]
    for module in modules:
        found += [*module._forward_pre_hooks, *module._forward_hooks]
        found += [*module._backward_pre_hooks, *module._backward_hooks]
        if "forward" in vars(module):
            found.append(id(module.forward))
    return tuple(found)


@contextmanager
def _hidden_modes() -> Iterator[list[EngineMode]]:
    """Inside, none of the engine's modes sees a function; yields them, outermost first."""
    modes = active_modes()
    for _ in modes:
        pop_torch_function_stack()
    users = [mode for mode in modes if not isinstance(mode, EngineMode)]
    try:
        for mode in users:
            push_on_torch_function_stack(mode)
        yield [mode for mode in modes if isinstance(mode, EngineMode)]
    finally:
        for _ in users:
            pop_torch_function_stack()
        for mode in modes:
            push_on_torch_function_stack(mode)


def _as_seen_by(function: Callable[..., Any], mode: EngineMode) -> Callable[..., Any]:
    if isinstance(mode, Interceptor):  # its handlers' work is done here
        return function
    see: Callable[..., Any] = mode.__torch_function__
    return lambda *values: see(function, (), values)


def _call(once: Any, args: Any, kwargs: Any) -> Any:
    return once(*args, **kwargs)


def _compile_checked(module: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    refuse_random(module.graph)
    return compile_fx_inner(module, inputs, **settings)


def refuse_random(graph: torch.fx.Graph) -> None:
    """Raises NotCompiledError for an operator that draws, in a graph that is to be compiled."""
    for node in graph.nodes:
        op = node.target
        seeds = hasattr(op, "tags") and seeded(op) and not draws_nothing(op, node.args, node.kwargs)
        if seeds or "inductor_seed" in str(op):
            raise NotCompiledError("it draws random numbers (dropout, for example), which belong to the whole run")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
