"""Recomputation: activations are computed a second time instead of being kept.

    none        every operator keeps what its backward reads
    selective   attention keeps query, key and value; scores, softmax, masks and its output are recomputed
    full        a block keeps its inputs; its forward runs again when its backward begins

    forward    F0 ── F1 ── F2 ── loss         kept under full:  x0  x1  x2
    backward        F0 B0 ◄── F1 B1 ◄── F2 B2 ◄── loss

A second run begins where the first one began, with the same dropout masks and stand-ins for parameters, so it gives the
same bits.  The unit is gathered once for it and for the backward that follows.  Messages inside a block are sent again.

Sources: full recomputation, Chen et al. 2016 (arXiv:1604.06174); selective, Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.forward.context import CurrentForward, checkpoint_around, in_backward
from plait.forward.interceptor import Function, Handler, Interceptor
from plait.tensor import Parallel
from plait.torch_private import tree_flatten, tree_unflatten


def check_recompute(model: nn.Module, names: Iterable[str], recompute: str | None) -> None:
    """Raises ValueError for ``full`` where no unit (``names``) is a block."""
    if recompute == "full" and not blocks_of(model, names):
        raise ValueError(
            "recompute='full' runs the units inside a ModuleList or Sequential again, but no stock layer alone in its "
            "unit (nn.Linear), which keeps only its input: this model has no other unit there. Name larger ones "
            "(units=[...]), put the repeated layers into a ModuleList, or leave recompute out"
        )


def blocks_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The names of the units that ``full`` runs again: the outermost ones inside a ``ModuleList`` or ``Sequential``.  A
    stock layer alone in its unit (``nn.Linear``) is left out, because it keeps its input and nothing else."""
    modules, units = dict(model.named_modules()), set(names)
    blocks: list[str] = []
    for name in (n for n in modules if n in units):
        around = [modules[name[:i]] for i, letter in enumerate(name) if letter == "."] + [model] * bool(name)
        repeated = any(isinstance(m, nn.ModuleList | nn.Sequential) for m in around)
        nested = any(name.startswith(other + ".") for other in blocks)
        block = modules[name]
        stock = not list(block.children()) and (type(block).forward.__module__ or "").startswith("torch.nn.")
        if repeated and not nested and not stock:
            blocks.append(name)
    return blocks


WRITTEN = (
    "what it has written to stays written (a cache: model.config.use_cache = False; a tensor that it was given, in "
    "place; an object), or its path depends on something else than its arguments"
)
"""Why a forward cannot be run again."""


def called_twice(
    current: CurrentForward,
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    seen_by: Interceptor | None = None,
    early_stop: bool = True,
) -> Any:
    """Calls ``function(*args, **kwargs)`` and keeps only its arguments.  The backward calls it again, with lists and
    dicts as they are now, even if they change in between.

    Args:
        seen_by: sees the functions of the called modules, also the second time; None if ``function`` calls no module.
        early_stop: the second call ends as soon as it has computed everything that the backward reads.
    """
    units = current.context.units
    again = current.context.again(whole=seen_by is not None)
    leaves, spec = tree_flatten((args, kwargs), is_leaf=_stays)  # as single arguments, of which torch notices writes
    own = [(args, kwargs)]  # only the first call uses the caller's own objects

    def run(*leaves: Any) -> Any:
        first = bool(own)
        args, kwargs = own.pop() if first else tree_unflatten(leaves, spec)
        with ExitStack() as stack:
            if not first:
                if units:
                    units[-1].open_again()
                stack.enter_context(current.swapped(again))
                if seen_by is not None:
                    stack.enter_context(seen_by.on())
            stack.enter_context(_runs_twice(current))
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if first:
                    raise
                raise ValueError(
                    f"a forward fails when it is run again in the backward ({error}): {WRITTEN}"
                ) from error

    preserve = not again.draws  # otherwise every draw is served
    return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=preserve, early_stop=early_stop)


_CONTAINERS = {list, dict, OrderedDict, defaultdict, deque}


def _stays(value: Any) -> bool:
    """True for a leaf; objects of other classes are leaves, even where torch knows them."""
    return not (isinstance(value, tuple) or type(value) in _CONTAINERS)


@contextmanager
def _runs_twice(current: CurrentForward) -> Iterator[None]:
    """Marks everything inside as recomputed; enter it inside the checkpoint that recomputes."""
    before = current.context.module
    current.context = current.context.within(before._replace(checkpoint=checkpoint_around(), twice=True))
    try:
        yield
    finally:
        current.context = current.context.within(before)


def run_twice(model: nn.Module, name: str, interceptor: Interceptor, parallel: Parallel, *, sequence: bool) -> None:
    """Makes a block's forward run again in the backward.  Raises ValueError for a block whose input the tensor plan
    changes before its forward sees it, and at its first forward for one that writes to a buffer."""
    style = parallel.styles.get(name)
    if sequence and style and style.kind == "enter":
        raise ValueError(
            f"block {name!r} is 'enter' in the tensor plan, so its stream is gathered before its forward, and "
            f"recompute='full' would begin after that: make the module around it the unit"
        )
    module = model.get_submodule(name)
    once, checked = module.forward, set[bool]()
    early_stop = not parallel.styles  # a message over the tensor axis may come after all that the backward reads

    @wraps(once)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return once(*args, **kwargs)
        unseen = module.training not in checked and not in_backward()
        before = _buffers(module) if unseen else {}
        try:
            output = called_twice(interceptor.current, once, args, kwargs, seen_by=interceptor, early_stop=early_stop)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ValueError(
                f"block {name!r} calls torch.func.grad or its like, which torch cannot run again in the backward "
                f"(nor under torch.utils.checkpoint): call torch.autograd.grad, or leave recompute out"
            ) from error
        if unseen:
            checked.add(module.training)
            if written := [key for key, now in _buffers(module).items() if not same_bits(before.get(key), now)]:
                raise ValueError(
                    f"block {name!r} writes to its buffer {written[0]!r} in forward, and recompute='full' would write "
                    f"to it twice: replace running statistics by a norm without them, or freeze it by eval(); or leave "
                    f"recompute out"
                )
        return output

    module.forward = forward


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of a module's buffers."""
    return {key: buffer.detach().clone() for key, buffer in module.named_buffers()}


def same_bits(left: Tensor | None, right: Tensor) -> bool:
    """True if two tensors are the same, NaN for NaN."""
    return (
        left is not None and left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    )


class AttentionRecompute(Handler):
    """Runs ``F.scaled_dot_product_attention`` again in its backward, wherever the model calls it."""

    def __init__(self, current: CurrentForward) -> None:
        self.current = current
        self._seen = False

    def sees(self, func: Function) -> bool:
        return func is F.scaled_dot_product_attention

    def __call__(self, func: Function, call_next: Function, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call_next(*args, **kwargs)
        self._seen = True
        return called_twice(self.current, call_next, args, kwargs)

    def after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        """Hook of a whole model: raises ValueError if it has no attention to run again."""
        if torch.is_grad_enabled() and not self._seen:
            raise ValueError(
                f"recompute='selective' runs F.scaled_dot_product_attention again, which {type(model).__name__} does "
                f"not call: let its attention call it, use recompute='full', or leave recompute out"
            )
