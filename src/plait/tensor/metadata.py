"""Tells torch functions that read a tensor's values from those that read only its metadata."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

METADATA = {
    *("__get__", "__set__", "__hash__", "__len__", "__repr__", "size", "dim", "ndimension", "numel", "nelement"),
    *("stride", "element_size", "is_floating_point", "is_complex", "is_contiguous", "get_device", "untyped_storage"),
    *("storage_offset", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "is_shared"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full"),
}
"""Functions that do not read a parameter's values."""

VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Properties that return a parameter's values, or replace them."""


def only_metadata(func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """True for a torch function that neither reads the values of its arguments nor writes to them."""
    name = getattr(func, "__name__", "")
    if name == "type":
        return len(args) == 1 and not kwargs  # with a dtype it converts
    return name in METADATA and not (name in ("__get__", "__set__") and func.__self__.__name__ in VIEWS)  # type: ignore[attr-defined]


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function in a message; the property's name for a property."""
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name
