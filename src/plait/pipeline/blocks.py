"""A model as blocks that run in turn, and the program of one stage of it.

    class GPT(nn.Module):
        def pipeline_blocks(self):                       blocks    embed  blocks.0  blocks.1  blocks.2  norm  head
            return ["embed", "blocks", "norm", "head"]   stage 0   runs   runs      runs ─► ends the forward
                                                         stage 1   ·      ·         enters ─► runs      runs  runs

A model promises two things by naming its blocks.  Its forward runs them in this order, each once, as
``carry = block(carry, ...)``; a carry is a tensor or a pytree of tensors.  Any other arguments of a block (masks,
positions) are computed from the model's own inputs, without parameters.  An ``nn.Sequential`` keeps this promise.

Each stage runs the model's own forward.  A block before the stage's first one returns NaN, marked ``NotHere``: under a
broken promise it gets into the carry or the loss, which are refused.  The last of these blocks returns the carry from
the stage before.  After the stage's last block the forward ends.
"""

import importlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plait.forward.context import CurrentForward, in_backward
from plait.forward.random_ops import OwnLayer
from plait.pipeline.cutting import Cutting, attributes_of, cut_out, release
from plait.pipeline.message import Handed, MessageForm, shape_of
from plait.pipeline.not_here import ELSEWHERE, NotHere, not_here
from plait.pipeline.program import Blocks, ModelCut, StageDone, StagePart, StageProgram
from plait.torch_private import (
    is_fwd_grad_enabled,
    tree_flatten,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

WING = "plait.anymodel"
"""Cuts models that name no blocks, if it is installed: its ``cut(model)`` returns a ``ModelCut``."""


def cut(model: nn.Module) -> ModelCut:
    """Cuts a model at its blocks; any other model by the wing.  Raises ValueError if neither can."""
    if blocks := declared_blocks(model):
        return ModelCut(blocks, partial(part_of, model, blocks), partial(release, model))
    other: ModelCut = importlib.import_module(WING).cut(model)
    return other


def declared_blocks(model: nn.Module) -> Blocks | None:
    """The blocks of a model that names them by ``pipeline_blocks``; None for any other model."""
    declared = getattr(model, "pipeline_blocks", None)
    if declared is not None:
        names = opened(model, declared() if callable(declared) else declared)
        check_names(model, names, "pipeline_blocks()")
        if why := _unfit(model, names):
            raise ValueError(
                f"{why}, of pipeline_blocks() of {type(model).__name__}: put it into one block, or name cut points of "
                f"the model as it is, by pipeline_links()"
            )
        return Blocks(names)
    if hasattr(model, "pipeline_links"):
        return None
    names = tuple(model._modules)
    kept = type(model).forward is nn.Sequential.forward and len(names) > 1
    return Blocks(names) if kept and not _unfit(model, names) else None


def opened(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names, with lists of modules replaced by the names of their entries."""
    found: list[str] = []
    for name in names:
        module = dict(model.named_modules(remove_duplicate=False)).get(name)
        many = module._modules if isinstance(module, nn.ModuleList) else ()
        found += [f"{name}.{short}" for short in many] or [name]
    return tuple(found)


def check_names(model: nn.Module, names: Sequence[str], told: str) -> None:
    """Raises ValueError if a name is no module, or occurs twice."""
    kind, modules = type(model).__name__, dict(model.named_modules(remove_duplicate=False))
    if unknown := [name for name in names if name not in modules]:
        raise ValueError(f"{told} of {kind} names {unknown[0]!r}, which is no module of it")
    for i, name in enumerate(names):
        if other := next((n for j, n in enumerate(names) if i != j and f"{name}.".startswith(f"{n}.")), None):
            inside = "twice" if other == name else f"and {other!r}, which contains it"
            raise ValueError(
                f"{told} of {kind} names {name!r} {inside}: give a module that runs several times a name for each run, "
                f"as in self.runs = nn.ModuleList([block, block])"
            )


def _unfit(model: nn.Module, names: Sequence[str]) -> str:
    """Says which parameter or buffer of the model's state is in no block, or which buffer is in several; '' if there is
    none."""
    for key in model.state_dict():
        if not any(key.startswith(f"{name}.") for name in names):
            return f"{key!r} is in no block"
    return buffer_of_two(model, names)


def buffer_of_two(model: nn.Module, names: Sequence[str]) -> str:
    """Says which buffer is in several blocks, where each stage would write its own; '' if there is none."""
    found: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        block = next((name for name in names if key.startswith(f"{name}.")), None)
        if block and not isinstance(value, nn.Parameter) and found.setdefault(id(value), block) != block:
            return f"buffer {key!r} is in the blocks {found[id(value)]!r} and {block!r}"
    return ""


class SkippedBlock(OwnLayer):
    """Replaces a block of another stage.  Until it has run in a forward, it has the block's plain attributes."""

    program: "BlockProgram | None" = None

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.told = {key: value for key, value in attributes_of(block).items() if not key.startswith("_")}

    def _refuse_once_run(self, what: str) -> None:
        if self.program is not None and self.program.is_over(self):
            raise ValueError(f"{what} of a block that has run is {ELSEWHERE}")

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses a search by a loss, which would find nothing here."""
        self._refuse_once_run("a module")
        return super().named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        self._refuse_once_run("a module")
        return super().apply(fn)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self._refuse_once_run(repr(name))
        if name not in (told := vars(self).get("told", {})):
            raise AttributeError(f"{name!r} of a block is {ELSEWHERE}")
        return told[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.program is not None
        return self.program.pass_by(self)


def part_of(model: nn.Module, blocks: Blocks, here: range, taken: set[int], device: torch.device) -> StagePart:
    """Returns the part of a model that one stage has (see ``cut_out``)."""
    cutting = cut_out(model, blocks, here, taken, SkippedBlock, lambda parameter: parameter)
    return StagePart(cutting.model, cutting.origin, blocks, partial(BlockProgram, cutting, blocks, here))


class CutProgram(StageProgram):
    """The program of a stage with some blocks of a model: it sees them run, and checks their order."""

    word: ClassVar[str] = "block"

    def __init__(
        self, cutting: Cutting, names: tuple[str, ...], here: range, number: int, current: CurrentForward
    ) -> None:
        self.names, self.here, self.number, self.current = names, here, number, current
        self.model, self.last = cutting.model, here.stop == len(names)
        self._copies = cutting.copies()
        self.places: dict[int, list[int]] = {}
        """The blocks that each module is, by ``id``."""
        self.modules = [cutting.model.get_submodule(name) for name in names]
        for index, module in enumerate(self.modules):
            self.places.setdefault(id(module), []).append(index)

    def follow(self) -> None:
        for copy in self._copies:
            copy.follow()

    def see(self, module: nn.Module, run: Callable[..., Any]) -> None:
        """Makes calls of a module run ``run(call, module, ...)``, around all its hooks, also those added later."""
        vars(module)["_call_impl"] = partial(run, module._call_impl, module)

    def check_next(self, module: nn.Module, index: int | None) -> int:
        """Returns the index of a block that is about to run; raises ValueError unless it is ``index``, the next one."""
        word, places = self.word, self.places[id(module)]
        if in_backward():
            raise ValueError(
                f"a checkpoint around several {word}s of the pipeline holds {word}s of two stages: checkpoint inside "
                f"of a {word}, or around one"
            )
        if index is None:
            raise ValueError(f"stage {self.number} has only some {word}s of the model: train it by engine.step")
        if index not in places:
            expected = repr(self.names[index]) if index < len(self.names) else "no more"
            raise ValueError(
                f"the pipeline's {word} {self.names[places[0]]!r} ran where {expected} was to come: {word}s run once "
                f"each, in the order in which the model names them, and loss_fn calls the model once"
            )
        return index

    def check_end(self, tensors: Sequence[Any]) -> None:
        """Raises ValueError if the stage's last block cannot end it with these tensors."""
        name = self.names[self.here.stop - 1]
        if any(isinstance(one, NotHere) for one in tensors):
            raise ValueError(f"{name!r}, the last {self.word} of stage {self.number}, reads {ELSEWHERE}")
        if not tensors:
            raise ValueError(f"stage {self.number} ends with {name!r}, which returns no tensor: return one")
        if not is_fwd_grad_enabled():  # inside the forward of an autograd.Function
            raise ValueError(
                f"{name!r}, the last {self.word} of stage {self.number}, runs inside an autograd.Function, where "
                f"nothing is recorded (a checkpoint): use checkpoint(..., use_reentrant=False)"
            )


class BlockProgram(CutProgram):
    """Runs some blocks of a model."""

    def __init__(self, cutting: Cutting, blocks: Blocks, here: range, number: int, current: CurrentForward) -> None:
        super().__init__(cutting, blocks.names, here, number, current)
        self._received: Handed | None = None
        self._nothing: Any = None
        self._next: int | None = None
        """The index of the block that runs next; None outside of a forward of the stage."""
        for module in dict.fromkeys(self.modules):
            if isinstance(module, SkippedBlock):
                vars(module)["program"] = self
            else:
                self.see(module, self._run)

    def forward(self, received: Handed | None, batch: Any, call: Callable[[], Any]) -> Any:
        self._received, self._nothing, self._next = received, None, 0
        try:
            output = call()
            if isinstance(output, NotHere):
                raise ValueError(f"the loss reads {ELSEWHERE}")
            return output
        except StageDone as done:
            return _handed(done.args[0])
        finally:
            self._received = self._nothing = self._next = None

    def _reached(self, module: nn.Module) -> int:
        """Returns the index of a block that is about to run; raises ValueError unless it is the next one."""
        index = self.check_next(module, self._next)
        self._next = index + 1
        return index

    def is_over(self, module: nn.Module) -> bool:
        """True for a block that has run in the current forward."""
        return self._next is not None and self._next > self.places[id(module)][-1]

    def pass_by(self, module: nn.Module) -> Any:
        """Returns the output, on this stage, of an earlier stage's block."""
        index = self._reached(module)
        assert self._received is not None
        if index + 1 == self.here.start:
            return _carry(self._received)
        if self._nothing is None:
            self._nothing = tree_map(self._stand_in, _carry(self._received))
        return self._nothing

    def _stand_in(self, received: Tensor) -> Tensor:
        """Replaces a carry of another stage; it is whole in time where the stream is cut."""
        shape, length = list(received.shape), self.current.context.length
        if length and len(shape) > 1:
            shape[1] = length
        return not_here(shape, received.dtype, received.device)

    def _run(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._next is None or in_backward():
            return call(*args, **kwargs)
        index = self._reached(module)
        output = call(*args, **kwargs)
        if index + 1 < self.here.stop or self.last:
            return output
        tensors, _ = tree_flatten(output)
        if wrong := [type(one).__name__ for one in tensors if not isinstance(one, Tensor)]:
            raise ValueError(
                f"stage {self.number} ends with {self.names[index]!r}, which returns a {wrong[0]}: a carry is a "
                f"tensor, or a tuple, list or dict of tensors"
            )
        self.check_end(tensors)
        raise StageDone(output)


def _handed(carry: Any) -> Handed:
    tensors, spec = tree_flatten(carry)
    told = "" if carry is tensors[0] else json.dumps(treespec_dumps(spec))
    return Handed(tensors, MessageForm(tuple(map(shape_of, tensors)), told))


def _carry(received: Handed) -> Any:
    """Returns the carry of the stage before, in the containers that it had there."""
    told = received.form.told
    return tree_unflatten(received.tensors, treespec_loads(json.loads(told))) if told else received.tensors[0]
