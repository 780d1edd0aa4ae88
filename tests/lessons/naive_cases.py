"""A small MLP with odd widths, ragged batches, and what a step leaves behind."""

from __future__ import annotations

import torch
from plait_lessons.naive import microbatcher
from plait_lessons.naive.microbatcher import Pair
from torch import Tensor, nn

from plait.forward.context import CurrentForward, RNGPosition
from plait.forward.dropout import DropoutRNG
from plait.forward.interceptor import Interceptor
from plait.run.data.regression import SyntheticRegression
from plait.run.models.mlp import MLP, MLPConfig, sample_count, squared_error_sum
from plait.zero.state.init import materialise

LOSS, COUNT = squared_error_sum, sample_count


def mlp(num_layers: int = 5, dropout: float = 0.0) -> MLP:
    """Widths that nothing divides."""
    widths = tuple((5, 7, 3, 9, 4, 6, 11, 5, 3)[: num_layers + 1])
    model = MLP(MLPConfig(num_layers=num_layers, widths=widths, dropout=dropout)).to("meta")
    materialise(model, 3, torch.device("cpu"))
    return model


def batch(model: MLP, samples: int = 13) -> Pair:
    """Input and target; some rows have no loss."""
    sizes = model.config.sizes
    found = SyntheticRegression(sizes[0], seed=4, output_width=sizes[-1]).samples(0, 0, samples, samples)
    assert 0 < sample_count(found) < samples
    return found.pop("x"), found


def pairs(model: MLP, num_microbatches: int, samples: int = 13) -> list[Pair]:
    return microbatcher.split(batch(model, samples), num_microbatches)


def taken(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, which are taken off the model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Equal to the bit."""
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def draw_masks(part: nn.Module, microbatches: list[Pair]) -> None:
    """The engine's dropout for a module that sees the microbatches in order."""
    current, seen = CurrentForward(), iter(range(len(microbatches)))
    firsts = [sum(len(x) for x, _ in microbatches[:m]) for m in range(len(microbatches))]

    def begin(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        m = next(seen)
        assert len(args[0]) == len(microbatches[m][0])
        current.begin(RNGPosition(0, m, firsts[m], len(args[0])))

    Interceptor(current, [DropoutRNG(8, current)]).follow(part)
    part.register_forward_pre_hook(begin, prepend=True)
