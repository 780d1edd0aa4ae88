"""Times a mixture-of-experts layer over ranks: plait's two ways to send tokens against transformers' parallelism.

    python benchmarks/experts/main.py                                  # 2 ranks, 256, 1,024 and 4,096 tokens a rank
    python benchmarks/experts/main.py --ranks 4 --skew 2 --json results.json

Every contestant runs transformers' Mixtral layer, forward and backward, on the same numbers; each rank has its own
tokens and its share of the experts.  Before the clock starts the output and the gradients of inputs, router and experts
are compared with those of one process.  Exit code 1 if one of them differs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.contestants import SHARED, comm_beside
from harness.groups import launch
from harness.report import machine, passes_table
from harness.turns import over_ranks, passes_in_turns

from plait.anymodel.experts import use_expert_axis
from plait.table.mesh import Mesh
from plait.table.region import part
from plait.tensor.expert_axis import ExpertAxis, give_expert_axis

EXPERTS, CHOSEN, WIDTH, HIDDEN = 8, 2, 256, 512
TOLERANCE = 2e-5
"""Largest relative difference from one process, in fp32."""
PLAN = {"experts.gate_up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}
"""transformers' own plan of a Mixtral layer."""


@dataclass(frozen=True)
class Arguments:
    """Compare a layer of experts with transformers' on this machine."""

    ranks: int = 2
    tokens: tuple[int, ...] = (256, 1024, 4096)
    """Tokens of each rank."""
    skew: float = 0.0
    """Moves every token towards expert 0, so that its rank gets more of them."""
    kernel: Literal["eager", "grouped_mm"] = "eager"
    """transformers' code for the experts of a rank, for all contestants."""
    rounds: int = 5
    """Turns of every contestant; a ratio is formed inside each."""
    json: Path | None = None
    """The file for every number."""


def layer(kernel: str) -> MixtralSparseMoeBlock:
    """The whole layer, with the same numbers on every rank."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN}
    config = transformers.MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, **sizes)
    config._experts_implementation = kernel
    block, draw = MixtralSparseMoeBlock(config), torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data.normal_(std=parameter.size(-1) ** -0.5, generator=draw)
    return block


def keep_own_experts(block: MixtralSparseMoeBlock) -> None:
    start, stop = part(EXPERTS, dist.get_world_size(), dist.get_rank())
    for parameter in block.experts.parameters():
        parameter.data = parameter.data[start:stop].clone()


def ours(name: str, block: MixtralSparseMoeBlock) -> ExpertAxis:
    """Shares the experts of the layer by plait; returns the axis, which has the ledger."""
    ranks = dist.get_world_size()
    comm = comm_beside(Mesh(shard=ranks, expert=ranks), f"experts {name}", shared_memory=name.startswith(SHARED))
    axis = ExpertAxis(comm, all_to_all=name.endswith("all_to_all"))
    give_expert_axis([use_expert_axis(block)], axis)
    keep_own_experts(block)
    return axis


def theirs(block: MixtralSparseMoeBlock) -> None:
    """Shares the experts of the layer by transformers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(block, mesh["ep"], mesh["tp"], PLAN)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts; the backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, goes: list[int], comes: list[int]) -> Tensor:
        ctx.goes, ctx.comes = goes, comes
        arrived = rows.new_empty(sum(comes), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), comes, goes)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Exchange.apply(gradient, ctx.comes, ctx.goes), None, None


