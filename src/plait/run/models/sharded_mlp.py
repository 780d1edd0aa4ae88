"""A pipeline stage's slice of the monolith: only the stage's layers, under the monolith's names.

    16 layers, 5 stages      stage 0   0 1 2 3          keys  0.linear.weight ...
                             stage 1   4 5 6                  4.linear.weight ...
                             ...
                             stage 4   13 14 15               13.linear.weight ...

Initial values, dropout masks and checkpoints depend on names.  Since a slice keeps the monolith's names,
``materialise(slice, seed, device)`` draws the same values as the monolith, and none for other layers.  Until then
parameters are on the meta device and take no memory.
"""

from collections import OrderedDict

from torch import nn

from plait.run.models.mlp import Layer, MLPConfig
from plait.schedule.partition import even


class ShardedMLP(nn.Sequential):
    """The layers of one stage, [batch, fan_in] -> [batch, fan_out].  Raises ValueError if it has none."""

    def __init__(self, config: MLPConfig, stage: int, num_stages: int) -> None:
        slices = even(config.num_layers, num_stages)
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage {stage} of {num_stages}: stages go from 0 to {num_stages - 1}")
        super().__init__(OrderedDict((str(index), Layer(config, index, "meta")) for index in slices[stage]))
        self.config, self.stage, self.num_stages, self.layers = config, stage, num_stages, slices[stage]

    @property
    def fan_in(self) -> int:
        """The width of this stage's input."""
        return self.config.sizes[self.layers.start]

    @property
    def fan_out(self) -> int:
        """The width of this stage's output."""
        return self.config.sizes[self.layers.stop]
