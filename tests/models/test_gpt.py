"""The monolith and the decoder against their definitions, written out slowly."""

import cmath
import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.run.data import batches as data_batches
from plait.run.data.regression import SyntheticRegression
from plait.run.data.windows import TextBatches
from plait.run.models import gpt, mlp

ODD = mlp.MLPConfig(num_layers=3, width=5)


def odd(seed: int = 0) -> mlp.MLP:
    torch.manual_seed(seed)
    return mlp.MLP(ODD).double()


def ragged_rows() -> dict[str, Tensor]:
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
    x_BD = ragged_rows()["x"]
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
    model, batch = odd(), ragged_rows()
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


SMALL = gpt.GPTConfig(vocabulary=31, num_layers=2, width=24, num_heads=6, num_kv_heads=2, max_length=12, dropout=0.0)


def small(seed: int = 0, **changes: object) -> gpt.GPT:
    """An fp64 model in which all weights differ, the norms' included, and none is near zero."""
    torch.manual_seed(seed)
    model = gpt.GPT(gpt.GPTConfig(**{**SMALL.__dict__, **changes})).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, dtype=weight.dtype))
    return model


def tokens_of(config: gpt.GPTConfig, batch: int = 3, length: int = 9, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (batch, length), generator=generator)


def plain_logits(model: gpt.GPT, tokens_BT: Tensor) -> Tensor:
    """Complex rotation, repeated heads, explicit mask and softmax: it shares the weights and no code."""
    config = model.config
    batch, length = tokens_BT.shape
    weights = dict(model.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name + ".weight"]

    def turned(x_BTHK: Tensor) -> Tensor:
        half = config.head_dim // 2
        pairs = torch.complex(x_BTHK[..., :half].contiguous(), x_BTHK[..., half:].contiguous())
        turns = [
            [cmath.rect(1.0, time * config.rope_base ** (-2 * pair / config.head_dim)) for pair in range(half)]
            for time in range(length)
        ]
        pairs = pairs * torch.tensor(turns, dtype=pairs.dtype)[:, None, :]
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    x_BTD = weights["embed.weight"][tokens_BT]
    for layer in range(config.num_layers):
        name = f"blocks.{layer}."
        h_BTD = norm(x_BTD, name + "attention_norm")
        q, k, v = (h_BTD @ weights[f"{name}attention.{part}.weight"].T for part in ("query", "key", "value"))
        q = turned(q.reshape(batch, length, config.num_heads, config.head_dim))
        k = turned(k.reshape(batch, length, config.num_kv_heads, config.head_dim))
        v = v.reshape(batch, length, config.num_kv_heads, config.head_dim)
        k, v = (t.repeat_interleave(config.num_heads // config.num_kv_heads, dim=2) for t in (k, v))
        scores_BHTS = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(config.head_dim)
        scores_BHTS = scores_BHTS.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed = torch.einsum("bhts,bshk->bthk", scores_BHTS.softmax(-1), v).reshape(batch, length, config.width)
        x_BTD = x_BTD + mixed @ weights[name + "attention.output.weight"].T
        h_BTD = norm(x_BTD, name + "mlp_norm")
        gate = h_BTD @ weights[name + "mlp.gate.weight"].T
        up = h_BTD @ weights[name + "mlp.up.weight"].T
        x_BTD = x_BTD + (gate * gate.sigmoid() * up) @ weights[name + "mlp.down.weight"].T
    return norm(x_BTD, "norm") @ weights["embed.weight"].T


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 6])
def test_logits_and_gradients_are_the_definitions(num_kv_heads: int) -> None:
    model = small(num_kv_heads=num_kv_heads)
    tokens_BT = tokens_of(model.config)
    # The tables are fp32 by design, so angles are good to 1e-6 and no better, in fp64 too.
    expected, found = plain_logits(model, tokens_BT), model(tokens_BT)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    direction = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    parameters = list(model.parameters())
    for a, b in zip(
        torch.autograd.grad((found * direction).sum(), parameters),
        torch.autograd.grad((expected * direction).sum(), parameters),
        strict=True,
    ):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()


def test_with_exact_tables_the_match_is_to_fp64() -> None:
    model = small()
    for block in model.blocks:
        place = torch.arange(SMALL.max_length, dtype=torch.float64)[:, None]
        angle = place * SMALL.rope_base ** (-torch.arange(0, SMALL.head_dim, 2, dtype=torch.float64) / SMALL.head_dim)
        block.attention.cos, block.attention.sin = angle.cos(), angle.sin()
    tokens_BT = tokens_of(SMALL)
    torch.testing.assert_close(model(tokens_BT), plain_logits(model, tokens_BT), rtol=1e-12, atol=1e-12)


def test_the_head_is_the_embedding() -> None:
    model = small()
    assert model.head.weight is model.embed.weight
    assert sum(weight is model.embed.weight for weight in model.parameters()) == 1
    assert isinstance(model.head, nn.Linear) and model.head.bias is None
    assert "head.weight" not in dict(model.named_parameters())
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight and twin.head.weight is not model.head.weight
    assert model.double().head.weight is model.embed.weight


