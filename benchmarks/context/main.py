"""Times attention over a context axis: plait's gather and ring against torch's, as samples grow.

    python benchmarks/context/main.py                                  # 2 ranks, 256 to 8,192 steps
    python benchmarks/context/main.py --ranks 4 --lengths 256 1024 4096 --json results.json

Every contestant computes one causal attention, forward and backward, of the same numbers.  Before the clock starts its
result and its gradients are compared with those of one process.  Exit code 1 if one of them differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.contestants import SHARED, comm_beside
from harness.groups import launch
from harness.report import machine, passes_table
from harness.turns import over_ranks, passes_in_turns
from peers import TORCH_WAYS, by_hand, refusal, sent_by_torch, torch_ring

from plait.table.mesh import Mesh
from plait.tensor.time_axis import TimeAxis

HEADS, HEAD = 2, 64
TOLERANCE = 2e-5
"""Largest relative difference from one process, in fp32."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Arguments:
    """Compare attention over a context axis with torch's on this machine."""

    ranks: int = 2
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    """Steps of time of the whole sample."""
    rounds: int = 5
    """Turns of every contestant; a ratio is formed inside each."""
    json: Path | None = None
    """The file for every number."""


def ours(name: str, ranks: int) -> tuple[Attend, TimeAxis]:
    """plait's attention, and the axis that has its ledger."""
    who, _, kind = name.rpartition("-")
    mesh = Mesh(shard=ranks, context=ranks)
    axis = TimeAxis(comm_beside(mesh, f"context {name}", shared_memory=who == SHARED), ring=kind == "ring")
    return axis.attention, axis


def parts(axis: TimeAxis, whole: tuple[Tensor, ...]) -> list[Tensor]:
    return [axis.cut(x, 2) for x in whole]


def one_pass(attend: Attend, mine: list[Tensor]) -> list[Tensor]:
    """The result and the gradients of query, key and value; the last of ``mine`` is the result's gradient."""
    *inputs, given = [x.detach().requires_grad_(i < 3) for i, x in enumerate(mine)]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, given)]


def measure(length: int, rounds: int) -> dict[str, Any]:
    """On every rank: the contestants' errors, bytes and seconds at one length."""
    ranks = dist.get_world_size()
    draw = torch.Generator().manual_seed(length)
    whole = tuple(torch.randn(1, HEADS, length, HEAD, generator=draw) for _ in range(4))
    attends: dict[str, Attend] = {}
    axes: dict[str, TimeAxis] = {}
    for who in ("plait", SHARED):
        for kind in ("gather", "ring"):
            attends[f"{who}-{kind}"], axes[f"{who}-{kind}"] = ours(f"{who}-{kind}", ranks)
    axis = axes["plait-gather"]
    attends |= {f"torch-{way}": torch_ring(way) for way in TORCH_WAYS} | {"by hand": by_hand(axis)}
    mine = parts(axis, whole)
    for other in axes.values():
        other.cut(whole[0], 2)  # so that it knows the length
    one = partial(F.scaled_dot_product_attention, is_causal=True)
    right = one_pass(one, list(whole))
    due = parts(axis, tuple(right))
    errors, sent = {}, {}
    for name, attend in attends.items():
        mark = len(axes[name].comm.ledger) if name in axes else 0
        with sent_by_torch() as by_torch:
            found = one_pass(attend, mine)
        here = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, due, strict=True))
        errors[name] = over_ranks(here, dist.ReduceOp.MAX)
        entries = axes[name].comm.ledger.since(mark) if name in axes else ()
        sent[name] = sum(e.sent for e in entries) if name in axes else by_torch.bytes
    acts = {name: partial(one_pass, attend, mine) for name, attend in attends.items()}
    acts["one process"] = partial(one_pass, one, list(whole)) if dist.get_rank() == 0 else lambda: None
    return {"errors": errors, "sent": sent, **passes_in_turns(acts, rounds)}


def main(arguments: Arguments) -> int:
    print(machine(), f"\n{arguments.ranks} ranks, {HEADS} heads of {HEAD}, one sample, fp32")
    print(f"torch's context_parallel here: {launch(refusal, arguments.ranks)}")
    results, wrong = {}, []
    for length in arguments.lengths:
        results[length] = launch(measure, arguments.ranks, length, arguments.rounds)
        print(passes_table(f"{length:,} steps", results[length], "torch"), flush=True)
        wrong += [f"{name} at {length}: {e:.1e}" for name, e in results[length]["errors"].items() if e > TOLERANCE]
    if arguments.json is not None:
        asked = {"machine": machine(), "ranks": arguments.ranks, "heads": HEADS, "head": HEAD}
        arguments.json.write_text(json.dumps({**asked, "lengths": results}, indent=1) + "\n")
    print("\n".join(["", *wrong]) if wrong else "\nall agree with one process")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
