"""Watching who reads a parameter, so that one at rest is never read and one in backward is there in time.

While the model runs, every torch function that takes a parameter of a split unit as an argument passes through here:

- a parameter *at rest* raises, with the names of the parameter, the function and the module around it;
- the node that the function leaves in the autograd graph will open the unit before it runs.  A unit's outputs open it
  as well (see ``stage``); this catches what leaves a module beside its return value, an auxiliary loss for example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_METADATA = frozenset(
    ["__get__", "__set__", "size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex", "__hash__", "__len__", "ndimension", "untyped_storage", "storage_offset", "is_contiguous", "register_hook", "requires_grad_", "__repr__", "__format__", "type", "get_device"]
)
"""Functions that do not read a parameter's values."""


class Watch(TorchFunctionMode):
    """The parameters of split units, by ``id``.

    ``resting`` names those whose values are not here now; ``opens`` has, for each, what gathers its unit for backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.resting: dict[int, str] = {}
        self.opens: dict[int, Callable[[], None]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.opens or getattr(func, "__name__", "") in _METADATA:
            return func(*args, **kwargs)
        read = {key for key in map(id, _flat((*args, *kwargs.values()))) if key in self.opens}
        for key in read & self.resting.keys():
            raise ValueError(
                f"parameter {self.resting[key]!r} is used by {getattr(func, '__name__', func)!r} while its unit is at "
                f"rest: its values are on other ranks. Use a parameter inside the forward of its own module, share it by "
                f"assigning it to the other module (head.weight = embed.weight), or name a larger unit (units=...)"
            )
        result = func(*args, **kwargs)
        if read and torch.is_grad_enabled():
            for tensor in _flat((result,)):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    for key in read:
                        tensor.grad_fn.register_prehook(self._opening(key))
        return result

    def _opening(self, key: int) -> Callable[..., None]:
        return lambda *gradients: self.opens[key]()


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    """The values, and those inside lists and tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
