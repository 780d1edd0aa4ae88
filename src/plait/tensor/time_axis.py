"""The context axis: ranks that share samples, each with a part of their time.

The axis is borrowed from ``shard``.  On the mesh ``shard=4 context=2`` the rows, their collectives and the optimizer
see four ranks, each with separate gradients.  Only the batch is cut in another way: neighbours read the same samples,
and each works on two blocks of their time, an early one and a late one, so that all do equal work in causal attention.

    context=2    block   0  1  2  3
                 rank    0  1  1  0

Only attention mixes steps of time.  Its keys and values are gathered, and their gradients reduced and scattered; or
they travel in a ring (``ring_attention.py``).  These are the only messages of the axis.  The rest of a decoder works
step by step and needs only the places of its steps.

Source: context parallelism of Llama 3 (Grattafiori et al. 2024, section 3.3.2), all-gather with 2n blocks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Comm
from plait.comm.agree import gather_ints
from plait.table.collectives import Note
from plait.table.tensor_plan import CONTEXT_BACKWARD, CONTEXT_FORWARD
from plait.tensor.no_double_backward import no_double_backward
from plait.tensor.ring_attention import RingAttention
from plait.torch_private import tree_map

AXES = ("context",)


@dataclass(frozen=True)
class StepsOfTime:
    """A rank's steps of time along ``dim`` of a whole activation, for dropout (see ``masks.Slice``)."""

    dim: int
    places: Tensor
    whole: int

    def indices(self, shape: Sequence[int]) -> Any:
        """Maps flat indices within a local tensor of ``shape`` to flat indices within the whole one."""
        inner, mine = math.prod(shape[self.dim + 1 :]), len(self.places)

        def whole_index(index: Tensor) -> Tensor:
            step, within = index.div(inner, rounding_mode="floor"), index % inner
            before, step = step.div(mine, rounding_mode="floor"), step % mine
            return (before * self.whole + self.places[step]) * inner + within

        return whole_index


def part_of_time(whole: Tensor, ways: int, index: int, dim: int) -> Tensor:
    """The early and the late block of a whole tensor for a place on the axis."""
    blocks = whole.chunk(2 * ways, dim)
    return torch.cat((blocks[index], blocks[-1 - index]), dim)


