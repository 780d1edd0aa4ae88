"""Counts the bytes of the tensors that one rank has made and still keeps, including those that autograd keeps.

Each operator's new storages are noted by weak references.  A freed storage, or one resized to nothing, no longer
counts.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from plait.torch_private import TorchDispatchMode, tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts the tensors of this thread's operators while entered.  On a CPU autograd works on the same thread."""

    def __init__(self, at_least: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._at_least = at_least  # bytes of the smallest storage that counts
        self.peak = 0
        """The largest number of bytes that was held at once."""
        self.counts = True
        """False while values are shown, which is not the rank's work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.counts:
            return func(*args, **(kwargs or {}))
        before = _storages((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        new = [
            storage
            for address, storage in _storages(out).items()
            if address not in before and storage.nbytes() >= self._at_least
        ]
        if new:
            self._made += map(weakref.ref, new)
            self.peak = max(self.peak, self.bytes())
        return out

    def bytes(self) -> int:
        """The number of bytes held now."""
        alive = {storage._cdata: (ref, storage) for ref in self._made if (storage := ref()) is not None}
        self._made = [ref for ref, _ in alive.values()]
        return sum(storage.nbytes() for _, storage in alive.values())


def _storages(tree: object) -> dict[int, torch.UntypedStorage]:
    tensors = [one for one in tree_leaves(tree) if isinstance(one, Tensor) and one.layout == torch.strided]
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
