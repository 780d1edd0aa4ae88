"""Who multiplies fp32 matrices on a CPU: torch's own BLAS, or oneDNN.

    y  = x W^T + b      linear      [..., in] [out, in] [out] -> [..., out]
    dx = g W            product     [..., n] [n, m] -> [..., m]
    dW = g^T x          product

torch's CPU wheels hand fp32 products to MKL, which has only AVX2 kernels for processors that are not Intel's.  oneDNN,
in the same wheels for convolutions and bf16, has AVX-512 kernels for all: on a core of AMD's Zen 5 it is twice as fast
(docs/log.md has figures; ``plait doctor`` measures this machine).  Both compute in fp32 but add in different orders, so
a run is bitwise that of a single process with the same one.

oneDNN is reached through the operator with which ``torch.compile`` calls it.  Tensors that it does not serve (other
dtypes, GPUs, empty ones, any under autocast) go to torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Gemm:
    """A way to multiply matrices."""

    name: str
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, weight, bias -> x W^T + b
    product: Callable[[Tensor, Tensor], Tensor]  # a, b -> a b, of which b is a matrix


def find_gemm(name: str) -> Gemm:
    """``torch`` or ``onednn``; raises ValueError for another name, or a torch that was built without oneDNN."""
    if name not in GEMMS:
        raise ValueError(f"gemm={name!r}: give {' or '.join(map(repr, GEMMS))}")
    if name == "onednn" and not has_onednn():
        raise ValueError("gemm='onednn', but this torch was built without oneDNN: leave it out, or say gemm='torch'")
    return GEMMS[name]


def has_onednn() -> bool:
    """Whether this torch can multiply with oneDNN."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    given = (x, weight) if bias is None else (x, weight, bias)
    return _onednn(x, weight, bias) if _served(*given) else F.linear(x, weight, bias)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _onednn(a, b.t(), None) if _served(a, b) else a @ b


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """It takes a bias for contiguous, and refuses a weight whose rows overlap, as those of ``unfold`` do."""
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


def _served(*tensors: Tensor) -> bool:
    if torch.is_autocast_enabled("cpu"):  # the operator knows nothing of it
        return False
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.numel() > 0 for t in tensors)


TORCH = Gemm("torch", F.linear, torch.matmul)
ONEDNN = Gemm("onednn", _linear, _product)
GEMMS = {gemm.name: gemm for gemm in (TORCH, ONEDNN)}