class TimeAxis:
    """A rank's place on the context axis.  Modules that mix or number steps of time find it as ``self.time_axis``."""

    def __init__(self, comm: Comm, *, ring: bool = False) -> None:
        self.comm, self.ways, self.ring = comm, comm.mesh.context, ring
        self.index = comm.mesh.index(comm.rank, AXES)
        self.lengths: set[int] = set()
        """The numbers of steps that batches had after they were cut."""
        self.masks: tuple[Tensor, Tensor] | None = None
        """The masks of the last causal attention that gathered (see ``_causal``)."""
        self.asked: set[str] = set()
        """The names of ``attention`` and ``places``, once a model has called them, and ``checked``."""

    # ---- where the steps are ------------------------------------------------------------------------------------

    def places(self, mine: int) -> Tensor:
        """The places of this rank's ``mine`` steps in the whole sequence: int64 [mine]."""
        self._check_cut(mine)
        self.asked.add("places")
        return self._places(mine)

    def _places(self, mine: int) -> Tensor:
        half = mine // 2
        early, late = self.index * half, (2 * self.ways - 1 - self.index) * half
        steps = torch.arange(half, device=self.comm.device)
        return torch.cat((steps + early, steps + late))

    def cut(self, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's steps of a whole tensor.  Raises ValueError if 2 * context does not divide the length."""
        if whole.dim() <= dim or whole.size(dim) % (2 * self.ways):
            raise ValueError(
                f"a tensor of {list(whole.shape)} cannot be cut in time (dim {dim}) over context={self.ways}: the "
                f"length must be a multiple of {2 * self.ways}; pad the rows with targets that do not count"
            )
        self.lengths.add(whole.size(dim) // self.ways)
        return part_of_time(whole, self.ways, self.index, dim)

    def _check_cut(self, mine: int) -> None:
        if mine not in self.lengths:
            have = " or ".join(map(str, sorted(self.lengths))) or "no"
            raise ValueError(
                f"context={self.ways}: batches were cut to {have} steps of time, and {mine} came: in your own loop cut "
                f"each batch, batch = engine.placed.time_axis.cut_batch(batch)"
            )

    def cut_batch(self, batch: Any) -> Any:
        """Cuts every tensor of two or more dims, [samples, time, ...], in time; builds its containers anew.

        Raises:
            ValueError: no such tensor, or tensors of different lengths, one of which may not be time.
        """
        shapes: list[list[int]] = []
        _with_tensors(batch, lambda one: shapes.append(list(one.shape)) if one.dim() > 1 else None)
        if len({shape[1] for shape in shapes}) != 1:
            raise ValueError(
                f"context={self.ways} cuts [samples, time, ...] in dim 1, and the batch has "
                f"{' and '.join(map(str, shapes)) or 'no tensor of two dims'}: give tensors of one length, or, in your "
                f"own loop, cut those that have time by engine.placed.time_axis.cut(tensor)"
            )
        return _with_tensors(batch, lambda one: self.cut(one) if one.dim() > 1 else one)

    def check_asked(self) -> None:
        """Checks all stages of a model, at its first update: raises ValueError if it attended past the axis; warns if
        it counts no positions."""
        if "checked" in self.asked:
            return
        asked = [name in self.asked for name in ("attention", "places")]
        attention, places = map(any, zip(*gather_ints(self.comm, asked, ("pipe",), Note("setup")), strict=True))
        if not attention:
            raise ValueError(
                f"context={self.ways}: the model has run and never called time_axis.attention, so each rank "
                f"attended within its own part; see docs/guide/context.md"
            )
        if not places:
            warnings.warn(
                f"context={self.ways}: no module has called time_axis.places(length). Positions, if the model has any, "
                f"count from 0 on every rank, and the run is not that of one process",
                stacklevel=2,
            )
        self.asked.add("checked")

    # ---- messages -----------------------------------------------------------------------------------------------

    def gather(self, mine: Tensor, dim: int) -> Tensor:
        """Gathers all ranks' steps in the order of time; backward sums the ranks' gradients of this rank's steps."""
        whole: Tensor = _Gather.apply(mine, self, dim)
        return whole

    def ordered(self, by_rank: Tensor, dim: int) -> Tensor:
        """Reorders blocks, two for each rank, from the order of ranks to the order of time."""
        blocks = by_rank.chunk(2 * self.ways, dim)
        return torch.cat((*blocks[::2], *reversed(blocks[1::2])), dim)

    def by_rank(self, ordered: Tensor, dim: int) -> Tensor:
        """Reorders blocks from the order of time to the order of ranks."""
        blocks = ordered.chunk(2 * self.ways, dim)
        pairs = zip(blocks[: self.ways], reversed(blocks[self.ways :]), strict=True)
        return torch.cat([block for pair in pairs for block in pair], dim)

    def attention(
        self,
        query_BHTK: Tensor,
        key_BGTK: Tensor,
        value_BGTK: Tensor,
        mask: Tensor | None = None,
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of this rank's queries to all keys: causal, or under a mask of shape [..., mine, whole]."""
        length = query_BHTK.size(-2)
        if key_BGTK.size(-2) != length or value_BGTK.size(-2) != length:
            raise ValueError(
                f"attention of {length} queries to {key_BGTK.size(-2)} keys under context={self.ways}: each rank "
                f"brings the keys of its steps, without a cache"
            )
        self._check_cut(length)
        self.asked.add("attention")
        if self.ring:
            if mask is not None or dropout_p or key_BGTK.shape != value_BGTK.shape:
                raise ValueError(
                    "a ring attends causally, with keys and values of one width, without masks or dropout: leave "
                    "ring_attention out"
                )
            scale = query_BHTK.size(-1) ** -0.5 if scale is None else scale
            out: Tensor = RingAttention.apply(query_BHTK, key_BGTK, value_BGTK, self, scale)
            return out
        keys, values = (self.gather(x, 2) for x in (key_BGTK, value_BGTK))
        if mask is None and not dropout_p:
            return self._by_block(query_BHTK, keys, values, scale, enable_gqa)
        if mask is None:
            mask = self._places(length)[:, None] >= torch.arange(keys.size(2), device=keys.device)
        elif mask.size(-1) != keys.size(2) or mask.size(-2) not in (1, length):
            raise ValueError(
                f"an attention mask of {list(mask.shape)} under context={self.ways}: this rank has {length} queries, "
                f"and {keys.size(2)} keys are gathered: give [..., {length}, {keys.size(2)}], or no mask if causal"
            )
        return F.scaled_dot_product_attention(
            query_BHTK, keys, values, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )

    def _by_block(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
        """Causal attention of the early and the late block, each to the keys up to its end: half of the products."""
        mixed = []
        for block, mask in zip(query.chunk(2, 2), self._causal(query.size(2) // 2, query.dtype), strict=True):
            k, v = (x[:, :, : mask.size(1)] for x in (keys, values))
            mixed.append(F.scaled_dot_product_attention(block, k, v, mask, scale=scale, enable_gqa=enable_gqa))
        return torch.cat(mixed, 2)

    def _causal(self, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The masks of the early and the late block, one pair for all layers: [half, keys up to the block's end]."""
        if self.masks is None or (self.masks[0].size(0), self.masks[0].dtype) != (half, dtype):
            early, late = self.index, 2 * self.ways - 1 - self.index
            with torch.inference_mode(False):  # a later backward keeps them
                never = torch.full((half, (late + 1) * half), float("-inf"), dtype=dtype, device=self.comm.device)
                self.masks = never[:, : (early + 1) * half].triu(early * half + 1), never.triu(late * half + 1)
        return self.masks

    # ---- dropout ------------------------------------------------------------------------------------------------

    def steps_of(self, shape: Sequence[int], lengths: Sequence[int], samples: int) -> StepsOfTime | None:
        """The steps of an activation in the whole one; None if no dim, or more than one, may be time.

        Args:
            lengths: the numbers of steps that a sample may have here.
        """
        dims = []
        if len(shape) > 1 and shape[0] == samples and shape[1] in lengths:
            dims += [1] + [dim for dim, size in enumerate(shape[2:-1], 2) if size in lengths]
        if shape and samples and shape[0] in [samples * length for length in lengths]:
            dims += [0] + [dim for dim, size in enumerate(shape[1:-1], 1) if size in lengths]
        if len(dims) != 1:
            return None
        return self.steps_along(dims[0], shape[dims[0]] if dims[0] else shape[0] // samples)

    def steps_along(self, dim: int, mine: int) -> StepsOfTime:
        """The steps of an activation that has ``mine`` of them along a dim."""
        return StepsOfTime(dim, self._places(mine), mine * self.ways)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, axis: TimeAxis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        piece = mine.movedim(dim, 0).contiguous()
        whole = piece.new_empty((len(piece) * axis.ways, *piece.shape[1:]))
        axis.comm.all_gather(whole, piece, AXES, Note(CONTEXT_FORWARD)).wait()
        return axis.ordered(whole, 0).movedim(0, dim)

    @staticmethod
    @no_double_backward("a context axis", "train such a model without it")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axis: TimeAxis = ctx.axis
        shares = axis.by_rank(gradient.movedim(ctx.dim, 0), 0).contiguous()
        out = shares.new_empty((len(shares) // axis.ways, *shares.shape[1:]))
        axis.comm.reduce_scatter(out, shares, AXES, note=Note(CONTEXT_BACKWARD)).wait()
        return out.movedim(0, ctx.dim), None, None


def _with_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a batch with changed tensors; it may use the containers that ``forward/batch.py`` knows."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, Mapping):
            return type(leaf)({key: _with_tensors(value, change) for key, value in leaf.items()})  # type: ignore[call-arg]
        if isinstance(leaf, SimpleNamespace):
            return SimpleNamespace(**{key: _with_tensors(value, change) for key, value in vars(leaf).items()})
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **{one.name: _with_tensors(getattr(leaf, one.name), change) for one in fields(leaf)})
        return leaf

    return tree_map(changed, batch)


def give_time_axis(models: Sequence[nn.Module], axis: TimeAxis) -> None:
    """Gives the axis to the modules of a model, and of its stages, that ask for it.  Raises ValueError if none does."""
    asking = [module for model in models for module in model.modules() if hasattr(module, "time_axis")]
    if not asking:
        if type(models[0]).__module__.startswith("transformers."):
            raise ValueError(
                f"context={axis.ways} and a model of transformers: build it by "
                f"plait.anymodel.context.use_context_axis(model)"
            )
        raise ValueError(
            f"context={axis.ways} cuts the batch in time, and no module of {type(models[0]).__name__} has a "
            f"'time_axis': where it attends, let it call self.time_axis.attention(query, key, value), and number its "
            f"steps by self.time_axis.places(length) (see docs/guide/context.md)"
        )
    for module in asking:
        if not isinstance(module.time_axis, TimeAxis | None):
            raise ValueError(f"{type(module).__name__}.time_axis is the engine's under context: declare it as None")
        vars(module)["time_axis"] = axis


@contextmanager
def whole_time(model: nn.Module) -> Iterator[None]:
    """Takes the axis from a model inside, so that each rank works on whole samples, as in generation.

    Where the row splits parameters, use it inside ``engine.gathered()``.
    """
    asking = [module for module in model.modules() if getattr(module, "time_axis", None) is not None]
    axes = [vars(module)["time_axis"] for module in asking]
    for module in asking:
        vars(module)["time_axis"] = None
    try:
        yield
    finally:
        for module, axis in zip(asking, axes, strict=True):
            vars(module)["time_axis"] = axis