def by_hand(block: MixtralSparseMoeBlock) -> None:
    """Shares the experts of the layer by all_to_all_single: tokens, the numbers of their experts, and back."""
    keep_own_experts(block)
    ranks, run = dist.get_world_size(), block.experts.forward
    block.experts.num_experts = EXPERTS // ranks

    def forward(x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        expert_P, order_P = expert_TK.flatten().sort(stable=True)
        goes = expert_P.div(EXPERTS // ranks, rounding_mode="floor").bincount(minlength=ranks)
        comes = torch.empty_like(goes)
        dist.all_to_all_single(comes, goes)
        there, back = goes.tolist(), comes.tolist()
        rows = _Exchange.apply(x_TD[order_P // CHOSEN], there, back)
        number = _Exchange.apply(expert_P, there, back)[:, None] % (EXPERTS // ranks)
        out_PD = _Exchange.apply(run(rows, number, rows.new_ones(number.shape)), back, there)
        out_TKD = torch.empty_like(out_PD).index_copy(0, order_P, out_PD).view(*expert_TK.shape, -1)
        return (out_TKD * weight_TK[..., None]).sum(1)

    block.experts.forward = forward


def one_pass(block: MixtralSparseMoeBlock, x: Tensor, given: Tensor) -> list[Tensor]:
    """The output, and the gradients of inputs, router and experts under ``given``."""
    x = x.detach().requires_grad_()
    out = block(x)
    gradients = torch.autograd.grad(out, [x, *block.parameters()], given)
    return [out.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]


def measure(tokens: int, arguments: Arguments) -> dict[str, Any]:
    """On every rank: the contestants' errors, bytes and seconds with ``tokens`` a rank."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    names = [f"{who}-{way}" for who in ("plait", SHARED) for way in ("gather", "all_to_all")]
    blocks = {name: layer(arguments.kernel) for name in (*names, "transformers", "by hand", "one process")}
    axes = {name: ours(name, blocks[name]) for name in names}
    theirs(blocks["transformers"])
    by_hand(blocks["by hand"])
    alone = blocks["one process"]
    whole, given = torch.randn(2, ranks * tokens, WIDTH, generator=torch.Generator().manual_seed(tokens)).split(1)
    whole = whole + arguments.skew * nn.functional.normalize(alone.gate.weight[0].detach(), dim=0)
    mine = slice(rank * tokens, (rank + 1) * tokens)
    # 1. what one process computes, and this rank's part of it
    out, inputs, router, *experts = one_pass(alone, whole, given)
    own = slice(*part(EXPERTS, ranks, rank))
    due = [out[:, mine], inputs[:, mine], router, *(e[own] for e in experts)]
    # 2. errors and bytes; all tokens reach the router, whose gradient is a sum over the ranks
    owners = alone.gate(whole[0, mine])[2] // (EXPERTS // ranks)
    exchanged = int((owners != rank).sum())
    rows, counts = 4 * exchanged * WIDTH * 4, (ranks - 1) * 8
    sent = {"transformers": rows + counts * EXPERTS // ranks, "by hand": rows + counts + exchanged * 8}
    errors = {}
    for name in (*names, "transformers", "by hand"):
        found = one_pass(blocks[name], whole[:, mine], given[:, mine])
        dist.all_reduce(found[2])
        here = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, due, strict=True))
        errors[name] = over_ranks(here, dist.ReduceOp.MAX)
    sent |= {name: axis.comm.ledger.sent for name, axis in axes.items()}
    sent = {name: over_ranks(size, dist.ReduceOp.MAX) for name, size in sent.items()}
    # 3. turns; in one process the others wait
    acts = {name: partial(one_pass, block, whole[:, mine], given[:, mine]) for name, block in blocks.items()}
    acts["one process"] = partial(one_pass, alone, whole, given) if rank == 0 else lambda: None
    return {"errors": errors, "sent": sent, **passes_in_turns(acts, arguments.rounds)}


def main(arguments: Arguments) -> int:
    if arguments.ranks < 2 or EXPERTS % arguments.ranks:
        print(f"{EXPERTS} experts on {arguments.ranks} ranks: transformers cuts them evenly; choose 2, 4 or 8 ranks")
        return 2
    sizes = f"{EXPERTS} experts, {CHOSEN} for each token, width {WIDTH}, hidden {HIDDEN}, fp32, skew {arguments.skew}"
    print(
        f"{machine()}, transformers {transformers.__version__} ({arguments.kernel})\n{arguments.ranks} ranks, {sizes}"
    )
    results, wrong = {}, []
    for tokens in arguments.tokens:
        results[tokens] = launch(measure, arguments.ranks, tokens, arguments)
        print(passes_table(f"{tokens:,} tokens a rank", results[tokens], "transformers"), flush=True)
        wrong += [f"{name} at {tokens}: {e:.1e}" for name, e in results[tokens]["errors"].items() if not e <= TOLERANCE]
    if arguments.json is not None:
        asked = {"machine": machine(), "ranks": arguments.ranks, "kernel": arguments.kernel, "skew": arguments.skew}
        arguments.json.write_text(json.dumps({**asked, "sizes": sizes, "tokens": results}, indent=1) + "\n")
    print("\n".join(["", *wrong]) if wrong else "\nall agree with one process")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
