"""plait's side, and its peers: the one module of this benchmark that knows plait.

The model, the optimizer and the batch are the peers'; a plan says how each module is cut, and the loss is plait's
cross-entropy over cut classes, as ``loss_parallel`` is torch's. While plait cannot be imported its rows are left out
and the reason is printed.
"""

from __future__ import annotations

from harness.contestants import SHARED, TRANSPORTS, Build, Contestant, adamw, comm_beside
from harness.models import Batch, Workload
from harness.report import Match
from models import MLPS
from peers import COLUMNS, ROWS, plans
from torch import Tensor, nn

PLAN = {
    "embedding": "vocabulary",
    **{f"blocks.*.{name}": "column" for name in COLUMNS},
    **{f"blocks.*.{name}": "row" for name in ROWS},
    **{f"blocks.*.{name}": "sequence" for name in ("norm1", "norm2")},
    "norm": "sequence",
    "head": "vocabulary",
}
"""In sequence parallelism the norms work on a stream that is cut in time; otherwise their style has no effect."""


MLP_PLAN = {"blocks.*.up": "column", "blocks.*.down": "row"}
FASTEST = "torch's fastest plan"


def matches(model: str, ranks: int) -> tuple[Match, ...]:
    """Ours against the fastest plan of all; sequence parallelism also against its like."""

    def goal(who: str) -> dict[str, float]:
        wanted = 1.4 if who == SHARED else 1.25
        return {"gpt256": wanted, "gpt512": wanted, "mlp16": wanted} if ranks == 2 else {}

    return tuple(
        match
        for who in TRANSPORTS
        for match in (
            Match(f"{who}-tensor", tuple(plans(model)), goal(who), FASTEST),
            Match(f"{who}-tensor", ("torch-blocks",), {}),
            Match(f"{who}-tensor", ("torch-loss",), {}),
            Match(f"{who}-tensor", ("alone",), {}),
            Match(f"{who}-sequence", tuple(plans(model)), {}, FASTEST),
            Match(f"{who}-sequence", ("torch-titan",), {}),
        )
    )


def rows(model: str) -> tuple[dict[str, Build], str]:
    """plait's contestants by name, and why there are none ("" if there are)."""
    try:
        from plait.step import Engine  # noqa: F401
    except ImportError as reason:
        return {}, f"{reason}"
    kinds = {"tensor": False} if model in MLPS else {"tensor": False, "sequence": True}
    return {f"{who}-{kind}": _row(s, who) for who in TRANSPORTS for kind, s in kinds.items()}, ""


def _row(sequence: bool, who: str) -> Build:
    def build(workload: Workload, ranks: int) -> Contestant:
        from plait.step import Engine
        from plait.table.mesh import Mesh
        from plait.tensor import cross_entropy_sum

        def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
            return cross_entropy_sum(model(batch[0]), batch[1])

        is_mlp = workload.name in MLPS
        model = workload.build()
        engine = Engine(
            model,
            comm_beside(Mesh(tensor=ranks), f"{workload.name} {sequence} {who}", shared_memory=who == SHARED),
            strategy="ddp",
            optimizer=adamw(model.parameters(), workload.learning_rate),
            loss_fn=workload.loss_sum if is_mlp else loss_sum,
            count_fn=workload.count,
            tensor_plan=MLP_PLAN if is_mlp else PLAN,
            sequence_parallel=sequence,
        )
        return Contestant(lambda batch: engine.step([batch]).loss, loss_is_global=True)

    return build
