"""The record of the running forward and its position in the run: one frozen value, held in one place.

    stage.forward(m)     begin(position, microbatch, ...)          a new context
      model called       module ──► name, what surrounds it ──► the module around it ──► ...
        column product   cut = its output                          the context is replaced, nothing in it changes
        block            kept:  here.again()
    stage.backward(m)    context = the one at the end of m's forward
        block again      with swapped(kept): ...                   afterwards the backward's own is back

Handlers, hooks and messages read ``current.context``; nothing else remembers anything about a forward.  Only ``Counts``
are written to, by all contexts of their forward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.forward.batch import batch_tensors
from plait.forward.sites import Sites, Turns
from plait.torch_private import (
    current_autograd_node,
    current_backward_keeps_graph,
    current_graph_task_id,
    top_saved_tensors_hooks,
    will_engine_execute_node,
)


def in_backward() -> bool:
    """True while the autograd engine runs in this thread: a forward now is a recomputation."""
    return bool(current_graph_task_id() != -1)


def graph_is_kept() -> bool:
    """True if the backward that runs in this thread keeps its graph for another one (``create_graph``, too)."""
    return bool(current_backward_keeps_graph())


def goes_on() -> bool:
    """True, in a hook on a tensor, if the running backward goes on past it, instead of ending with its gradient."""
    following = [node for node, _ in current_autograd_node().next_functions if node is not None]
    try:
        return any(map(will_engine_execute_node, following))
    except RuntimeError:  # the gradient of a leaf among them is wanted
        return True


def checkpoint_around() -> object:
    """Returns an object that identifies the innermost ``torch.utils.checkpoint`` around this line, or None."""
    hooks = top_saved_tensors_hooks(False)
    return hooks[0] if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook") else None


@dataclass(frozen=True)
class RNGPosition:
    """The position of a forward in the run: with the seed, it determines the dropout masks.

    ``first_sample`` is the global index of the microbatch's first sample within the step.  ``lengths`` are the lengths
    in time that its samples may have, as ``token_counts`` finds them.
    """

    step: int
    microbatch: int
    first_sample: int
    num_samples: int
    lengths: tuple[int, ...] = ()

    def of_samples(self, shape: Sequence[int]) -> bool:
        """True if the rows of a tensor belong to the samples: [samples, ...], or [samples * time, ...] where the tokens
        of each sample follow one another, as a router of experts has them."""
        rows = shape[0] if shape else -1
        return rows == self.num_samples or rows in (self.num_samples * length for length in self.lengths)


def token_counts(batch: Any, num_samples: int) -> tuple[int, ...]:
    """The possible numbers of tokens of a sample: the second dims of the tensors whose first dim is the samples."""
    sizes = (tensor.shape[:2] for tensor in batch_tensors(batch) if tensor.dim() > 1)
    return tuple({length: None for samples, length in sizes if samples == num_samples})


class ModuleCall(NamedTuple):
    """A module whose forward is under way."""

    name: str = ""
    outer: "ModuleCall | None" = None  # the call around it; None outside of the model
    checkpoint: object = None  # around it when it was called (see ``checkpoint_around``)
    again: int = 0  # for a call in a backward, which counts its masks anew: the number of calls that it may repeat
    twice: bool = False  # its operators will run again in the backward, or run for the second time
    switches: bool = False  # the interceptor is switched on, or off, for this call
    in_model: bool = False  # the stage's model or called by it; False for a part that ``loss_fn`` calls
    site: str = ""  # where it draws (see ``sites``)


OUTSIDE = ModuleCall()
"""``loss_fn``, before and after it calls the model."""


class RunningUnit(NamedTuple):
    """A unit whose forward is under way."""

    open_again: Callable[[], None]  # unshards it in a backward
    reads: Callable[[Tensor], None]  # its forward reads a parameter, which is gathered if it is not there


class CutActivation(NamedTuple):
    """The output of the last column-cut module here: ``width`` features in all, 0 where activations are whole."""

    width: int = 0
    shape: torch.Size = torch.Size()
    fused: bool = False


class Counts:
    """The numbers of masks and calls of each site of a forward, and the site of each module."""

    def __init__(self) -> None:
        self.masks, self.calls, self.turns = dict[str, int](), dict[str, int](), Turns()
        self.sites: dict[str, str | None] = {}
        """None for a module that was called at several sites, or that has no site itself."""

    def resumed(self, site: str) -> "Counts":
        """Returns the counts of a recomputation that begins here, at this site."""
        again = Counts()
        again.masks[site], again.calls, again.sites = self.masks.get(site, 0), self.calls, self.sites
        return again


class ForwardContext(NamedTuple):
    """The state of a forward."""

    module: ModuleCall = OUTSIDE
    units: tuple[RunningUnit, ...] = ()  # innermost last
    cut: CutActivation = CutActivation()
    column_input: Any = None  # the ``Entered`` that the next column-cut sibling may share
    whole_logits: bool = False  # the model computes its own loss, of the logits of the whole vocabulary
    unsplit: bool = False  # inside a module whose activations are whole in time, though the stream is not
    length: int = 0  # steps of time of the whole stream under sequence parallelism, once the embedding has seen it
    boundary: Any = None  # the ``BoundaryState`` of a stage, while ``loss_fn`` runs
    position: RNGPosition | None = None
    microbatch: int = -1  # for the ledger
    draws: bool = False  # randomness is served
    stand_ins: dict[int, Tensor] | None = None  # for parameters, by ``id``, where the backward comes in two parts
    counts: Counts = Counts()

    def within(self, module: ModuleCall) -> "ForwardContext":
        """Returns the same context in another module (``_replace`` is five times slower, and this runs per module)."""
        return tuple.__new__(ForwardContext, (module, *self[1:]))

    def again(self, *, whole: bool) -> "ForwardContext":
        """Returns the context for the recomputation that begins here, either of ``whole`` modules or of a function that
        calls no module.  It keeps no tensor and no checkpoint alive."""
        module, counts = self.module, self.counts.resumed(self.module.site)
        around = None if module.outer is None else OUTSIDE
        inside = ModuleCall(module.name, around, None, int(whole), True, in_model=module.in_model, site=module.site)
        return self._replace(module=inside, units=(), column_input=None, boundary=None, counts=counts)


class CurrentForward:
    """Holds the context of the forward that runs on a stage, or whose backward runs."""

    def __init__(self) -> None:
        self.context, self.sites = ForwardContext(), Sites(nn.Module())
        self.begun = 0
        """Forwards of a program's own loop since its last backward; after several, the context may be another's."""

    def begin(self, position: RNGPosition | None = None, **fields: Any) -> None:
        """Begins a forward; ``fields`` are those of its context."""
        self.context = ForwardContext(position=position, counts=Counts(), **fields)
        self.begun += torch.is_grad_enabled() or self.begun > 0  # without a graph before it, any later one is the one

    def replace(self, **fields: Any) -> None:
        """Changes fields of the context within the same forward."""
        self.context = self.context._replace(**fields)

    @contextmanager
    def swapped(self, context: ForwardContext) -> Iterator[None]:
        """Runs another forward inside, and restores this one afterwards."""
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before

    # ---- modules and units --------------------------------------------------------------------------------------

    @property
    def comes_back(self) -> bool:
        """True if handlers will see the running code again when it is recomputed: a module's call switches them on, but
        a checkpoint around a function that is no module's call runs without them."""
        return checkpoint_around() is self.context.module.checkpoint

    def enter_unit(self, unit: RunningUnit) -> None:
        module, units, *rest = self.context
        self.context = tuple.__new__(ForwardContext, (module, (*units, unit), *rest))

    def leave_unit(self) -> None:
        module, units, *rest = self.context
        self.context = tuple.__new__(ForwardContext, (module, units[:-1], *rest))
