"""Units whose forward is compiled, between the engine's hooks.

    hooks before     the unit is gathered; the module is entered                      eager, as ever
    forward          torch.compile, one graph ── its inputs: the parameters,          compiled
                     the activations, and the keys of the dropout (``graph_dropout``)
    hooks behind     the unit is left; its outputs will gather it in the backward     eager, as ever

Units that have no other unit inside are compiled.  Blocks of one class share their code, and each shape of a batch has
its own, so every layout runs the code of the single process.

The handlers' work is done around the graph: stand-ins take the places of parameters, keys are drawn for where the
forward is, and nodes of the backward gather the unit.

A unit that does not become one graph (it reads a tensor's value, say, or draws other noise) runs without a compiler,
after a warning that says why.
"""

import builtins
import functools
import os
import sysconfig
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.forward.dropout import DropoutRNG
from plait.forward.graph_dropout import GraphMask, NotCompiledError, refuse_random, rows_of, serve
from plait.forward.interceptor import EngineMode, Interceptor, hidden_modes
from plait.forward.masks import on_device
from plait.forward.products import Products
from plait.forward.sites import Sites
from plait.table.parallelism import Parallelism
from plait.torch_private import global_forward_hooks, global_forward_pre_hooks, tree_leaves

MOST = 512
"""Classes of units, times shapes of their inputs, times modes (training, evaluation): each is compiled."""


def check_compile(parallelism: Parallelism, tensor: int, device: torch.device) -> None:
    """Raises ValueError where units cannot be compiled: settings that do not go with it, or no compiler."""
    if not parallelism.compile:
        return
    if tensor > 1:
        raise ValueError(
            f"compile with a mesh of tensor={tensor}: the messages inside of cut modules cannot be compiled; leave the "
            f"tensor axis or compile out"
        )
    if parallelism.recompute == "selective":
        raise ValueError(
            "compile with recompute 'selective': the compiler decides itself what of a block is made again; give "
            "'full', or leave one of them out"
        )
    if parallelism.gemm != "torch":
        raise ValueError(f"compile with gemm {parallelism.gemm!r}: the compiler multiplies by torch's; leave one out")
    if why := missing_compiler(device):
        raise ValueError(f"compile needs {why}; or leave compile out")


def missing_compiler(device: torch.device) -> str:
    """What the compiler of a device lacks on this machine, and how to get it; nothing if it lacks nothing."""
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        return "" if has_triton() else f"Triton for {device}, which is not there: install it (pip install triton)"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler, and there is none: install g++ (Debian: apt install g++), or name one in CXX"
    if not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return "the headers of Python, and they are not there: install them (Debian: apt install python3-dev)"
    return ""


def closed_units(model: nn.Module, names: Iterable[str], links: Iterable[str] = ()) -> list[str]:
    """Which units are compiled: those with no unit, nor link of a pipeline, inside; not a stock layer alone in its
    unit (``nn.Linear``), which is one operator, nor what sends messages itself."""
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


