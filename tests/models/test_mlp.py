"""The monolith: its blocks, its sizes, and a loss that adds up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from plait.run.data.regression import SyntheticRegression
from plait.run.models import mlp

ODD = mlp.MLPConfig(num_layers=3, width=5)


def odd(seed: int = 0) -> mlp.MLP:
    torch.manual_seed(seed)
    return mlp.MLP(ODD).double()


def ragged_batch() -> dict[str, Tensor]:
    batch = SyntheticRegression(5, seed=4, dtype=torch.float64).samples(0, 0, 9, 9)
    assert 0 < mlp.sample_count(batch) < 9
    return batch


def test_sixteen_distinct_blocks() -> None:
    torch.manual_seed(0)
    model = mlp.MLP(mlp.MLPConfig())
    assert isinstance(model, nn.Sequential)
    assert [type(block) for block in model] == [mlp.Layer] * 16
    assert [type(block.activation) for block in model] == [nn.GELU] * 15 + [nn.Identity]
    assert len({tuple(block.linear.weight[0].tolist()) for block in model}) == 16
    assert sum(weight.numel() for weight in model.parameters()) == 16 * 65 * 64 == mlp.MLPConfig().num_parameters


def test_odd_sizes_against_the_definition() -> None:
    model = odd()
    assert sum(weight.numel() for weight in model.parameters()) == ODD.num_parameters == 3 * 6 * 5
    x_BD = ragged_batch()["x"]
    expected = x_BD
    for number, block in enumerate(model):
        expected = expected @ block.linear.weight.T + block.linear.bias
        if number < 2:
            expected = expected * 0.5 * (1 + torch.erf(expected / 2**0.5))
    torch.testing.assert_close(model(x_BD), expected, rtol=1e-13, atol=1e-15)


def test_dropout_follows_every_block_but_the_last() -> None:
    model = mlp.MLP(mlp.MLPConfig(num_layers=4, dropout=0.5))
    assert [isinstance(block.dropout, nn.Dropout) for block in model] == [True, True, True, False]
    x_BD = torch.ones(3, 64)
    assert not torch.equal(model(x_BD), model(x_BD))
    model.eval()
    assert torch.equal(model(x_BD), model(x_BD))


def test_the_loss_of_a_batch_is_the_sum_of_its_rows() -> None:
    model, batch = odd(), ragged_batch()
    expected, count = 0.0, 0
    for x_D, y_D, kept in zip(batch["x"], batch["y"], batch["mask"].tolist(), strict=True):
        if kept:
            expected += sum((p - q) ** 2 for p, q in zip(model(x_D[None])[0].tolist(), y_D.tolist(), strict=True))
            count += 1
    assert mlp.loss_sum(model, batch).item() == pytest.approx(expected, rel=1e-12)
    assert mlp.sample_count(batch) == count


def test_low_precision_counts_and_sums_without_loss() -> None:
    """bf16 has no 257: a mask or a loss summed in it would stop counting."""
    batch = {"x": torch.zeros(301, 1, dtype=torch.bfloat16), "y": torch.ones(301, 1, dtype=torch.bfloat16)}
    batch["mask"] = torch.ones(301, dtype=torch.bfloat16)
    assert mlp.sample_count(batch) == 301
    assert mlp.loss_sum(nn.Identity(), batch).item() == 301.0


def test_a_dropout_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout is 1\.5"):
        mlp.MLPConfig(dropout=1.5)
