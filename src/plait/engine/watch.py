"""Watching who reads a parameter, so that one at rest is never read and one in backward is there in time.

While the model runs, every torch function that takes a parameter of a split unit as an argument passes through here:

- a parameter *at rest* raises, with the names of the parameter, the function and the module around it;
- the node that the function leaves in the autograd graph will open the unit before it runs.  A unit's outputs open it
  as well (see ``stage``); this catches what leaves a module beside its return value, an auxiliary loss for example.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.engine.rng import in_backward

METADATA = {
    *("__get__", "__set__", "__hash__", "__len__", "__repr__", "__format__", "size", "dim", "ndimension", "numel"),
    *("nelement", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous", "type", "get_device"),
    *("untyped_storage", "storage_offset", "register_hook", "requires_grad_"),
}
"""Functions that do not read a parameter's values."""

VIEWS = {"T", "mT", "H", "mH", "data"}
"""Properties that hand out a parameter's values."""


def reads(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], known: Container[int]) -> list[int]:
    """The values that a torch function reads of those that are known by ``id``, also inside lists and tuples."""
    found = _among(args, known) + _among(kwargs.values(), known) if kwargs else _among(args, known)
    return [] if found and only_metadata(func) else found


def _among(values: Iterable[Any], known: Container[int]) -> list[int]:
    found: list[int] = []
    for value in values:
        if id(value) in known:
            found.append(id(value))
        elif isinstance(value, list | tuple):
            found += _among(value, known)
    return found


def only_metadata(func: Callable[..., Any]) -> bool:
    """Whether a torch function does not read the values of its arguments."""
    name = getattr(func, "__name__", "")
    return name in METADATA and not (name == "__get__" and func.__self__.__name__ in VIEWS)  # type: ignore[attr-defined]


class Watch(TorchFunctionMode):
    """The parameters of split units, by ``id``.

    ``resting`` names those whose values are not here now.  ``running`` are the units whose forward is under way,
    innermost last, each as what opens it for backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split: set[int] = set()
        self.staged: set[int] = set()
        """The parameters of a stage, which ``loss_fn`` may not read beside the model: other stages have others."""
        self.resting: dict[int, str] = {}
        self.running: list[Callable[[], None]] = []
        self.inside = False
        """The stage's model is being called."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.staged and not self.inside and not in_backward():
            self._check_outside(func, args, kwargs)
        read = reads(func, args, kwargs, self.split) if self.split else ()
        for name in (self.resting[key] for key in read if key in self.resting):
            raise ValueError(
                f"parameter {name!r} is used by {getattr(func, '__name__', func)!r} while its unit is at rest: its "
                f"values are on other ranks. Use a parameter inside the forward of its own module, share it by "
                f"assigning it to the other module (head.weight = embed.weight), or name a larger unit (units=...)"
            )
        result = func(*args, **kwargs)
        if read and self.running and torch.is_grad_enabled():
            opener = self.running[-1]
            for tensor in flat_values((result,)):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda *gradients: opener())
        return result

    def _check_outside(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if reads(func, args, kwargs, self.staged):
            raise ValueError(
                f"loss_fn reads a parameter by {getattr(func, '__name__', func)!r} outside of the model's call: under "
                f"a pipeline each stage has only its own; let the model compute the term, or the optimizer (weight "
                f"decay)"
            )


def flat_values(values: Sequence[Any]) -> Iterator[Any]:
    """The values, and those inside lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat_values(value)
        else:
            yield value
