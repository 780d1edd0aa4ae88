"""Reads the ``.metadata`` of torch.distributed.checkpoint: a pickle, which may name only objects that torch writes.

    c torch\\n Size\\n  (3, 4) TUPLE1 REDUCE   torch.Size((3, 4))
    c os\\n system\\n  "..." TUPLE1 REDUCE     ValueError: it names 'os.system'

Each name means a dataclass of torch, a constant, or a function below that takes exactly torch's arguments.  The machine
is the one in Python, since the one in C allocates memory for lengths that a file only claims.
"""

import io
import pickle
from pathlib import PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as form
from torch.distributed.checkpoint.filesystem import _StorageInfo

from plait.checkpoint.manifest import DTYPES

CLASSES = (
    *(form.Metadata, form.MetadataIndex, form.StorageMeta, form.TensorProperties, form.TensorStorageMetadata),
    *(form.BytesStorageMetadata, form.ChunkStorageMetadata, _StorageInfo),
)


def _layout(name: str) -> torch.layout:
    if type(name) is not str or name != "torch.strided":
        raise ValueError("a layout in it is not strided")
    return torch.strided


def _encoding(value: object) -> Any:
    """A memory format, by its number or, as Python 3.11.0 to 3.11.3 write it, by ``getattr(class, name)``."""
    known = {key: one for one in form._MEM_FORMAT_ENCODING for key in (one.value, one.name)}
    if type(value) not in (int, str) or value not in known:
        raise ValueError("a memory format in it is not one")
    return known[value]


def _member(what: object, name: str) -> Any:
    if what is not _encoding:
        raise ValueError("a pickle calls getattr for something other than a member of what is read here")
    return _encoding(name)


def _empty() -> dict[Any, Any]:
    return {}


NAMES: dict[str, Any] = {
    **{f"{one.__module__}.{one.__qualname__}": one for one in CLASSES},
    **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
    **{f"{home}Path": PurePosixPath for home in ("pathlib.Posix", "pathlib.Windows", "pathlib._local.Posix")},
    "pathlib._local.WindowsPath": PurePosixPath,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": _layout,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _encoding,
    "collections.OrderedDict": _empty,
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
}


_STEPS: Any = pickle._Unpickler.dispatch
_BUILD, _SET_ITEM, _SET_ITEMS = (code[0] for code in (pickle.BUILD, pickle.SETITEM, pickle.SETITEMS))


def _build(machine: Any) -> None:
    """Gives fields to a new object, and to nothing else."""
    if type(machine.stack[-2]) not in CLASSES or not isinstance(machine.stack[-1], dict | tuple):
        raise ValueError("a pickle gives fields to an object that has none")
    _STEPS[_BUILD](machine)


def _set(machine: Any, keys: list[Any], code: int) -> None:
    """Refuses nested keys: hashing a tower of tuples would end the process."""
    for key in keys:
        parts = (key.fqn, key.offset, key.index) if type(key) is form.MetadataIndex else (key,)
        if not all(one is None or type(one) in (str, int, torch.Size) for one in parts):
            raise ValueError(f"a pickle has a {type(key).__name__} as a key")
    _STEPS[code](machine)


class _Machine(pickle._Unpickler):
    """A stack machine that knows only ``NAMES``."""

    dispatch: ClassVar[dict[int, Any]] = {
        **_STEPS,
        _BUILD: _build,
        _SET_ITEM: lambda machine: _set(machine, machine.stack[-2:-1], _SET_ITEM),
        _SET_ITEMS: lambda machine: _set(machine, machine.stack[::2], _SET_ITEMS),
    }

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in NAMES:
            raise ValueError(f"it names {full[:80]!r}, which plait does not read; none of it was run")
        return NAMES[full]


def unpickled(data: bytes) -> Any:
    """The object in a pickle; ValueError if it names, or does, anything that torch's metadata does not."""
    try:
        return _Machine(io.BytesIO(data)).load()
    except Exception as error:  # a damaged one leads to errors of many types
        raise ValueError(f"a pickle cannot be read: {error!r:.300}") from error
