"""A step under way, and its result."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from plait.forward.batch import batch_tensors


@dataclass(frozen=True)
class StepResult:
    """The result of one step; all fields but ``local_losses`` are the same on every rank."""

    step: int
    """The number of the step, from 0."""
    loss: float
    """The global sum divided by the global count."""
    count: int
    """The number of terms of the loss, over all ranks."""
    local_losses: tuple[float, ...]
    """The sums of this data rank's microbatches."""
    grad_norm: float | None
    """The global norm before clipping; None without clipping, or if no step was made."""
    made: bool = field(default_factory=lambda: True)  # the class has no value that hides a late one
    """False if the step was skipped, on all ranks, because a loss or gradient was not finite."""
    stop: tuple[int, int] | None = None
    """(rank, signal): that signal asked a rank to end, so all ranks save and end after this step."""


@dataclass
class OpenStep:
    """A step under way, from its first forward to the end of its update."""

    count: int | None = None
    """The global number of targets; None until it is known (a program's own loop counts at the end)."""
    local_count: int = 0
    losses: list[Tensor] = field(default_factory=list)
    own_loop: bool = False
    """True if the program's own loop makes the step."""
    reduced: bool = False
    """True once the sums are finished and clipped, and the pieces have their gradients."""


def whole_count(count: Any) -> int:
    """Returns a number of terms as an int; raises ValueError for a fraction or a negative number."""
    if (number := int(count)) != count or number < 0:
        raise ValueError(f"a count of {count}: it is the number of terms of the loss, a whole number of 0 or more")
    return number


def num_samples(batch: Any) -> int:
    """The size of the first dim of the first tensor in a batch."""
    if not any(tensor.dim() for tensor in batch_tensors(batch)):
        raise ValueError(
            f"no tensor found in the batch of type {type(batch).__name__}: the first dim of its first one gives the "
            f"number of samples. Give a tensor, or tuples, lists, dicts or dataclasses of them"
        )
    return samples_of(batch)


def samples_of(call: Any) -> int:
    """The number of samples in a call of the model; 0 without a tensor: its draws belong to the microbatch."""
    return next((tensor.size(0) for tensor in batch_tensors(call) if tensor.dim() > 0), 0)
