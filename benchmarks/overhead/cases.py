"""The measured cases; every function here runs inside a rank.

per unit       (a step - the plain loop's share of it) / (units on this rank x microbatches)
per operator   the same for a model with N operators, less the same for one with none, / (operators on this rank)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from clock import CLOCKS, Times, dearest, take_turns
from contestants import Contestant, ours, own_loop, plain, shared, torch_ddp, torch_fsdp2, world
from models import Model, adding, chain, pairs, scalars, stock

PLAN = (("*.up", "column"), ("*.down", "row"))
OPERATORS = 1000


@dataclass(frozen=True)
class Case:
    """A table: a model under one mesh."""

    name: str
    mesh: str
    ranks: int
    model: Model
    microbatches: int = 1
    repeats: int = 5
    """Steps of a turn."""
    what: str = "unit"


UNIT_CASES = (
    Case("linear, 1 rank", "shard=1", 1, Model("linear", chain, 100, 8)),
    Case("scalar, 1 rank", "shard=1", 1, Model("scalar", scalars, 100, 8)),
    Case("linear, 2 ranks", "shard=2", 2, Model("linear", chain, 60, 16), repeats=2),
    Case("linear, tensor=2", "tensor=2", 2, Model("pairs", pairs, 60, 16, PLAN), repeats=2),
    Case("linear, pipe=2, M=4", "pipe=2", 2, Model("linear", chain, 60, 16), microbatches=4, repeats=2),
)
OPERATOR_CASES = tuple(
    Case(f"{name}, {where}", mesh, ranks, Model(name, make, OPERATORS, 8), repeats=3, what="operator")
    for where, mesh, ranks in (
        ("1 rank", "shard=1", 1),
        ("2 ranks", "shard=2", 2),
        ("tensor=2", "tensor=2", 2),
        ("pipe=2", "pipe=2", 2),
    )
    for name, make in (("stock", stock), ("custom", adding))
)
CASES = {case.name: case for case in (*UNIT_CASES, *OPERATOR_CASES)}

Builds = dict[str, Callable[[], Contestant]]


def _unit_builds(case: Case, comm: Any) -> Builds:
    """``plain`` is subtracted from all others."""
    model, micro = case.model, case.microbatches
    if case.mesh.startswith("pipe"):
        orders = {
            f"plait zero3, {order}": lambda order=order: ours(model, comm, "zero3", micro, schedule=order)  # type: ignore[misc]
            for order in ("1f1b", "zb_h1")
        }
        return {"plain": lambda: plain(model, micro), **orders}
    if case.mesh.startswith("tensor"):
        plan = dict(model.plan)
        return {
            "plain": lambda: plain(model),
            "plait ddp": lambda: ours(model, comm, "ddp", tensor_plan=plan),
            "plait zero3": lambda: ours(model, comm, "zero3", tensor_plan=plan),
        }
    return {
        "plain": lambda: plain(model),
        "torch DDP": lambda: torch_ddp(model),
        "torch FSDP2": lambda: torch_fsdp2(model),
        "plait ddp": lambda: ours(model, comm, "ddp"),
        "plait ddp, own loop": lambda: own_loop(model, comm, "ddp"),
        **({} if case.ranks == 1 else {"plait zero1": lambda: ours(model, comm, "zero1")}),
        "plait zero3": lambda: ours(model, comm, "zero3"),
        "plait zero3, own loop": lambda: own_loop(model, comm, "zero3"),
        **_in_shared_memory(case),
    }


def _in_shared_memory(case: Case) -> Builds:
    if case.ranks == 1:
        return {}
    comm = shared(case.mesh)
    return {f"plait/shm {row}": lambda row=row: ours(case.model, comm, row) for row in ("ddp", "zero1", "zero3")}  # type: ignore[misc]


def _beyond_plain(times: Times, name: str, plain_name: str, here: float, divisor: float) -> dict[str, list[float]]:
    """What a contestant takes beyond the plain loop's share ``here``, by each clock, the dearest rank's."""
    found = {}
    for clock in CLOCKS:
        rounds = zip(times[name][clock], times[plain_name][clock], strict=True)
        found[clock] = dearest([(mine - here * theirs) / divisor for mine, theirs in rounds])
    return found


def task(names: list[str], rounds: int) -> dict[str, Any]:
    """On every rank: the cases of one mesh, in one process group."""
    cases = [CASES[name] for name in names]
    comm = world(cases[0].mesh)
    return {case.name: (_operators if case.what == "operator" else _units)(case, comm, rounds) for case in cases}


def _units(case: Case, comm: Any, rounds: int) -> dict[str, Any]:
    """Microseconds per unit and step, and the losses of the first steps."""
    built = {name: build() for name, build in _unit_builds(case, comm).items()}
    losses = {name: [contestant.step() for _ in range(3)] for name, contestant in built.items()}
    times = take_turns({name: c.step for name, c in built.items()}, rounds, case.repeats)
    here = 0.5 if case.mesh.startswith("pipe") else 1.0
    divisor = case.model.size * here * case.microbatches
    rows = {name: _beyond_plain(times, name, "plain", here, divisor) for name in built if name != "plain"}
    plain_loop = {clock: [v / case.model.size / case.microbatches for v in times["plain"][clock]] for clock in CLOCKS}
    return {"rows": {"plain": plain_loop, **rows}, "losses": losses}


def _without(times: Any, who: str, mode: str) -> dict[str, list[float]]:
    """The model with operators, less the one that has none."""
    return {
        clock: [a - b for a, b in zip(times[who, True, mode][clock], times[who, False, mode][clock], strict=True)]
        for clock in CLOCKS
    }


def _operators(case: Case, comm: Any, rounds: int) -> dict[str, Any]:
    """Microseconds per operator, in a training step and in an evaluation."""
    split = case.mesh.startswith("pipe")
    names: dict[str, dict[str, Any]] = {"plait zero3": {}}
    if split:
        names = {f"plait zero3, {order}": {"schedule": order} for order in ("1f1b", "zb_h1")}
    if case.mesh.startswith("tensor"):
        linears = ("0.linear", "1.linear") if case.model.name == "custom" else ("0", "2")
        names = {"plait zero3": {"tensor_plan": dict(zip(linears, ("column", "row"), strict=True))}}
    built = {}
    for many in (True, False):
        model = case.model if many else replace(case.model, size=0)
        built["plain", many] = plain(model)
        for name, options in names.items():
            built[name, many] = ours(model, comm, "zero3", **options)
    losses = {f"{name}, {many}": [contestant.step() for _ in range(3)] for (name, many), contestant in built.items()}
    calls = {(name, many, "step"): contestant.step for (name, many), contestant in built.items()}
    calls |= {(name, many, "evaluate"): c.evaluate for (name, many), c in built.items() if c.evaluate is not None}
    times = take_turns(calls, rounds, case.repeats)
    here = 0.5 if split else 1.0
    rows = {}
    for mode in ("step", "evaluate"):
        for name in ("plain", *names):
            beyond = {who: _without(times, who, mode) for who in ("plain", name)}
            if name == "plain":
                rows[f"plain: {mode}"] = {c: [v / OPERATORS for v in beyond["plain"][c]] for c in CLOCKS}
            else:
                rows[f"{name}: {mode}"] = _beyond_plain(beyond, name, "plain", here, OPERATORS * here)
    return {"rows": rows, "losses": losses}
