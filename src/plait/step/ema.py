"""An exponential moving average of the weights, split as the optimizer's pieces are.

ema = plait.EMA(engine, decay=0.999)
optimizer.step()
ema.update()                        average += (1 - decay) (weights - average), on the runs owned here: nothing is sent

with ema.swapped():                 the model has the average, and the average the weights
    engine.evaluate(...)
state = ema.full_state_dict()       whole tensors under the model's names, and back by ema.load_full_state_dict(state)
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from plait.step.engine import Engine
from plait.zero.state.pieces import StatePiece


class EMA:
    """The average of an engine's weights, which starts from their present values.

    It costs one more piece like the one that the optimizer updates, in its dtype: fp32 if the row trains in 16 bits.
    Frozen parameters are their own average; buffers are the model's.

    Args:
        decay: the part of the average that an update keeps, 0 to 1; it may change at any time (``ema.decay = ...``).

    Raises:
        ValueError: a decay outside of 0 to 1.
    """

    def __init__(self, engine: Engine, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"a decay of {decay}: it is the part of the average that an update keeps, from 0 to 1")
        self.engine, self.decay = engine, decay
        self.values = [owned.view.detach().clone() for owned in engine.placed.owned]
        """The average of each of ``engine.placed.owned``."""

    def check_of(self, engine: Engine) -> None:
        """Raises ValueError if it is the average of another engine's weights."""
        if self.engine is not engine:
            raise ValueError(
                f"ema is the average of the weights of another engine ({self.engine!r}): give plait.EMA of this one"
            )

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average, after each ``optimizer.step()`` or ``engine.step``; nothing is sent."""
        for owned, value in zip(self.engine.placed.owned, self.values, strict=True):
            value.lerp_(owned.view, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Gives the model the average inside, for evaluation, ``engine.gathered`` or a state; all ranks enter together.

        The weights come back as they were, to the bit.

        Raises:
            ValueError: in the middle of a step, or inside of another block; a step inside.
        """
        with self.engine.swapped(self.values):
            yield

    def full_state_dict(self) -> dict[str, Tensor]:
        """``engine.full_state_dict()`` of the average; all ranks call it together."""
        with self.swapped():
            return self.engine.full_state_dict()

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads an average that was saved under any layout; nothing is sent.

        Raises:
            ValueError: a parameter that is missing, or has another shape.
        """
        for owned, value in zip(self.engine.placed.owned, self.values, strict=True):
            there = state.get(owned.name)
            if there is None or tuple(there.shape) != owned.place.shape:
                found = "nothing" if there is None else f"shape {tuple(there.shape)}"
                raise ValueError(f"the average of {owned.name!r} has shape {owned.place.shape}, the state has {found}")
            owned.place.fill(there, value)

    def pieces(self) -> Iterator[StatePiece]:
        """Yields this rank's part of the average, region by region, as ``engine.placed.pieces()`` gives the weights."""
        for owned, value in zip(self.engine.placed.owned, self.values, strict=True):
            yield from StatePiece.of(owned.name, "", owned.place, value, first=self.engine.placed.norm.counts(owned))
