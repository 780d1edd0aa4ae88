"""Models that were not written for plait: GPT-2, Llama and Qwen2, a ResNet, and torch's own modules in small nets.

``JOBS`` has a job for each.  Batches are ragged: numbers of samples do not divide over microbatches, and masks leave
different numbers of targets in them.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from engine_cases import Made
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import plait
from plait.run.models import hf

IGNORED, LENGTH = -100, 6
Batch = dict[str, Tensor]
WIDTH = 6


def headed(body: nn.Module, width: int = WIDTH, features: Callable[[Any, Tensor], Tensor] | None = None) -> nn.Module:
    """Something over time, its mean, and a linear head."""
    over_time = features or (lambda body, x_BTC: body(x_BTC))
    return Made(lambda m, x_BTC: m.head(over_time(m.body, x_BTC).mean(1)), body=body, head=nn.Linear(width, 3))


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def masked(body: Any, x_BTC: Tensor) -> Tensor:
    """A causal mask and padding."""
    padding_BT = torch.zeros(x_BTC.shape[:2])
    padding_BT[:, -1] = float("-inf")
    causal_TT = nn.Transformer.generate_square_subsequent_mask(x_BTC.shape[1])
    return body(x_BTC, mask=causal_TT, src_key_padding_mask=padding_BT, is_causal=True)  # type: ignore[no-any-return]


def attending() -> nn.Module:
    """Adds biases to keys and values, and returns its weights."""

    def features(body: Any, x_BTC: Tensor) -> Tensor:
        out_BTC, weights_BTT = body(x_BTC, x_BTC, x_BTC, need_weights=True)
        return out_BTC * weights_BTT.square().sum(-1, keepdim=True)  # type: ignore[no-any-return]

    attention = nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    return headed(attention, features=features)


def stepping(body: Any, x_BTC: Tensor) -> Tensor:
    """A cell that is called once per step of time."""
    h_BC = x_BTC.new_zeros(len(x_BTC), 5)
    for t in range(x_BTC.shape[1]):
        h_BC = body(x_BTC[:, t], h_BC)
    return h_BC[:, None]


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    """A perceptron whose middle weight is computed from others."""

    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
        change(net[2])
        return net

    return build


class Odd(nn.Module):
    """A scalar, an empty parameter, a product of three dims, an embedding and a bag."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.pair = nn.Bilinear(WIDTH, WIDTH, 3)
        self.bag, self.table = nn.EmbeddingBag(11, 3), nn.Embedding(11, 3, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        words = (x.abs() * 3).long().clamp(max=10)
        out: Tensor = self.pair(x, x) * self.scale + self.bag(words) + self.table(words).sum(1)
        return out


def convolved() -> nn.Module:
    body = nn.Sequential(
        nn.Conv1d(WIDTH, 6, 3, padding=1, groups=2),
        nn.GroupNorm(2, 6),
        nn.PReLU(6),
        nn.ConvTranspose1d(6, 5, 3),
        nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
        nn.Dropout1d(0.1),
        nn.Conv1d(5, 5, 2, padding_mode="circular", padding=1),
    )
    return headed(body, 5, lambda body, x_BTC: body(x_BTC.transpose(1, 2)).transpose(1, 2))


class Adapted(nn.Module):
    """LoRA by hand: a frozen linear and a trained product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(self.drop(x)))
        return out


NETS: dict[str, tuple[Any, ...]] = {
    "encoder": (lambda: headed(encoder()), 4),
    "encoder, masks": (lambda: headed(encoder(), features=masked), 4),
    "transformer": (
        lambda: headed(
            nn.Transformer(WIDTH, 2, 1, 2, 8, 0.1, batch_first=True),
            features=lambda body, x_BTC: body(x_BTC, x_BTC.flip(1)),
        ),
        4,
    ),
    "attention": (attending, 4),
    "lstm": (
        lambda: headed(
            nn.LSTM(WIDTH, 5, 2, batch_first=True, bidirectional=True), 10, lambda body, x_BTC: body(x_BTC)[0]
        ),
        4,
    ),
    "cell": (lambda: headed(nn.GRUCell(WIDTH, 5), 5, stepping), 4),
    "spectral norm": (changed(parametrizations.spectral_norm),),
    "symmetric": (changed(lambda module: parametrize.register_parametrization(module, "weight", Symmetric())),),
    "odd": (Odd,),
    "convolutions": (convolved, 5),
}
"""For each name the function that builds the net, and its batches' number of time steps if they have time."""


# ---- images -------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with norms and a shortcut, as in ResNet."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or fan_in != fan_out:
            self.downsample = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, stride, bias=False), nn.BatchNorm2d(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + shortcut)
        return out


