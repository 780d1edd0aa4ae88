"""The attributes of a ShardedTensor: sharding, comm, its local piece, and the shape of the whole."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from plait.comm import Comm
from plait.sharded.layout import Layout
from plait.sharded.spec import Spec
from plait.table.mesh import Mesh
from plait.torch_private import DisableTorchFunctionSubclass

_local = DisableTorchFunctionSubclass


class SpecTensor(Tensor):
    """A local piece that knows its spec, and answers for the whole."""

    _spec: Spec

    @property
    def sharding(self) -> Layout:
        """The axes that cut each dim, and those over which a sum is pending."""
        return self._spec.layout

    @property
    def comm(self) -> Comm:
        """This rank's access to the others."""
        return self._spec.comm

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self._spec.comm.mesh

    @property
    def local(self) -> Tensor:
        """This rank's piece, a plain tensor; gradients flow through, in the dual layout."""
        with _local():
            return self.as_subclass(Tensor)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole tensor."""
        return self._spec.shape

    def size(self, dim: int | None = None) -> Any:
        """The shape of the whole tensor."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def dim(self) -> int:
        return len(self._spec.shape)

    ndim = property(dim)

    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return self._spec.shape.numel()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the whole tensor."""
        return self._spec.shape.numel() * self._spec.dtype.itemsize

    nelement = numel
    ndimension = dim

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        spec = self._spec
        words = " ".join(f"{axis}={how}" for axis, how in spec.layout.placements(spec.comm.mesh).items())
        with _local():
            grad = ", requires_grad=True" if self.requires_grad else ""
            about = f"dtype={self.dtype}{grad}, local={self.detach().as_subclass(Tensor)!r}"
        return f"ShardedTensor(shape={list(spec.shape)}, {words or 'one rank'}, {about})"

    def __format__(self, spec: str) -> str:
        """Formats a tensor of one number as a number, if every rank has it."""
        return format(self.item(), spec) if not self.shape and spec else repr(self)
