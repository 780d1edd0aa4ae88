"""Activations that are made a second time instead of being kept: recomputation.

    none        every operator keeps what its backward reads
    selective   attention keeps query, key and value; scores, softmax, masks and its output are made again
    full        a block keeps its inputs; its forward runs again when its backward begins

    forward    F0 ── F1 ── F2 ── loss         kept under full:  x0  x1  x2
    backward        F0 B0 ◄── F1 B1 ◄── F2 B2 ◄── loss

What is run again comes out the same to the bit: it begins where the first run began, with the same dropout masks, the
same length of the stream, the same microbatch's stand-ins for parameters, and the unit's parameters gathered, once for
the recomputation and for the backward behind it.  Messages between tensor ranks inside a block are sent again; the core
of attention sends none.

Sources: full recomputation, Chen et al. 2016 (arXiv:1604.06174); selective, Korthikanti et al. 2022 (arXiv:2205.05198,
section 5): the core of attention has most of a layer's activations (5as/h of 34 + 5as/h) and little of its products.
The work is ``torch.utils.checkpoint``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from plait.engine.rng import Streams, in_backward
from plait.engine.tensor_parallel import TensorParallel
from plait.engine.watch import Watch
from plait.engine.wrap import automatic
from plait.tensor.parallel import Parallel

Recompute = Literal["full", "selective"]

SAVES_NOTHING = ("gathered", "vocabulary")
"""Styles whose message may be the last thing of a block: torch ends a recomputation once it has what was saved."""


def check_recompute(model: nn.Module, names: Iterable[str] | None, recompute: str | None) -> None:
    """Raises ValueError for an unknown word, and for ``full`` on a model without a block.

    Args:
        names: the modules that are units; None: those that automatic wrapping finds.
    """
    if recompute not in (None, "full", "selective"):
        raise ValueError(f"recompute={recompute!r}: give 'full', 'selective' or None")
    if recompute == "full" and not blocks_of(model, automatic(model) if names is None else names):
        raise ValueError(
            "recompute='full' runs the blocks of a ModuleList or Sequential again, and no unit of this model is inside "
            "of one: put the repeated layers into a ModuleList, name them (units=[...]), or leave recompute out"
        )


def blocks_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Which units ``full`` runs again: those inside a ``ModuleList`` or ``Sequential``, of nested ones the outermost.

    Embedding, head and the root are used once and are not among them; nor is a stock layer alone in its unit
    (``nn.Linear``), which keeps its input and nothing else.
    """
    modules = dict(model.named_modules())
    found: list[str] = []
    for name in (n for n in modules if n in set(names)):
        around = [modules[name[:i]] for i, letter in enumerate(name) if letter == "."] + [model] * bool(name)
        repeated = any(isinstance(m, nn.ModuleList | nn.Sequential) for m in around)
        nested = any(name.startswith(other + ".") for other in found)
        if repeated and not nested and not _stock(modules[name]):
            found.append(name)
    return found


def _stock(module: nn.Module) -> bool:
    return not list(module.children()) and type(module).forward.__module__.startswith("torch.nn.")


class Recomputation:
    """What a stage runs twice.

    Args:
        streams: the dropout streams; they know which module runs.
        products: tensor parallelism, where the mesh has it.
        watch: the units whose forward is under way.
    """

    def __init__(self, streams: Streams, products: TensorParallel | None, watch: Watch) -> None:
        self.streams, self.products, self.watch = streams, products, watch
        self.again = False
        """A recomputation is under way."""

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        whole: bool,
        early_stop: bool = True,
    ) -> Any:
        """``function(*args, **kwargs)``, of which only the arguments are kept for the backward.

        Args:
            whole: it calls modules.
            early_stop: it ends, the second time, as soon as everything is there that the backward reads.
        """
        mark = self.streams.mark()
        cut = self.products.mark() if self.products else None
        open_unit = self.watch.running[-1] if self.watch.running else None
        ran = False

        def run(*args: Any) -> Any:
            nonlocal ran
            with ExitStack() as stack:
                if ran:
                    if open_unit is not None:
                        open_unit()
                    stack.enter_context(self.streams.again(mark, whole=whole))
                    if self.products and cut is not None:
                        stack.enter_context(self.products.again(cut))
                    self.again = True
                    stack.callback(setattr, self, "again", False)
                ran = True
                stack.enter_context(self.streams.runs_twice())
                return function(*args, **kwargs)

        preserve = not mark.drawing  # else every draw is served by the streams
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve, early_stop=early_stop)


def run_twice(model: nn.Module, names: Iterable[str], parallel: Parallel, recomputation: Recomputation) -> None:
    """Make the forward of these blocks one that runs again in the backward.

    Raises:
        ValueError: a block whose input the tensor plan changes before its forward sees it.
    """
    for name in names:
        style = parallel.styles.get(name)
        if recomputation.products and recomputation.products.axis.sequence and style and style.kind == "enter":
            raise ValueError(
                f"block {name!r} is 'enter' in the tensor plan, so its stream is gathered before its forward, and "
                f"recompute='full' would begin behind that: make the module around it the unit"
            )
        inside = [s.kind for n, s in parallel.styles.items() if f"{n}.".startswith(f"{name}.")]
        early_stop = not any(kind in SAVES_NOTHING for kind in inside)
        _run_twice(name, model.get_submodule(name), recomputation, early_stop=early_stop)


def _run_twice(name: str, module: nn.Module, recomputation: Recomputation, *, early_stop: bool) -> None:
    """The same of one block.

    Raises:
        ValueError: at its first forward, where it writes to a buffer.
    """
    once, checked = module.forward, set[bool]()

    @wraps(once)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*args, **kwargs)
        unseen = module.training not in checked and not in_backward()
        before = {key: buffer.clone() for key, buffer in module.named_buffers()} if unseen else {}
        output = recomputation.call(once, args, kwargs, whole=True, early_stop=early_stop)
        if unseen:
            for key, buffer in module.named_buffers():
                if key not in before or not same_bits(before[key], buffer):
                    raise ValueError(
                        f"block {name!r} writes to its buffer {key!r} in forward, and recompute='full' would write to "
                        f"it twice (running statistics): use a norm without them, freeze it by eval(), or leave "
                        f"recompute out"
                    )
            checked.add(module.training)
        return output

    module.forward = forward


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same, NaN for NaN."""
    if not left.is_floating_point() or left.shape != right.shape:
        return torch.equal(left, right)
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


class Cores(TorchFunctionMode):
    """Runs every ``F.scaled_dot_product_attention`` of the model again in its backward; on while the model runs."""

    def __init__(self, recomputation: Recomputation) -> None:
        super().__init__()
        self.recomputation = recomputation
        self._seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or self.recomputation.again or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        self._seen = True
        return self.recomputation.call(func, args, kwargs, whole=False)

    def after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook of a whole model: raises ValueError where there is no attention to run again."""
        if torch.is_grad_enabled() and not self._seen:
            raise ValueError(
                f"recompute='selective' runs F.scaled_dot_product_attention again, which {type(model).__name__} does "
                f"not call: let its attention call it, use recompute='full', or leave recompute out"
            )
