"""The monolith: linear layers in one ``nn.Sequential``, the reference for every layout.

    x_BD -> Layer 0 -> Layer 1 -> ... -> Layer 15 -> prediction_BD
            linear     linear            linear
            GELU       GELU
            dropout    dropout

A ``Layer`` is one block, so wrapping by block finds 16 units, and a pipeline cuts the Sequential anywhere.

The loss is a *sum* over the rows whose mask is 1 and comes with their *count*; the engine divides once, by the count of
the whole step.  A mean of the microbatches' means would weight a row by the size of its microbatch, so the gradient
would differ between layouts as soon as two counts differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MLPConfig:
    """The sizes of an MLP.  Raises ValueError for a dropout that is not a probability."""

    num_layers: int = 16
    width: int = 64
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: give a probability from 0 up to, not including, 1")

    @property
    def num_parameters(self) -> int:
        return self.num_layers * (self.width + 1) * self.width


class Layer(nn.Module):
    """Layer ``index``, one block: x_BD -> linear, then GELU and dropout unless it is the last."""

    def __init__(self, config: MLPConfig, index: int) -> None:
        super().__init__()
        last = index == config.num_layers - 1
        self.linear = nn.Linear(config.width, config.width)
        self.activation = nn.Identity() if last else nn.GELU()
        self.dropout = nn.Identity() if last else nn.Dropout(config.dropout)

    def forward(self, x_BD: Tensor) -> Tensor:
        out_BD: Tensor = self.dropout(self.activation(self.linear(x_BD)))
        return out_BD


class MLP(nn.Sequential):
    """``num_layers`` Layers in sequence, each with its own weights."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__(*(Layer(config, index) for index in range(config.num_layers)))
        self.config = config

    def tensor_plan(self) -> dict[str, str]:
        """The cut of each layer over a tensor axis: in pairs, column then row.  The first and the last stay whole."""
        plan: dict[str, str] = {}
        for i in range(1, self.config.num_layers - 2, 2):
            plan |= {f"{i}.linear": "column", f"{i}.dropout": "hidden", f"{i + 1}.linear": "row"}
        return plan


def loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Squared errors, summed over the elements of all rows whose mask is 1: a scalar, never a mean.

    ``batch`` has ``x`` [batch, in], ``y`` [batch, out] and ``mask`` [batch] of 0 and 1.  The sum is in fp32, or in fp64
    if the prediction is.
    """
    prediction_BD = model(batch["x"])
    dtype = torch.float64 if prediction_BD.dtype == torch.float64 else torch.float32
    error_BD = prediction_BD.to(dtype) - batch["y"].to(dtype)
    loss: Tensor = (error_BD.square() * batch["mask"].to(dtype)[:, None]).sum()
    return loss


def sample_count(batch: Mapping[str, Tensor]) -> int:
    """The number of rows in a batch that have a loss."""
    return int((batch["mask"] != 0).sum())
