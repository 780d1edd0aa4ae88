"""plait's rows, and the peer of each.

The one module of this benchmark that knows plait. A contestant of plait is a *row of the table*: the model,
the optimizer and the loss are the ones the peers train; only the word ``strategy`` differs.
While ``plait.step`` cannot be imported the rows are left out and the reason is printed.
"""

from __future__ import annotations

from harness.contestants import COMPILED, SHARED, TRANSPORTS, Build, Contestant, adamw, comm_beside
from harness.models import Workload
from harness.report import Match
from peers import DDP_VARIANTS

ROWS = ("ddp", "zero1", "zero2", "zero3")

EVEN = {"mlp4": 1.0, "mlp16": 1.0, "gpt256": 1.0}
FEWER = {"mlp4": 1.5, "mlp16": 1.5, "gpt256": 1.15}
SHARED_EVEN = {"mlp4": 1.35, "mlp16": 1.35, "gpt256": 1.0}
SHARED_FEWER = {"mlp4": 3.5, "mlp16": 3.5, "gpt256": 1.25}
OF_LOCAL = {
    "ddp": {"mlp4": 0.88, "mlp16": 0.88, "gpt256": 0.97},
    "zero1": {"mlp4": 0.88, "mlp16": 0.88, "gpt256": 0.97},
    "zero3": {"mlp4": 0.95, "mlp16": 0.95, "gpt256": 0.97},
}
"""The goal against ranks that never talk, over shared memory."""
DDP = "fastest DDP"


def _matches(who: str) -> tuple[Match, ...]:
    shared, ddp = who == SHARED, tuple(DDP_VARIANTS)
    even, fewer = (SHARED_EVEN, SHARED_FEWER) if shared else (EVEN, FEWER)
    return (
        Match(f"{who}-ddp", ddp, even, DDP),
        Match(f"{who}-zero1", ddp, even, DDP),
        Match(f"{who}-zero1", ("redundancy",), {}),
        Match(f"{who}-zero2", ("fsdp2",), {}),
        Match(f"{who}-zero3", ("fsdp2",), fewer),
        *(Match(f"{who}-{row}", ("local",), goal) for row, goal in OF_LOCAL.items() if shared),
    )


MATCHES = tuple(match for who in TRANSPORTS for match in _matches(who))
MATCHES += (
    Match(f"{COMPILED}-ddp", ("ddp/compiled",), {"gpt256": 1.0}),
    Match(f"{COMPILED}-zero1", ("ddp/compiled",), {}),
    Match(f"{COMPILED}-zero2", ("fsdp2/compiled",), {}),
    Match(f"{COMPILED}-zero3", ("fsdp2/compiled",), {"gpt256": 1.2}),
)
MATCHES += tuple(Match(f"{COMPILED}-{row}", (f"plait-{row}",), {}) for row in ("ddp", "zero3"))


def rows() -> tuple[dict[str, Build], str]:
    """plait's contestants by name, and why there are none ("" if there are)."""
    try:
        from plait.comm.process import ProcessComm  # noqa: F401
        from plait.step import Engine  # noqa: F401
    except ImportError as reason:
        return {}, f"{reason}"
    ours = {f"{who}-{row}": _row(row, who) for who in TRANSPORTS for row in ROWS}
    ours |= {f"{COMPILED}-{row}": _row(row, COMPILED) for row in ROWS}
    return ours, ""


def _row(strategy: str, who: str) -> Build:
    def build(workload: Workload, ranks: int) -> Contestant:
        from plait.step import Engine
        from plait.table.mesh import Mesh

        model = workload.build()
        engine = Engine(
            model,
            comm_beside(Mesh(shard=ranks), f"{workload.name} {strategy} {who}", shared_memory=who == SHARED),
            strategy=strategy,
            optimizer=adamw(model.parameters(), workload.learning_rate),
            loss_fn=workload.loss_sum,
            count_fn=workload.count,
            clip=None,
            seed=0,
            compile=who == COMPILED,
        )

        return Contestant(lambda batch: engine.step([batch]).loss, loss_is_global=True)

    return build
