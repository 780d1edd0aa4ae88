"""A model as a chain of links, and the part of it that one stage runs.

    embed ─► blocks.0 ─► blocks.1 ─► norm ─► head            links: modules, each from one tensor to one tensor
    stage 1 is   ·  ─►   ·    ─► blocks.1 ─► norm ─► ·       the same model, foreign layers for the others' links

A stage runs the model's own code and links, inside copies of their containers in which every link of another stage is
a ``ForeignLayer``.  Module and parameter names stay as they are, so dropout sites, tensor plans and state dicts do not
know that there are stages.  A weight that two stages use is two parameters, whose gradients are summed once per step
(see ``tied_weights``); where both stages are on one rank, the second gets a copy.
"""

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from plait.forward.attributes import attributes_of
from plait.forward.random_ops import OwnLayer
from plait.forward.sites import Sites
from plait.pipeline.chain import Chain, around_links
from plait.pipeline.copies import CopiedModule, SharedModule, translated
from plait.pipeline.not_here import BufferElsewhere, not_here
from plait.tensor import Parallel
from plait.zero.storage import placeholder

Uses = Mapping[int, tuple[int, ...]]
"""Which stages use each parameter of the whole model, by its ``id``, in order."""


CHILDREN = "the modules inside"


class PlacedElsewhereError(AttributeError, ValueError):
    """Something is asked of a module that another stage has; ``hasattr`` and ``getattr`` with a default go on."""


