"""Torch's own database of operators on cut tensors: right, or refused by name; never wrong, never an unclear error."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from zlib import crc32

import pytest
import torch
from cut_calls import Call, tried
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytest.importorskip("expecttest", reason="torch's database of operators imports it")
with torch.backends.__allow_nonbracketed_mutation():  # which the import forbids for good
    from torch.testing._internal.common_methods_invocations import op_db

MESHES = ("tensor=2", "tensor=3", "replica=2 tensor=2")
WAYS = ("function", "in place", "out=")
NO_VALUES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "resize_")
"""Entries whose values are what the memory holds."""


@dataclass(frozen=True)
class Outcome:
    entry: str
    way: str
    auto: bool
    cut: bool
    word: str
    said: str = ""


def name_of(entry: Any) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else str(entry.name)


NAMES = tuple(dict.fromkeys(map(name_of, op_db)))


def named(name: str) -> Any:
    """The entry of this name."""
    return next(e for e in op_db if name_of(e) == name)


def dtype_of(entry: Any) -> torch.dtype:
    for dtype in (torch.float64, torch.int64, torch.complex128, torch.bool, torch.float32):
        if entry.supports_dtype(dtype, "cpu"):
            return dtype
    return torch.float32


def samples(entry: Any, count: int) -> list[Any]:
    """Some of an entry's samples, small ones, evenly over them."""
    dtype = dtype_of(entry)
    torch.manual_seed(0)
    every = []
    for sample in entry.sample_inputs("cpu", dtype, requires_grad=entry.supports_autograd and dtype.is_floating_point):
        if sum(t.numel() for t in tensors(sample)) < 3000:
            every.append(sample)
        if len(every) == 60:
            break
    step = max(1, len(every) // count)
    return every[::step][:count]


def tensors(sample: Any) -> list[Tensor]:
    return [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]


def whole_call(entry: Any, sample: Any, way: str) -> Call | None:
    """The call on whole tensors; None where torch has none, or it raises."""
    function = {"function": entry.op, "in place": entry.inplace_variant, "out=": entry.op}[way]
    if function is None or (way == "out=" and not entry.supports_out):
        return None
    if not tensors(sample) or any(t.layout != torch.strided for t in tensors(sample)):
        return None
    try:
        torch.manual_seed(1)
        return Call.of(function, (sample.input, *sample.args), dict(sample.kwargs), way)
    except Exception:
        return None


def outcomes(entry: Any, count: int) -> Iterator[Outcome]:
    """Every try of an entry: samples, ways to call, meshes, explicitly and under ``auto_redistribute``."""
    name = name_of(entry)
    for k, sample in enumerate(samples(entry, count)):
        for way in WAYS:
            call = whole_call(entry, sample, way)
            if call is None:
                continue
            for draw, auto in product(range(2), (False, True)):
                mesh, seed = MESHES[(k + draw) % len(MESHES)], 2 * crc32(f"{name} {k} {way} {draw}".encode()) + draw % 2
                yield Outcome(name, way, auto, *tried(call, mesh, seed, auto, entry.name not in NO_VALUES))


def verdict(of_entry: Sequence[Outcome]) -> str:
    """The worst word of an entry, or right where some call with an operand cut was right."""
    words = {o.word for o in of_entry}
    for word in ("wrong", "unclear"):
        if word in words:
            return word
    return "right" if any(o.word == "right" and o.cut for o in of_entry) else "refused"


FEW = (
    "add", "amax", "bmm", "cat", "chunk", "clamp", "cumsum", "div.no_rounding_mode", "expand", "fft.rfft", "gather",
    "index_put", "index_select", "linalg.solve", "log_softmax", "logsumexp", "masked.sum",
    "masked_fill", "matmul", "mean", "movedim", "mul", "narrow", "nn.functional.batch_norm", "nn.functional.conv2d",
    "nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.gelu", "nn.functional.group_norm",
    "nn.functional.layer_norm", "nn.functional.linear", "nn.functional.mse_loss", "nn.functional.relu",
    "nn.functional.scaled_dot_product_attention", "permute", "reshape", "scatter_add", "select", "softmax",
    "sort", "split", "squeeze", "stack", "sum", "transpose", "tril", "unbind", "unflatten", "unsqueeze", "var",
    "var_mean", "view_as_real", "where",
)  # fmt: skip
"""The fast layer's operators: each way in which an operator gets its plan."""


def judged(name: str, count: int) -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(outcomes(named(name), count))
    bad = [f"{o.word} {o.way}{' auto' if o.auto else ''}: {o.said}" for o in found if o.word in ("wrong", "unclear")]
    assert not bad, "\n".join([name, *bad])
    return found


@pytest.mark.parametrize("name", FEW)
def test_a_few_operators(name: str) -> None:
    found = judged(name, 2)
    assert verdict(found) == "right"


@pytest.mark.parametrize("name", NAMES)
def test_every_operator(name: str) -> None:
    judged(name, 4)
