"""A model whose layers a plan has cut, under spmd_types: its own modules on one rank's pieces, in a world of two.

    plait                       spmd_types
    whole                       I, or R between the gather of a stream and the products that read it
    time, cut, classes          V, and the shape says in which dim
    a parameter of its own      V where it is cut, I where it is whole
    a pending gradient          R: the gradient of what is replicated is a partial sum

Only what travels at a ``Site`` is put around the modules, in the checker's words.  It refuses a computation that mixes
I with V, so a site or a pending gradient that the plan does not have would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.anymodel.tensor import resolve_carried
from plait.anymodel.tensor.types import _entered
from plait.run.config import VerifyConfig
from plait.run.job.job import build_model, make_job
from plait.sharded.networks import rows_held
from plait.tensor.plan import Parallel, is_unsplit
from plait.zero.state.init import materialise

AXIS, WAYS = "tensor", 2

Seen = dict[str, tuple[str, str]]
"""What each module that the plan names reads and leaves."""


class TypedModel:
    """The model of a config, cut, with its sites.

    Args:
        pending: whether parameters whose gradients are pending are told to be so.
        without: a kind of site that is left out.
    """

    def __init__(self, config: VerifyConfig, *, pending: bool = True, without: str = "") -> None:
        self.sequence, self.without, self.seen = config.layout.sequence_parallel, without, Seen()
        job = make_job(config.task, config.dtypes)
        self.model = build_model(config.task)
        materialise(self.model, job.seed, torch.device("cpu"), job.weights)
        self.parallel: Parallel = resolve_carried(self.model, WAYS, sequence=self.sequence)
        (self.batch,) = job.microbatches(0, 0, 1, 1)
        self.types: dict[int, Any] = {}
        for p in self.model.parameters():
            cut = self.parallel.cuts.get(id(p))
            replicated = id(p) in self.parallel.summed and pending
            self.types[id(p)] = spmd.V if cut else spmd.R if replicated else spmd.I
            if cut:
                (start, stop), *more = cut.ranges(0)
                assert not more
                p.data = p.data.narrow(cut.dim, start, stop - start).clone()

    # ---- what stands around the modules --------------------------------------------------------------------------

    def gather(self, x: Tensor, dst: Any) -> Tensor:
        return spmd.all_gather(x, AXIS, src=spmd.S(1), dst=dst)

    def enter(self, x: Tensor) -> Tensor:
        if self.without == "enter":
            return x
        return self.gather(x, spmd.R) if self.sequence else spmd.convert(x, AXIS, src=spmd.I, dst=spmd.R)

    def leave(self, x: Tensor, *, whole: bool = False) -> Tensor:
        if self.without == "leave":
            return x
        if self.sequence and not whole:
            return spmd.reduce_scatter(x, AXIS, src=spmd.V, dst=spmd.S(1))
        return spmd.all_reduce(x, AXIS, src=spmd.V, dst=spmd.I)

    def split(self, x: Tensor) -> Tensor:
        return spmd.convert(x, AXIS, src=spmd.I, dst=spmd.S(1))

    def row(self, module: Any, x: Tensor) -> Tensor:
        y = self.leave(F.linear(x, module.weight))
        return y if module.bias is None else y + module.bias

    def embedding(self, module: Any, tokens: Tensor) -> Tensor:
        x = self.leave(rows_held(tokens, module.weight, 0, None), whole=self.parallel.splits)
        return module.dropout(x) if hasattr(module, "dropout") else x

    def wrap(self, name: str, style: Any) -> None:
        module: Any = self.model.get_submodule(name)
        inner: Callable[..., Any] = module.forward
        before: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
        after = before
        head = style.kind == "vocabulary" and not isinstance(module, nn.Embedding)
        if style.kind == "enter" or head or (style.enters and not _entered(name, style, self.parallel)):
            before = self.enter if not is_unsplit(name, self.parallel.styles) else before
        if style.kind == "row":
            inner = lambda x: self.row(module, x)  # noqa: E731
        if style.kind == "vocabulary" and not head:
            inner = lambda x: self.embedding(module, x)  # noqa: E731
        if style.kind == "split" and self.sequence:
            before = self.split
        if style.kind == "unsplit" and self.sequence:
            before, after = (lambda x: self.gather(x, spmd.I)), self.split

        def forward(*args: Any, **kwargs: Any) -> Any:
            reads = args[0] if args else kwargs["hidden_states"]
            entering = before(reads)
            left = inner(entering, *args[1:], **kwargs) if args else inner(**{**kwargs, "hidden_states": entering})
            first = after(left[0] if isinstance(left, tuple) else left)
            self.seen[name] = self.named(reads), self.named(first)
            return (first, *left[1:]) if isinstance(left, tuple) else first

        module.forward = forward

    def named(self, x: Tensor) -> str:
        """What spmd_types has inferred, with the dim in which a varying activation is smaller."""
        if not x.is_floating_point():
            return "tokens"
        kind = spmd.get_axis_local_type(x, AXIS)
        if kind in (spmd.I, spmd.R):
            return "whole"
        if kind is not spmd.V:
            return str(kind)
        steps = self.batch["tokens"].shape[1] if "tokens" in self.batch else x.shape[1]
        return "time" if x.shape[1] < steps else "cut"

    # ---- the run -------------------------------------------------------------------------------------------------

    def follow(self) -> Seen:
        """One forward; SpmdTypeError where the checker refuses it."""
        dist.init_process_group("fake", rank=0, world_size=WAYS, store=FakeStore())
        mesh = init_device_mesh("cpu", (WAYS,), mesh_dim_names=(AXIS,))
        for name, style in self.parallel.styles.items():
            if name in dict(self.model.named_modules()):
                self.wrap(name, style)
        try:
            with spmd.set_current_mesh(mesh), spmd_types.checker.typecheck(local=True):
                for p in self.model.parameters():
                    spmd.assert_type(p, {AXIS: self.types[id(p)]})
                for buffer in self.model.buffers():
                    spmd.assert_type(buffer, {AXIS: spmd.R})
                if "tokens" in self.batch:
                    tokens, stock = (
                        spmd.assert_type(self.batch["tokens"], {AXIS: spmd.R}),
                        hasattr(self.model, "generate"),
                    )
                    self.model(**{"input_ids": tokens, "use_cache": False} if stock else {"tokens_BT": tokens})
                else:
                    self.model(spmd.assert_type(self.batch["x"], {AXIS: spmd.I}))
        finally:
            dist.destroy_process_group()
        return self.seen
