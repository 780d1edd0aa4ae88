"""The part of a model that one stage has, with stand-ins that answer for the modules of other stages.

embed ─► blocks.0 ─► blocks.1 ─► norm ─► head            blocks: modules, each from one tensor to one tensor
stage 1 is   ·  ─►   ·    ─► blocks.1 ─► norm ─► ·       the same model, foreign layers for the others' blocks
"""

from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from plait.forward.random_ops import OwnLayer
from plait.pipeline.cutting import Cutting, attributes_of, cut_out
from plait.pipeline.not_here import not_here
from plait.pipeline.program import Blocks

CHILDREN = "the modules inside"


class PlacedElsewhereError(AttributeError, ValueError):
    """Raised for a request to a module of another stage; ``hasattr`` and ``getattr`` with a default still work."""


class ForeignLayer(OwnLayer):
    """Replaces a module of another stage; the ``StageBoundary`` decides what it returns.

    It has the module's plain attributes (its kind of attention, its number), ``NotHere`` for its parameters, and the
    same for the modules inside: the model may read them until the links have run.  After that, anything read from it
    would be a result of the forward (an auxiliary loss), which is on another stage, as are the results that a walk over
    all modules looks for.
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
        told = ((k, value) for k, value in attributes_of(link).items() if not (k.startswith("_") or callable(value)))
        self._plain, self.training = own | dict(told), link.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.at_call(self, args, kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Reports a walk over all modules, or parameters, of the model."""
        self.at_look(self, "what is inside")
        yield from super().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Reports a walk over children, such as ``apply``."""
        self.at_look(self, CHILDREN)
        yield from super().named_children()

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in ("training", "at_call", "at_look"):
            super().__setattr__(name, value)
        else:  # the program clears results of the forward
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
    """The class of a link, on any stage."""
    return link._kind if isinstance(link, ForeignLayer) else type(link)


def _refuse_call(kind: str, *call: Any) -> Any:
    raise ValueError(
        f"a {kind} is called, which is inside of a link of the pipeline that another stage has: the model goes through "
        f"the link's own modules, so give it a method pipeline_links() that names those, or train without a pipe axis"
    )


def placed_elsewhere(parameter: Tensor, device: torch.device) -> Tensor:
    """Returns a stand-in for a parameter of another stage; it takes no memory."""
    return not_here((), parameter.dtype, device).expand(parameter.shape)


def empty(model: nn.Module, filled: Container[int]) -> None:
    """Turns parameters of other stages that were filled for a forward (by ``id``) into placeholders again."""
    for module in model.modules():
        held = module._plain if isinstance(module, ForeignLayer) else vars(module)
        for key, value in held.items():
            if id(value) in filled:
                held[key] = placed_elsewhere(value, value.device)


def translated(value: Any, known: Mapping[int, nn.Module]) -> Any:
    """Returns a value with the model's modules replaced by the part's; the value itself if it has none."""
    if isinstance(value, nn.Module):
        return known.get(id(value), value)
    if isinstance(value, MethodType):
        bound = known.get(id(value.__self__), value.__self__)
        return value if bound is value.__self__ else MethodType(value.__func__, bound)
    if type(value) in (list, tuple):
        items = [translated(one, known) for one in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        new = {key: translated(one, known) for key, one in value.items()}
        return new if any(new[key] is not one for key, one in value.items()) else value
    return value


def part_of(model: nn.Module, blocks: Blocks, here: range, taken: set[int], device: torch.device) -> Cutting:
    """Takes a part out of a model (see ``cut_out``); attributes that hold modules then hold those of the part."""
    cutting = cut_out(
        model, blocks, here, taken, lambda m: ForeignLayer(m, device), lambda p: placed_elsewhere(p, device)
    )
    known = {id(m): c for m, c in cutting.containers} | dict(cutting.foreign) | {id(m): c for m, c in cutting.made}
    for module, container in cutting.containers:
        new = {key: translated(value, known) for key, value in attributes_of(module).items()}
        vars(container).update({key: value for key, value in new.items() if key in vars(container)})
    return cutting
