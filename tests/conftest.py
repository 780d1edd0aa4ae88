"""One compute thread everywhere: the thread count changes sums, and ranks share the cores."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from plait.tensor import gemm


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the products that oneDNN made."""
    made: list[tuple[int, ...]] = []
    original = gemm._onednn

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = original(x, weight, bias)
        made.append(tuple(y.shape))
        return y

    monkeypatch.setattr(gemm, "_onednn", counted)
    return made
