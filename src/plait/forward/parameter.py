"""Parameters whose values or gradient are elsewhere: reading one raises an error that names it.

    type(p)            while                                   and then
    nn.Parameter       its values are here                     it is torch's own, at torch's own speed
    AtRest             its unit is at rest                     a function that reads or writes values raises

Every torch function asks the class of each tensor that it takes, in or out of a forward; functions on other tensors do
not.  Shapes, dtypes and other metadata are answered as usual.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from plait.forward.interceptor import Function
from plait.tensor.metadata import name_of, only_metadata
from plait.torch_private import DisableTorchFunctionSubclass, tree_leaves


class Elsewhere:
    """A tensor whose values are not here: metadata can be read, anything else raises the ``refusal``."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not only_metadata(func, args, kwargs):
            raise cls.refusal(func, tree_leaves((args, kwargs)))
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def refusal(cls, func: Function, values: Sequence[Any]) -> ValueError:
        """Returns the error for a function that got these values."""
        raise NotImplementedError


class AtRest(Elsewhere, nn.Parameter):
    """A parameter whose unit is at rest; ``resting_name`` is its name."""

    resting_name: str

    @classmethod
    def refusal(cls, func: Function, values: Sequence[Any]) -> ValueError:
        name = next(value.resting_name for value in values if isinstance(value, AtRest))
        return ValueError(
            f"parameter {name!r} is used by {name_of(func)!r} while its unit is at rest: its values "
            f"are on other ranks. Outside of a forward read it inside `with engine.gathered(...)`, write it inside "
            f"`with engine.gathered(..., modify=True)`, and take or load a whole state by engine.full_state_dict() or "
            f"engine.load_full_state_dict(state). In a forward use it inside its own module, share it by assigning it "
            f"to the other module (head.weight = embed.weight), or name a larger unit (units=...)"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parameter {self.resting_name!r} of shape {tuple(self.shape)}, at rest: its values are on other ranks"


def as_class(state: type[nn.Parameter], kind: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter of class ``kind`` while it is at rest."""
    return state if kind is nn.Parameter else type(state.__name__, (state, kind), {})