class CompiledUnits:
    """The compiled forwards of a stage, or of a single process, and their code.

    Args:
        interceptor: follows the model, and leaves the insides of these units to this.
        names: of the units.
    """

    def __init__(self, interceptor: Interceptor, model: nn.Module, names: Collection[str]) -> None:
        self.interceptor, self.current, self.graphs = interceptor, interceptor.current, 0
        """``graphs``: how many were compiled."""
        handlers = interceptor.handlers
        self._dropout = next(handler for handler in handlers if isinstance(handler, DropoutRNG))
        self._products = next((handler for handler in handlers if isinstance(handler, Products)), None)
        self._name, self._module = "", model
        self._modes: list[EngineMode] = []
        """The unit that runs, and who sees functions around it."""
        self._eager: set[str] = set()
        self._alone: set[str] = set()
        """Units that could not share their code with the others of their class."""
        self._codes: dict[Any, Callable[..., Any]] = {}
        self._inside = {name: list(model.get_submodule(name).modules())[1:] for name in names}
        for name in names:
            module = model.get_submodule(name)
            module.forward = self._forward(model, name, module)

    def _compile(self) -> Callable[..., Any]:
        code = _call.__code__.replace(co_name="unit")  # of its own, and so is its cache
        own = types.FunctionType(code, {"__builtins__": builtins})
        return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=False)

    def _code(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Callable[..., Any]:
        """What blocks of one class have in common for these shapes, or a unit's own; Dynamo's guards do the rest."""
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
                return once(*args, **kwargs)  # behind the stage's last link nothing computes
            try:
                return self._run(name, module, once, args, kwargs)
            except NotCompiledError as why:
                shown = repr(name) if name else "the model"
                warnings.warn(f"unit {shown} runs without the compiler: {why}", stacklevel=2)
                self._eager.add(name)
                self.interceptor.open(model, name)
            return once(*args, **kwargs)

        return forward

    def _run(self, name: str, module: nn.Module, once: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from torch._dynamo import convert_frame, exc

        around = self._name, self._module
        self._name, self._module = name, module
        try:
            with hidden_modes() as self._modes, convert_frame.compile_lock:  # torch compiles in one thread at a time
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
        finally:
            self._name, self._module = around

    # ---- the compiler's part ------------------------------------------------------------------------------------

    def _backend(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls with a unit's graph: its compiled form."""
        from torch._dynamo.source import ConstantSource
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        names = {str(id(one)): name for name, one in self._module.named_modules()}
        graph = _copied(module.graph)  # Dynamo goes on with its own
        sites = Sites(self._module)
        draws = serve(graph, lambda node: _site_of(node, names, sites))
        module = torch.fx.GraphModule(module, graph)
        keys: tuple[Tensor, ...] = ()
        if draws:
            placeholder: Any = [node for node in graph.nodes if node.op == "placeholder"][-1]
            placeholder._dynamo_source = ConstantSource("keys")
            device = next(x.device for x in inputs if isinstance(x, Tensor))
            keys = (torch.zeros(3, sum(draw.rows for draw in draws), dtype=torch.int64, device=device),)
        compiled: Any = compile_fx(module, [*inputs, *keys], inner_compile=_compile_checked)

        def run(*values: Any) -> Any:
            if self._products is not None:
                values = tuple(map(self._products.stand_in, values))
            given = (*values, *self._keys(draws, device)) if draws else values
            outputs = functools.reduce(_as_seen_by, reversed(self._modes), compiled)(*given)
            self._gather_in_backward(outputs)
            return outputs

        return run

    def _keys(self, draws: Sequence[GraphMask], device: torch.device) -> tuple[Tensor]:
        """The keys of the running unit's masks, for where its forward stands."""
        current = self.current
        if not current.context.draws:
            raise ValueError(
                f"unit {self._name!r} drops in a model that is in eval mode: call model.eval() or model.train() of the "
                f"whole model"
            )
        rows: dict[int, list[tuple[int, int, int]]] = {}
        for module in dict.fromkeys(draw.module for draw in draws):
            name = ".".join(filter(None, (self._name, module)))
            if module:
                current.enter_module(name, switched_on=False, is_model=False)
            for place, draw in enumerate(draws):
                if draw.module == module:
                    rows[place] = rows_of(self._dropout, draw)
            if module:
                current.leave_module()
        numbers = [row for place in sorted(rows) for row in rows[place]]
        return (on_device(torch.tensor(numbers, dtype=torch.int64).reshape(-1, 3).T.contiguous(), device),)

    def _gather_in_backward(self, outputs: Sequence[Any]) -> None:
        """Whatever leaves the unit has it gathered before its node runs."""
        units = self.current.context.units
        if not units or not torch.is_grad_enabled():
            return
        unshard = units[-1].open_again
        for node in {out.grad_fn for out in outputs if isinstance(out, Tensor) and out.grad_fn is not None}:
            node.register_prehook(lambda *gradients: unshard())


def _changes(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """Hooks and forwards of their own that some modules have, by number: Dynamo does not look whether it knows them."""
    found = [*global_forward_hooks, *global_forward_pre_hooks]
    for module in modules:
        found += [*module._forward_pre_hooks, *module._forward_hooks]
        found += [*module._backward_pre_hooks, *module._backward_hooks]
        if "forward" in vars(module):
            found.append(id(module.forward))
    return tuple(found)


def _as_seen_by(function: Callable[..., Any], mode: EngineMode) -> Callable[..., Any]:
    if isinstance(mode, Interceptor):  # whose handlers' work is done here
        return function
    see: Callable[..., Any] = mode.__torch_function__
    return lambda *values: see(function, (), values)


def _call(once: Any, args: Any, kwargs: Any) -> Any:
    return once(*args, **kwargs)


def _compile_checked(module: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    refuse_random(module.graph)
    return compile_fx_inner(module, inputs, **settings)


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    copy, same = torch.fx.Graph(graph.owning_module), dict[torch.fx.Node, torch.fx.Node]()
    copy.output(copy.graph_copy(graph, same))
    for old, new in same.items():
        if source := getattr(old, "_dynamo_source", None):
            new._dynamo_source = source
    return copy


def _site_of(node: torch.fx.Node, names: Mapping[str, str], sites: Sites) -> str:
    """The site of a node that draws, in the unit."""
    site = ""
    for key in (str(call).split("@")[0] for call in node.meta.get("nn_module_stack") or {}):
        if key in names:
            site, *others = sites.inside(site, names[key])
            if others or sites.inside("", site) != [site]:
                raise NotCompiledError(f"it draws in module {site!r}, which is in it several times")
    return site


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
