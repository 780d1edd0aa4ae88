"""Torch's own database of operators on cut tensors: right, or refused by name; never wrong, never an unclear error."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("expecttest", reason="torch's database of operators imports it")
from op_database import NAMES, Outcome, named, outcomes, verdict

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
