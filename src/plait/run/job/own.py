"""A job that the user writes, and the loader for ``--job FILE.py:NAME``.

    # my_job.py                                        plait verify --job my_job.py:job --mesh shard=2

    job = plait.UserJob(
        build=lambda: MyModel(),                       an nn.Module, built in the ordinary way
        loss_fn=lambda model, batch: ...,              the sum of the losses of a batch
        count_fn=lambda batch: ...,                    the number of terms in that sum
        batches=lambda step: ...,                      the whole batch of a step; or a list of batches
        optimizer=lambda params: AdamW(params),        left out: the optimizer of the flags
    )

A job does not mention ranks: plait cuts each step's batch by samples, builds the same model on every rank, and trains
it under any layout.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tyro.constructors import PrimitiveConstructorSpec

from plait.run.data.batches import Batches
from plait.run.job.user_code import load_name
from plait.step.step import num_samples
from plait.torch_private import tree_leaves, tree_map

PLACE = PrimitiveConstructorSpec[Any](
    nargs=1,
    metavar="FILE.py:NAME",
    instance_from_str=lambda words: words[0],
    is_instance=lambda value: True,
    str_from_instance=lambda value: [str(value)],
)
"""Tells tyro how to read ``--job`` from the command line."""

_SEEDING = threading.Lock()
"""Guards torch's generator, which is one per process, while ranks may be threads."""


@dataclass(frozen=True, eq=False)
class UserJob:
    """A training job without its layout.

    Args:
        build: makes the model, with its values. It may draw from torch's generator, which plait seeds before the call.
        loss_fn: ``(model, batch) -> scalar``, the *sum* of the losses of the batch's samples.
        batches: a function from a step's number (from 0) to its whole batch, or a sequence of batches, which plait
            repeats. A batch is a tensor or nested dicts, lists and tuples of tensors. Tensors whose first dim is the
            number of samples are cut; all others go to every microbatch.
        count_fn: the number of terms in that sum; left out: one for each sample.
        optimizer: makes the optimizer of the model's parameters; left out: the flags do.
    """

    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Callable[[int], Any] | Sequence[Any]
    count_fn: Callable[[Any], int] = num_samples
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None

    def __str__(self) -> str:
        return f"the job around {getattr(self.build, '__qualname__', self.build)}"

    def batch(self, step: int) -> Any:
        return self.batches(step) if callable(self.batches) else self.batches[step % len(self.batches)]

    def model(self, seed: int) -> nn.Module:
        """Builds the same model for the same seed, also if threads build at the same time."""
        with _SEEDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        if not isinstance(model, nn.Module):
            raise ValueError(f"build returns {type(model).__name__}: it has to return an nn.Module")
        return model

    def check(self) -> None:
        """Refuses a job that would be a different run on every rank.  ValueError for models that share a module or
        differ in their values, and for batches that differ."""
        if not callable(self.batches) and not len(self.batches):
            raise ValueError("batches is empty: give a batch for each step, or at least one, used again and again")
        one, other = self.model(0), self.model(0)
        names = {id(module): name or "the model itself" for name, module in one.named_modules()}
        for module in other.modules():
            if id(module) in names:
                raise ValueError(f"build returns {names[id(module)]} twice, in two models: build new modules each time")
        values = other.state_dict()
        if differ := [name for name, value in one.state_dict().items() if not _same(value, values.get(name))]:
            raise ValueError(
                f"build gives {differ[0]!r} other values each time: draw them from torch's generator, which "
                f"is seeded before each build"
            )
        if not all(map(_same, tree_leaves(self.batch(0)), tree_leaves(self.batch(0)))):
            raise ValueError("batches gives other values for step 0 each time: seed a generator with the step")


def _same(one: Any, other: Any) -> bool:
    """True if two values are the same, NaN included."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.is_meta == other.is_meta
        if one.dtype == other.dtype and one.is_floating_point() and one.itemsize == 1:  # torch does not compare fp8
            one, other = one.float(), other.float()
        return alike and (one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num()))
    return isinstance(one, Tensor) == isinstance(other, Tensor)


class GivenBatches(Batches):
    """Cuts a user's batches by samples, and casts their floating-point tensors to ``dtype``."""

    def __init__(self, job: UserJob, dtype: torch.dtype) -> None:
        self.job, self.dtype = job, dtype

    def size(self, step: int, global_batch: int) -> int:
        return num_samples(self.job.batch(step))

    def samples(self, step: int, first: int, count: int, global_batch: int) -> Any:
        whole = self.job.batch(step)
        num = num_samples(whole)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            part = leaf[first : first + count] if leaf.dim() and len(leaf) == num else leaf
            return part.to(self.dtype) if part.is_floating_point() else part

        return tree_map(cut, whole)


@cache
def load_job(place: str) -> UserJob:
    """Loads the job that ``FILE.py:NAME`` names: a ``UserJob``, or a function without arguments that returns one.  A
    file runs once in a process, like a module.  ValueError for another object, or none."""
    found = load_name(place, "job", UserJob)
    job = found() if inspect.isfunction(found) and not inspect.signature(found).parameters else found
    if not isinstance(job, UserJob):
        raise ValueError(f"job {place!r} is {type(job).__name__}: give a plait.UserJob, or a function that returns one")
    return job