class ResNet(nn.Module):
    """Stem, two stages of blocks, pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 3, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(3, momentum=None)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Residual(3, 3, 1), Residual(3, 3, 1))
        self.layer2 = nn.Sequential(Residual(3, 5, 2), Residual(5, 5, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(5, 3)

    def pipeline_links(self) -> list[str]:
        layers = [f"layer{i}.{j}" for i in (1, 2) for j in range(2)]
        return ["conv1", "bn1", "relu", "maxpool", *layers, "avgpool", "fc"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))
        return out


class WithoutReLU(ResNet):
    """The module between its links writes in place."""

    def pipeline_links(self) -> list[str]:
        return [name for name in super().pipeline_links() if name != "relu"]


def sequential_net() -> nn.Module:
    """The same as an ``nn.Sequential`` of parts."""
    stem = (nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    blocks = (Residual(3, 3, 1), Residual(3, 5, 2), Residual(5, 5, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(5, 3))


# ---- decoders of transformers -------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """``GPT2LMHeadModel`` as it comes: dropout 0.1 in three places, the head tied to the embedding.

    The two embeddings are two links: GPT-2's own forward adds them, on the stage that has the second.
    """
    with hf.BUILDING:
        from transformers import GPT2Config, GPT2LMHeadModel  # the first import, too, is no work for two threads

        sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, use_cache=False))
    names = "transformer.wte transformer.wpe transformer.drop transformer.h.0 transformer.h.1 transformer.ln_f lm_head"
    model.pipeline_links = names.split
    return model


def decoder(kind: str, tie: bool = False) -> nn.Module:
    return hf.build(hf.HFConfig(32, 2, 16, 4, 2, 20, LENGTH, 0.1, kind=kind, tie=tie))  # type: ignore[arg-type]


def adapted() -> nn.Module:
    """A frozen decoder with adapters."""
    model = decoder("llama").requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


def lower(model: nn.Module, batch: Batch) -> Tensor:
    """The loss under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV = model(input_ids=batch["tokens"], use_cache=False).logits
    assert logits_BTV.dtype == torch.bfloat16
    targets = batch["targets"].flatten()
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets, reduction="sum", ignore_index=IGNORED)


# ---- jobs ---------------------------------------------------------------------------------------------------------


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def text(step: int) -> Batch:
    """Sample i has a target up to some place, sample 1 none at all."""
    generator = torch.Generator().manual_seed(5 + step)
    tokens_BT, targets_BT = (torch.randint(32, (13, LENGTH), generator=generator) for _ in range(2))
    ends_B = torch.randint(1, LENGTH + 1, (13,), generator=generator)
    ends_B[1] = 0
    targets_BT[torch.arange(LENGTH) >= ends_B[:, None]] = IGNORED
    return {"tokens": tokens_BT, "targets": targets_BT}


def causal(build: Callable[[], nn.Module], loss: Callable[[nn.Module, Any], Tensor] = hf.loss_sum) -> plait.UserJob:
    return plait.UserJob(build, loss, text, hf.token_count, adamw)


def classified(step: int, shape: tuple[int, ...]) -> Batch:
    """Some classes are ignored."""
    generator = torch.Generator().manual_seed(step)
    y_B = torch.randint(3, shape[:1], generator=generator)
    y_B[torch.rand(shape[:1], generator=generator) < 0.3] = IGNORED
    return {"x": torch.randn(*shape, generator=generator), "y": y_B}


def classes_sum(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum", ignore_index=IGNORED)


def classifying(build: Callable[[], nn.Module], *shape: int) -> plait.UserJob:
    count = lambda batch: int((batch["y"] != IGNORED).sum())  # noqa: E731
    return plait.UserJob(build, classes_sum, partial(classified, shape=shape), count, adamw)


IMAGES = 19, 2, 9, 9
JOBS = {
    "gpt2": causal(gpt2),
    "llama": causal(partial(decoder, "llama")),
    "qwen2": causal(partial(decoder, "qwen2", tie=True)),
    "adapted": causal(adapted),
    "autocast": causal(gpt2, lower),
    "resnet": classifying(ResNet, *IMAGES),
    "without relu": classifying(WithoutReLU, *IMAGES),
    "sequential": classifying(sequential_net, *IMAGES),
    **{name: classifying(build, 13, *shape, WIDTH) for name, (build, *shape) in NETS.items()},
}
