"""Flags that distribute the model over the ranks.  ``RunConfig`` makes a ``Parallelism`` from them."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import tyro

from plait.checkpoint.files.reading import read_text
from plait.schedule.actions import Schedule, parse_schedule
from plait.schedule.orders import ORDERS, describe_chunks, describe_orders
from plait.table.flat import BUCKET_BYTES, Cut


@dataclass(frozen=True)
class LayoutConfig:
    """A layout on the mesh."""

    strategy: str = "zero3"
    """A row of the table (ddp, zero1, ... hpz), or your own: "name: params | kept | grads | state"."""
    microbatches: int = 1
    """Microbatches of one step on each data rank."""
    schedule: Annotated[
        str | None,
        tyro.conf.arg(
            help=(
                f"The schedule of the pipe axis: an order ({describe_orders()}), or a file that plait "
                f"schedule check proves. None: 1f1b, if there is a pipeline."
            )
        ),
    ] = None
    chunks: Annotated[int | None, tyro.conf.arg(help=describe_chunks)] = None
    hold: int | None = 1
    """Stages that a rank keeps unsharded for its next passes, under a row that splits parameters; None: units are
    gathered one by one in every pass, which takes the least memory and the most messages."""
    split: str | None = None
    """Links of the model on each stage, as in "5 4". None: the same number on each."""
    cut: Cut = "element"
    """The cuts that the data axes may make: anywhere in a parameter, or only between parameters."""
    prefetch: int = 1
    """Number of units to gather ahead of the running one."""
    bucket: int = BUCKET_BYTES
    """Bytes: if parameters are whole at rest, neighbouring units of at most this size are laid out as one and send one
    message; 0: none are."""
    sequence_parallel: bool = False
    """Cut the activations between tensor-parallel products in time (no effect on one rank)."""
    ring_attention: bool = False
    """Over a context axis, let keys and values go round instead of gathering them; without dropout or packing."""
    all_to_all: bool = False
    """Over an expert axis, send each token only to the ranks of its experts instead of gathering all tokens."""
    recompute: Literal["full", "selective"] | None = None
    """Recompute activations in the backward instead of keeping them: full, all inside a block; selective, those of
    attention, which grow with the square of the length. None: keep all."""
    offload: bool = False
    """Keep the optimizer's state, and the copy of the parameters that it updates, on the CPU."""

    @cached_property
    def sizes_of_stages(self) -> tuple[int, ...] | None:
        """The split as numbers.  None: the same number of links on each stage."""
        if self.split is None:
            return None
        words = self.split.replace(",", " ").split()
        if not words or not all(word.isdecimal() for word in words):
            raise ValueError(f'split {self.split!r}: give the links of each stage, as in "5 4"')
        return tuple(map(int, words))


def names_a_file(schedule: str) -> bool:
    """True if the name means a file and not an order: it has a dot or a slash, or such a file exists."""
    return schedule not in ORDERS and (bool({".", "/"} & {*schedule}) or os.path.isfile(schedule))


def read_schedule(path: str) -> Schedule:
    """Reads the schedule in a file.  Raises ValueError if it cannot be read or contains something else."""
    return parse_schedule(read_text(path, "the schedule"))
