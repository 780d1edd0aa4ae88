"""The checks of an operation, before anything moves: its group, its tensors, its reduction and its root."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.comm.operation import Group, name_of
from plait.comm.ordered_reduce import OPS
from plait.table.mesh import AXES, Mesh


def group_of(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> Group:
    if len(set(axes)) != len(axes):
        raise ValueError(f"an axis is given twice in {axes}: name each axis once")
    return Group(axes, mesh.group(rank, axes), mesh.index(rank, axes), tuple(mesh.axis(a) for a in axes))


def pair_of(mesh: Mesh, rank: int, kind: str, peer: int) -> Group:
    """Returns the group of this rank and another, the sender first, with the axes along which they differ."""
    if peer not in range(mesh.size) or peer == rank:
        raise ValueError(
            f"{kind} between rank {rank} and rank {peer} on the mesh {mesh}: "
            f"the other rank is one of 0 to {mesh.size - 1}, and not {rank} itself"
        )
    here, there = mesh.coordinates(rank), mesh.coordinates(peer)
    ranks = (rank, peer) if kind == "send" else (peer, rank)
    apart = tuple(a for a in AXES if here[a] != there[a])
    if mesh.context > 1 and peer in mesh.group(rank, ("context",)):
        apart = ("context",)
    return Group(apart, ranks, ranks.index(rank), (2,))


def flat(tensor: Tensor, name: str, kind: str, device: torch.device) -> Tensor:
    """Returns the tensor as 1-D, outside autograd; refuses it unless it is contiguous and on the CPU or this device."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{kind}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous: call .contiguous() first, and copy back where it is written"
        )
    if tensor.device.type not in (device.type, "cpu"):
        raise ValueError(f"{kind}: {name} is on {tensor.device}, this world moves {device} tensors")
    if tensor.dim() == 1 and not tensor.requires_grad and type(tensor) is Tensor:
        return tensor
    return tensor.detach().view(-1)


def label(tensor: Tensor) -> str:
    """``float32 (3, 4)``: what the two sides of a message must agree on."""
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)}"


def same_kind(kind: str, a: Tensor, b: Tensor) -> None:
    """Refuses tensors of two dtypes, or on two devices."""
    if a.device.type != b.device.type:
        raise ValueError(f"{kind} between {a.device} and {b.device}: bring both to one device first")
    if a.dtype != b.dtype:
        raise ValueError(f"{kind} between {name_of(a.dtype)} and {name_of(b.dtype)}: convert one to the other first")


def check_pieces(kind: str, group: Group, whole: Tensor, whole_name: str, piece: Tensor, piece_name: str) -> None:
    """Refuses a whole that is not ``n`` pieces, and a piece that overlaps it outside this rank's slice."""
    same_kind(kind, whole, piece)
    n, m = len(group.ranks), piece.numel()
    if whole.numel() != n * m:
        raise ValueError(
            f"{kind} over {names(group)}: {whole_name} has {whole.numel()} elements, but {n} x "
            f"{piece_name} of {m} makes {n * m}; pad to equal pieces"
        )
    if overlap(whole, piece):
        offset = (piece.data_ptr() - whole.data_ptr()) // piece.element_size()
        if offset != group.index * m:
            raise ValueError(
                f"{kind} over {names(group)}: {piece_name} begins at element {offset} of {whole_name}; rank "
                f"{group.rank} is member {group.index}, whose slice starts at {group.index * m}"
            )


def overlap(whole: Tensor, piece: Tensor) -> bool:
    if not piece.numel():
        return False
    start = piece.data_ptr() - whole.data_ptr()
    return -piece.numel() * piece.element_size() < start < whole.numel() * whole.element_size()


def check_meaning(kind: str, group: Group, op: str | None, root: int | None) -> None:
    """Refuses unknown reductions, the mean, and a root outside of the group."""
    if op is not None and op.lower() in ("avg", "mean", "average"):
        raise ValueError(f"{kind} with op {op!r}: SUM only, divide yourself (once, by the global count)")
    if op is not None and op not in OPS:
        raise ValueError(f"{kind} with unknown op {op!r}: use one of {', '.join(OPS)}")
    if root is not None and not 0 <= root < len(group.ranks):
        raise ValueError(
            f"{kind} over {names(group)} with root {root}: the root is an index within the group, "
            f"0 to {len(group.ranks) - 1} here, for the ranks {group.ranks}"
        )


def names(group: Group) -> str:
    return f"{', '.join(group.axes)} ({len(group.ranks)} ranks)"
