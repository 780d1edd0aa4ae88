"""Values as a page shows them: a text, and for a tensor a corner of its numbers.

show(torch.ones(2, 3))    {"text": "float32 (2, 3)", "rows": [[1.0, ...], ...], "bytes": 24, "sum": "6"}
"""

import itertools
import math
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from plait.comm import Comm

ROWS, COLUMNS = 4, 8
"""The corner of a tensor whose values are shown."""
LONGEST, MOST_PARTS = 120, 8
Shown = dict[str, Any]
"""A value as JSON: ``text``, and for a tensor ``rows`` of numbers, its ``bytes``, ``sum`` and ``layout``."""


def show(value: object, *, inside: bool = False, file: str = "") -> Shown | None:
    """A value as JSON; None for values that explain nothing (functions, modules of Python, classes).

    A value ``inside`` another is shown without parts; objects of classes of ``file`` with their attributes.
    """
    if isinstance(value, ModuleType | FunctionType | type):
        return None
    if isinstance(value, Tensor):
        return _tensor(value)
    if value is None or isinstance(value, bool | int | float | str):
        return {"text": repr(value)[:LONGEST]}
    if isinstance(value, Comm):
        return {"text": f"rank {value.rank} of {value.world_size}"}
    kind = type(value).__name__
    if isinstance(value, nn.Module):
        return {"text": f"{kind}, {len(vars(value)['_modules'])} modules in it"}  # reading its parameters may gather
    if inside:
        return {"text": kind}
    if isinstance(value, dict):
        return {"text": f"{kind} of {len(value)}: {_parts(((repr(k), one) for k, one in value.items()))}"}
    if isinstance(value, list | tuple):
        return {"text": f"{kind} of {len(value)}: {_parts(('', one) for one in value)}"}
    if file and getattr(type(value), "__module__", "") != "builtins" and _file_of(type(value)) == file:
        own = ((name, one) for name, one in getattr(value, "__dict__", {}).items() if not name.startswith("_"))
        return {"text": f"{kind}: {_parts(own)}"}
    return {"text": kind}


def _parts(named: Iterable[tuple[str, object]]) -> str:
    """The first parts of a value in words."""
    shown = ((name, show(one, inside=True)) for name, one in itertools.islice(named, MOST_PARTS))
    words = [f"{name}: {one['text']}" if name else str(one["text"]) for name, one in shown if one]
    return "; ".join(words)[: 3 * LONGEST]


def _file_of(cls: type) -> str:
    """The file whose code defines a class, or "" if there is none."""
    return next((f.__code__.co_filename for f in vars(cls).values() if isinstance(f, FunctionType)), "")


def _tensor(value: Tensor) -> Shown:
    """Shape, dtype and layout, and a corner of the values if it has any: a freed buffer has none."""
    text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    try:
        spec = getattr(value, "spec", None)
        plain = value.detach() if spec is None else value.local.detach()  # type: ignore[attr-defined]
        storage = plain.untyped_storage()
        layout = _layout(plain) if spec is None else f"{spec!r}, piece {tuple(plain.shape)}"
        if value.is_meta or storage.nbytes() < (plain.storage_offset() + plain.numel()) * plain.element_size():
            return {"text": f"{text}, no values here"}
        corner = plain.reshape(-1, plain.shape[-1] if plain.dim() > 1 else max(1, plain.numel()))[:ROWS, :COLUMNS]
        digits = 6 if plain.numel() == 1 else 4
        rows = [[_number(number, digits) for number in row] for row in corner.double().tolist()]
        shown: Shown = {"text": text, "rows": rows, "bytes": storage.nbytes()}
        return shown | {"sum": f"{plain.double().sum().item():.6g}"} | ({"layout": layout} if layout else {})
    except (AttributeError, RuntimeError, ValueError, TypeError, NotImplementedError):  # one that is not gathered
        return {"text": f"{text}, no values here"}


def _layout(plain: Tensor) -> str:
    """The layout of a tensor in words; empty if it fills its memory in order."""
    if not plain.is_contiguous():
        return f"strides {plain.stride()}"
    whole = plain.untyped_storage().nbytes() // max(1, plain.element_size())
    return f"view of {whole} elements, from {plain.storage_offset()}" if whole > plain.numel() > 0 else ""


def _number(value: float, digits: int) -> float | str:
    """Rounds a number; JSON has no infinities, so these are words."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