class ForeignLayer(OwnLayer):
    """In the place of a module that another stage has; the ``StageBoundary`` decides what it returns.

    It has the module's plain attributes (its kind of attention, its number), ``NotHere`` for its parameters, and the
    same for the modules inside: the model may ask for them until the links have run.  What somebody looks for in it
    afterwards, a link has left in the forward (an auxiliary loss), and that is on another stage; so is what a walk over
    all modules is after.
    """

    at_call: Callable[[nn.Module, Any, Any], Any]
    at_look: Callable[[nn.Module, str], None] = staticmethod(lambda link, what: None)

    def __init__(self, link: nn.Module, device: torch.device, around: "ForeignLayer | None" = None) -> None:
        super().__init__()
        self._kind = type(link)
        if around is not None:
            self.at_call = partial(_refuse_call, type(link).__name__)
            self.at_look = lambda _, what: around.at_look(around, what)
        own: dict[str, Any] = {k: placed_elsewhere(p, device) for k, p in link._parameters.items() if p is not None}
        own |= {k: None for k, v in (*link._parameters.items(), *link._modules.items()) if v is None}
        inside = ((k, child) for k, child in link._modules.items() if child is not None)
        own |= {k: ForeignLayer(child, device, around or self) for k, child in inside}
        self._plain, self._seen = own, dict[str, Any]()
        self.follow(link)

    def follow(self, link: nn.Module) -> None:
        """Take over what a program has set on the link, and on the modules inside."""
        self.training = link.training
        for key, value in attributes_of(link).items():
            if value is not self._seen.get(key, self) and not (key.startswith("_") or callable(value)):
                self._plain[key] = self._seen[key] = value
        for key, child in link._modules.items():
            if child is not None and isinstance(inside := self._plain.get(key), ForeignLayer):
                inside.follow(child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.at_call(self, args, kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """A walk over all modules, or parameters, of the model comes by."""
        self.at_look(self, "what is inside")
        yield from super().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """So does ``apply``."""
        self.at_look(self, CHILDREN)
        yield from super().named_children()

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("training", "at_call", "at_look"):
            super().__setattr__(name, value)
        else:  # somebody clears what the forward left
            self._plain[name] = value

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.at_look(self, repr(name))
        plain = vars(self).get("_plain", {})
        try:
            return plain[name] if name in plain else super().__getattr__(name)
        except AttributeError:
            raise PlacedElsewhereError(
                f"{name!r} is asked of a part of the model that another stage has: keep it in an attribute of the "
                f"model or its config, or train without a pipe axis"
            ) from None


def kind_of(link: nn.Module) -> type:
    """A link's class, wherever it is."""
    return link._kind if isinstance(link, ForeignLayer) else type(link)


def _refuse_call(kind: str, *call: Any) -> Any:
    raise ValueError(
        f"a {kind} is called, which is inside of a link of the pipeline that another stage has: the model goes through "
        f"the link's own modules, so give it a method pipeline_links() that names those, or train without a pipe axis"
    )


def placed_elsewhere(parameter: Tensor, device: torch.device) -> Tensor:
    """What stands for a parameter of another stage; it takes no memory."""
    return not_here((), parameter.dtype, device).expand(parameter.shape)


def empty(model: nn.Module, filled: Container[int]) -> None:
    """Parameters of other stages that, by ``id``, were given values for a forward have none again."""
    for module in model.modules():
        held = module._plain if isinstance(module, ForeignLayer) else vars(module)
        for key, value in held.items():
            if id(value) in filled:
                held[key] = placed_elsewhere(value, value.device)


@dataclass(frozen=True)
class StageModel:
    """What one stage runs: the model's own links, and foreign layers for those of other stages.

    ``origin`` gives, by ``id`` of a parameter of the part, the parameter of the whole model: itself, unless an earlier
    stage of the rank has that.
    """

    model: nn.Module
    origin: Mapping[int, nn.Parameter]
    chain: Chain
    links: range
    """Which links of the chain it has."""
    outside: Mapping[str, nn.Module]
    """Modules that belong to no link and have parameters, or what stands for them."""
    copies: tuple[CopiedModule, ...]
    """The user's modules of which the part has copies, and those that other stages run too."""

    @classmethod
    def part(
        cls, model: nn.Module, chain: Chain, links: range, taken: set[int], device: torch.device | str = "cpu"
    ) -> Self:
        """The part that runs some links: the model's own modules, in copies of the containers around them.  Of a chain
        without links it is the model itself.

        Args:
            taken: modules and parameters, by ``id``, that an earlier stage of this rank has; of these the part gets
                copies (parameters share the values), and its own are added.
            device: where the stage computes, and so what stands for parameters of other stages.
        """
        device = torch.device(device)
        own, outside = chain.on_stage(links), dict[str, nn.Module]()
        around = around_links((*chain.links, *chain.outside))
        origin: dict[int, nn.Parameter] = {}
        second: dict[int, nn.Parameter] = {}
        made: dict[int, nn.Module] = {}
        foreign: dict[int, nn.Module] = {}
        containers: list[tuple[nn.Module, nn.Module]] = []
        shares_rank = bool(taken)

        def of_this_stage(module: nn.Module) -> nn.Module:
            if id(module) not in made:
                made[id(module)] = module
                if any(id(x) in taken for x in (*module.modules(), *module.parameters())):
                    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
                    for p in module.parameters():
                        if id(p) in taken:
                            memo[id(p)] = second.setdefault(id(p), _again(p))
                            origin[id(memo[id(p)])] = p
                    made[id(module)] = copy.deepcopy(module, memo)
            return made[id(module)]

        def build(module: nn.Module, name: str) -> nn.Module:
            if name not in around:
                placed = name in chain.outside and any(True for _ in module.parameters())
                if name in own or not (placed or name in chain.links):  # else rotary tables, a loss
                    here = of_this_stage(module)
                else:
                    here = foreign.setdefault(id(module), ForeignLayer(module, device))
                if placed:
                    outside[name] = here
                return here
            container = _shallow(module, buffers=shares_rank)
            vars(container).pop("_output_capturing_hooks_installed", None)  # transformers: to be added where it is cut
            prefix = f"{name}." if name else ""
            for short, child in module._modules.items():
                if child is not None:
                    container._modules[short] = build(child, f"{prefix}{short}")
            for short, parameter in module._parameters.items():
                if parameter is not None and f"{prefix}{short}" not in own:
                    del container._parameters[short]
                    vars(container)[short] = placed_elsewhere(parameter, device)
                elif parameter is not None and id(parameter) in taken:
                    container._parameters[short] = again = second.setdefault(id(parameter), _again(parameter))
                    origin[id(again)] = parameter
            containers.append((module, container))
            return container

        part = build(model, "")
        known = {id(module): container for module, container in containers} | foreign | made
        for module, container in containers:
            new = {key: translated(value, known) for key, value in attributes_of(module).items()}
            vars(container).update({key: value for key, value in new.items() if key in vars(container)})
        for parameter in part.parameters():
            origin.setdefault(id(parameter), parameter)
        for module in model.modules():
            if id(module) in made:
                taken |= {id(x) for x in (*module.modules(), *module.parameters())}
        taken |= {id(origin[id(parameter)]) for parameter in part.parameters()}
        copies = _copies(model, part, chain, links, known)
        return cls(part, origin, chain, links, outside, copies)


def _again(parameter: nn.Parameter) -> nn.Parameter:
    """Another parameter with the same values, attributes and hooks."""
    new = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    new._backward_hooks = copy.copy(parameter._backward_hooks)
    new._post_accumulate_grad_hooks = copy.copy(parameter._post_accumulate_grad_hooks)
    return new


def _shallow(module: nn.Module, *, buffers: bool) -> nn.Module:
    """The module with the same children and attributes, hooks of its own and, if asked for, ``buffers`` of its own."""
    new = copy.copy(module)
    for key in vars(nn.Module()):
        value = vars(new).get(key)
        if isinstance(value, dict | set):
            vars(new)[key] = copy.copy(value)
    if buffers:
        new._buffers.update({key: None if b is None else b.clone() for key, b in module._buffers.items()})
    return new


def _copies(
    model: nn.Module, part: nn.Module, chain: Chain, links: range, known: Mapping[int, nn.Module]
) -> tuple[CopiedModule, ...]:
    """See ``StageModel.copies``."""
    users, around = dict(model.named_modules(remove_duplicate=False)), around_links((*chain.links, *chain.outside))
    found = [
        CopiedModule(f"{name}." if name else "", users[name], module, known, everywhere=name in around)
        for name, module in part.named_modules()
        if users.get(name, module) is not module and not isinstance(module, ForeignLayer)
    ]
    elsewhere = {id(model.get_submodule(link)) for i, link in enumerate(chain.links) if i not in links}
    for link in (chain.links[i] for i in links if id(model.get_submodule(chain.links[i])) in elsewhere):
        for name, module in part.get_submodule(link).named_modules(prefix=link):
            if any(b is not None for b in module._buffers.values()):
                found.append(SharedModule(f"{name}.", module, links.start))
    return tuple(found)


def cut_off(model: nn.Module, parts: Sequence[StageModel]) -> None:
    """Free the values that only other ranks need; the model refuses to run from here on, and to give its state."""
    here = {id(p) for part in parts for p in part.model.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in here and not parameter.is_meta:
            parameter.data = placeholder(parameter.dtype, parameter.device).expand(parameter.shape)
    modules = [m for part in parts for m in (*part.model.modules(), *(copied.user for copied in part.copies))]
    kept = {id(one) for module in modules for one in (module, *module._buffers.values())}
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not {id(module), id(buffer)} & kept:
                module._buffers[key] = BufferElsewhere.of(buffer, f"{name}.{key}".removeprefix("."))

    def refuse(*_: Any) -> None:
        raise ValueError(
            "this model is cut in stages, and each rank has only some of them: train it by engine.step, and take its "
            "values from engine.full_state_dict()"
        )

    model.register_forward_pre_hook(refuse)
    model.register_state_dict_pre_hook(refuse)


def stages_using(model: nn.Module, chain: Chain, split: Sequence[range]) -> Uses:
    modules = dict(model.named_modules(remove_duplicate=False))
    named = dict(model.named_parameters(remove_duplicate=False))

    def inside(name: str) -> set[int]:
        return {id(named[name])} if name in named else {id(p) for p in modules[name].parameters()}

    stages = [{key for name in chain.on_stage(links) for key in inside(name)} for links in split]
    return {id(p): tuple(s for s, ids in enumerate(stages) if id(p) in ids) for p in model.parameters()}


def parallel_of(parallel: Parallel, part: StageModel, sites: Sites, *, last: bool) -> Parallel:
    """A tensor plan, resolved on the whole model, as it reads on one stage's part; the ``last`` one has the loss."""
    here = [name for name, module in part.model.named_modules() if not isinstance(module, ForeignLayer)]
    own = {sites.key(name): name for name in here}
    names = dict(part.model.named_parameters(remove_duplicate=False))
    origin = {key: id(p) for key, p in part.origin.items()}
    return Parallel(
        {name: style for name in (*here, *names) if (style := parallel.styles.get(sites.key(name))) is not None},
        {key: parallel.cuts[old] for key, old in origin.items() if old in parallel.cuts},
        frozenset(key for key, old in origin.items() if old in parallel.summed),
        tuple(
            replace(s, name=own.get(s.name, s.name))
            for s in parallel.sites
            if s.name in own or (last and s.kind == "loss")
        ),
        parallel.lists,
    )
