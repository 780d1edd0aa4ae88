"""torch's side: its ring attention with the CPU's kernel, an all-gather by hand, and its public function's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.utils._python_dispatch import TorchDispatchMode

from plait.tensor.time_axis import TimeAxis

TORCH_WAYS = ("allgather", "alltoall")
"""The ways in which torch moves keys and values: all at once, or block by block."""
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Ring(torch.autograd.Function):
    """torch's ``_templated_ring_attention`` and its backward; its public function does not call them on a CPU."""

    @staticmethod
    def forward(ctx: Any, way: str, *inputs: Tensor) -> Tensor:
        _attention.set_rotate_method(way)
        out, lse, *_ = _attention._templated_ring_attention(
            dist.group.WORLD, 2, FORWARD, *(x.contiguous() for x in inputs), is_causal=True
        )
        ctx.save_for_backward(*inputs, out, lse)
        ctx.way = way
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _attention.set_rotate_method(ctx.way)
        query, key, value, out, lse = ctx.saved_tensors
        found = _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, BACKWARD, gradients[0].contiguous(), "grad_out", query, key, value, out, lse,
            is_causal=True, dropout_p=0.0,
        )  # fmt: skip
        return None, *found[:3]


def torch_ring(way: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: _Ring.apply(way, q, k, v)


def by_hand(axis: TimeAxis) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's differentiable all-gather of keys and values, put in the order of time, and one mask."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gathered = [
            axis.ordered(funcol.all_gather_single_autograd(x, gather_dim=2, group=dist.group.WORLD), 2)
            for x in (key, value)
        ]
        places = axis.places(query.size(2))
        mask = places[:, None] >= torch.arange(gathered[0].size(2))
        return F.scaled_dot_product_attention(query, *gathered, mask)

    return attend


def refusal() -> str:
    """Tries torch's public ``context_parallel`` with every kernel that a CPU has; returns its errors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh, said = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        buffers = [torch.randn(1, 2, 32, 8) for _ in range(3)]
        try:
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3), sdpa_kernel(kernel):
                F.scaled_dot_product_attention(*buffers, is_causal=True)
            said.append(f"{kernel.name} runs")
        except (NotImplementedError, RuntimeError) as error:
            said.append(f"{kernel.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
    return "; ".join(said)


SENDS = {"all_gather_into_tensor": "out", "reduce_scatter_tensor": "in", "all_to_all_single": "in"}
"""The collectives, and whether a rank's share of their output or of their input is sent; in a ring all of it is."""


class sent_by_torch(TorchDispatchMode):  # noqa: N801
    """Counts the bytes that this rank sends in torch's functional collectives, as plait's ledger counts its own."""

    bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind, share = func.name().rpartition("::")[2], 1 - 1 / dist.get_world_size()
        if func.name().startswith("_c10d_functional::") and kind in SENDS:
            self.bytes += {"out": out, "in": args[0]}[SENDS[kind]].nbytes * (
                1 if kind == "all_to_all_single" else share
            )
        return out
