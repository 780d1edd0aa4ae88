"""The dtype in which a model is built."""

import pytest
import torch

from plait.run.config.settings import TrainConfig
from plait.run.job.job import build_model


@pytest.mark.parametrize(
    ("dtype", "computed", "stored"),
    [
        ("fp32", torch.float32, torch.float32),
        ("fp64", torch.float64, torch.float64),
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("fp16-mixed", torch.float16, torch.float32),
    ],
)
def test_initial_weights_have_the_bits_of_the_master_weights(
    dtype: str, computed: torch.dtype, stored: torch.dtype
) -> None:
    config = TrainConfig(model="mlp", layers=1, width=4, dtype=dtype, strategy="zero1")
    assert config.dtypes.computed == computed
    assert {p.dtype for p in build_model(config.task, config.dtypes).parameters()} == {stored}