def test_each_module_initialises_its_own_parameters_and_no_others() -> None:
    model = small()
    owners = [(name, module) for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    for name, module in owners:
        before = {key: weight.detach().clone() for key, weight in model.named_parameters()}
        module.reset_parameters()
        changed = {key for key, weight in model.named_parameters() if not torch.equal(weight, before[key])}
        assert changed == ({f"{name}.weight"} if name != "head" else set()), name


def test_initial_weights() -> None:
    torch.manual_seed(0)
    config = gpt.GPTConfig(vocabulary=500, num_layers=8)
    model = gpt.GPT(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
            continue
        std = 0.02 / 4 if name.endswith(("output.weight", "down.weight")) else 0.02
        assert weight.std().item() == pytest.approx(std, rel=0.05), name
    seen = [weight.flatten()[:8].tolist() for name, weight in model.named_parameters() if "norm" not in name]
    assert len({tuple(row) for row in seen}) == len(seen), "two layers began with the same weights"


def test_default_sizes() -> None:
    config = gpt.GPTConfig()
    assert (config.head_dim, config.hidden_width) == (32, 352)  # 8/3 * 128 = 341.33, up to 352
    assert gpt.GPTConfig(width=96).hidden_width == 256  # exactly 8/3
    # 32,768 embedding + 4 * (49,152 attention + 135,168 swiglu + 256 norms) + 128
    assert sum(weight.numel() for weight in gpt.GPT(config).parameters()) == 32768 + 4 * (49152 + 135168 + 256) + 128


@pytest.mark.parametrize("config", [mlp.MLPConfig, gpt.GPTConfig])
@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_a_dropout_that_is_no_probability_is_refused(config: Any, dropout: float) -> None:
    with pytest.raises(ValueError, match=f"dropout is {dropout}: .* not including, 1"):
        config(dropout=dropout)


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    model = small(dropout=0.5)
    tokens_BT = tokens_of(SMALL)
    assert not torch.equal(model(tokens_BT), model(tokens_BT))
    model.eval()
    assert torch.equal(model(tokens_BT), model(tokens_BT))
    torch.testing.assert_close(model(tokens_BT), small()(tokens_BT))
    places = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    assert places == ["embed.dropout", *(f"blocks.{i}.{m}_dropout" for i in (0, 1) for m in ("attention", "mlp"))]


def test_attention_drops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    attend = nn.functional.scaled_dot_product_attention

    def spy(*args: Tensor, dropout_p: float, **rest: Any) -> Tensor:
        asked.append(dropout_p)
        return attend(*args, dropout_p=dropout_p, **rest)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    model = small(dropout=0.25)
    model(tokens_of(SMALL))
    model.eval()(tokens_of(SMALL))
    assert asked == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_dtype_runs_and_the_loss_is_at_least_fp32(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    batch = TextBatches(bytes(range(31)) * 4, 8, seed=0).samples(0, 0, 2, 2)
    assert model(batch["tokens"]).dtype == dtype
    assert gpt.loss_sum(model, batch).dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = gpt.loss_sum(small(), batch).item()
    assert gpt.loss_sum(model, batch).item() == pytest.approx(expected, rel=0.05 if dtype == torch.bfloat16 else 1e-4)


def ragged_batch() -> dict[str, Tensor]:
    batch = TextBatches(bytes(i * i % 31 for i in range(200)), 8, seed=3, ragged=True).samples(0, 0, 7, 7)
    assert len({int((row != gpt.IGNORED).sum()) for row in batch["targets"]}) > 2
    return batch


def test_the_loss_of_a_batch_is_the_sum_of_its_tokens() -> None:
    model, batch = small(), ragged_batch()
    log_probability = plain_logits(model, batch["tokens"]).log_softmax(-1)
    expected, count = 0.0, 0
    for row, targets in enumerate(batch["targets"].tolist()):
        for time, target in enumerate(targets):
            if target != -100:
                expected -= log_probability[row, time, target].item()
                count += 1
    assert gpt.loss_sum(model, batch).item() == pytest.approx(expected, rel=1e-6)
    assert gpt.token_count(batch) == count
    assert 0 < count < batch["targets"].numel()


def test_a_batch_without_targets_or_samples_is_zero() -> None:
    model, batch = small(), ragged_batch()
    masked = {"tokens": batch["tokens"], "targets": torch.full_like(batch["targets"], gpt.IGNORED)}
    for nothing in (masked, {key: value[:0] for key, value in batch.items()}):
        loss = gpt.loss_sum(model, nothing)
        loss.backward()
        assert loss.item() == 0.0 and gpt.token_count(nothing) == 0
        assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())
        model.zero_grad()


def test_model_and_data_ignore_the_same_target() -> None:
    assert gpt.IGNORED == data_batches.IGNORED == -100
