"""Takes a part out of a model: the modules of one stage, in copies of the containers around them.

    model          embed  blocks(0 1 2 3)  norm  head
    stage 1 of 2     ·    blocks(· · 2 3)  norm  head       ·  a stand-in for a module of another stage

Module and parameter names stay the same, so dropout sites, tensor plans and state dicts need not know about stages.  A
weight that two stages use is two parameters, whose gradients are summed once per step (see ``tied_weights``).  If both
stages are on one rank, the second gets a copy.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from plait.pipeline.program import Blocks, StagePart
from plait.zero.build import another
from plait.zero.storage import placeholder

PLAIN = (bool, int, float, complex, str)
"""Types of a program's attributes that a stage's copy follows."""

_OF_TORCH = frozenset(vars(nn.Module())) | {"_call_impl"}


@dataclass(frozen=True)
class Cutting:
    """A part that was taken out of a model."""

    model: nn.Module
    origin: Mapping[int, nn.Parameter]
    """The whole model's parameters, by ``id`` of the part's parameters."""
    containers: Sequence[tuple[nn.Module, nn.Module]]
    """The model's containers of blocks, each with the part's copy."""
    made: Sequence[tuple[nn.Module, nn.Module]]
    """The model's modules that this stage has, each with the part's module: the same one, or a copy."""
    foreign: Mapping[int, nn.Module]
    """Stand-ins, by ``id`` of the other stages' modules."""
    outside: Mapping[str, nn.Module]
    """Modules outside of the blocks that have parameters, or their stand-ins."""

    def copies(self) -> "list[ModuleCopy]":
        """The copies of modules in the part."""
        inside = (zip(a.modules(), b.modules(), strict=True) for a, b in self.made if a is not b)
        return [ModuleCopy(*pair) for pair in chain(self.containers, *inside)]


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, except torch's own and a ``forward`` that is not its method, which the engine sets
    on each stage."""
    found = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
    if "forward" in found and getattr(found["forward"], "__self__", None) is not module:
        del found["forward"]
    return found


class ModuleCopy:
    """A part's copy of a user's module.  It follows the mode, the numbers and strings, and the buffers that a program
    sets between steps."""

    def __init__(self, user: nn.Module, copied: nn.Module) -> None:
        self.user, self.copied = user, copied
        self._seen, self._buffers = attributes_of(user), self._versions()

    def follow(self) -> None:
        """Copies the changes since the last call."""
        self.copied.training = self.user.training
        user, buffers = attributes_of(self.user), self._versions()
        for key, value in user.items():
            if value is not self._seen.get(key, self) and type(value) in PLAIN:
                vars(self.copied)[key] = value
        for key, (buffer, version) in buffers.items():
            mine, known = self.copied._buffers.get(key), self._buffers.get(key)
            changed = known is None or known[0] is not buffer or known[1] != version
            if changed and mine is not buffer:  # the engine may have moved the copy's buffer to a device
                self.copied._buffers[key] = buffer.to(buffer.device if mine is None else mine.device, copy=True)
        self._seen, self._buffers = user, buffers

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        return {key: (b, b._version) for key, b in self.user._buffers.items() if b is not None}


def containers_of(names: Sequence[str]) -> frozenset[str]:
    """The names of the modules that contain these; the model itself is ''."""
    return frozenset(name[:end] for name in names for end in (0, *(i for i, c in enumerate(name) if c == ".")))


def cut_out(
    model: nn.Module,
    blocks: Blocks,
    here: range,
    taken: set[int],
    elsewhere: Callable[[nn.Module], nn.Module],
    missing: Callable[[Tensor], Tensor],
) -> Cutting:
    """Takes out the part with some blocks.

    Args:
        taken: modules and parameters, by ``id``, that an earlier stage of this rank has: the part gets copies of them
            (parameters share the values), and adds its own modules and parameters to the set.
        elsewhere, missing: make stand-ins for another stage's module and for its parameter.
    """
    own, around = blocks.on_stage(here), containers_of((*blocks.names, *blocks.outside))
    origin: dict[int, nn.Parameter] = {}
    second: dict[int, nn.Parameter] = {}
    made: dict[int, tuple[nn.Module, nn.Module]] = {}
    foreign: dict[int, nn.Module] = {}
    outside: dict[str, nn.Module] = {}
    containers: list[tuple[nn.Module, nn.Module]] = []
    shares_rank = bool(taken)

    def again(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in taken:
            return parameter
        new = second.setdefault(id(parameter), another(parameter, parameter.detach()))
        origin[id(new)] = parameter
        return new

    def of_this_stage(module: nn.Module) -> nn.Module:
        if id(module) not in made:
            shared = any(id(x) in taken for x in (*module.modules(), *module.parameters()))
            memo: dict[int, Any] = {id(p): again(p) for p in module.parameters()} if shared else {}
            made[id(module)] = module, copy.deepcopy(module, memo) if shared else module
        return made[id(module)][1]

    def build(module: nn.Module, name: str) -> nn.Module:
        if name not in around:
            placed = name in blocks.outside and any(True for _ in module.parameters())
            if name in own or not (placed or name in blocks.names):  # the latter: rotary tables, a loss
                part = of_this_stage(module)
            else:
                part = foreign.get(id(module)) or foreign.setdefault(id(module), elsewhere(module))
            if placed:
                outside[name] = part
            return part
        container = _shallow(module, buffers=shares_rank)
        vars(container).pop("_output_capturing_hooks_installed", None)  # transformers adds them again to the copy
        prefix = f"{name}." if name else ""
        for short, child in module._modules.items():
            if child is not None:
                container._modules[short] = build(child, f"{prefix}{short}")
        for short, parameter in module._parameters.items():
            if parameter is not None and f"{prefix}{short}" in own:
                container._parameters[short] = again(parameter)
            elif parameter is not None:
                del container._parameters[short]
                vars(container)[short] = missing(parameter)
        containers.append((module, container))
        return container

    part = build(model, "")
    for parameter in part.parameters():
        origin.setdefault(id(parameter), parameter)
    for module in model.modules():
        if id(module) in made:
            taken |= {id(x) for x in (*module.modules(), *module.parameters())}
    taken |= {id(origin[id(parameter)]) for parameter in part.parameters()}
    return Cutting(part, origin, containers, list(made.values()), foreign, outside)


def _shallow(module: nn.Module, *, buffers: bool) -> nn.Module:
    """Copies a module with the same children and attributes, its own hooks and, if asked, its own ``buffers``."""
    new = copy.copy(module)
    for key in vars(nn.Module()):
        value = vars(new).get(key)
        if isinstance(value, dict | set):
            vars(new)[key] = copy.copy(value)
    if buffers:
        new._buffers.update({key: None if b is None else b.clone() for key, b in module._buffers.items()})
    return new


def release(model: nn.Module, parts: Sequence[StagePart]) -> None:
    """Frees the values that only other ranks need.  The model then refuses to run, and to give its state."""
    here = {id(p) for part in parts for p in part.model.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in here and not parameter.is_meta:
            parameter.data = placeholder(parameter.dtype, parameter.device).expand(parameter.shape)

    def refuse(*_: Any) -> None:
        raise ValueError(
            "this model is cut in stages, and each rank has only some of them: train it by engine.step, and take its "
            "values from engine.full_state_dict()"
        )

    model.register_forward_pre_hook(refuse)
    model.register_state_dict_pre_hook(refuse)
