"""Times an operator on a small tensor: almost all of its cost is dispatch.

Every operator gets a turn of ``repeats`` calls as plain tensors, as DTensors and as ShardedTensors, forward alone and
with its backward; rounds follow one another, and a ratio is formed inside a round. Before the clock starts, the
results and gradients of all kinds are compared, and messages are counted: there must be none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness.rows import Row, ratio_row
from harness.turns import Spread, no_collection, over_ranks, ratios, rotated
from operations import OPERATIONS, Distributed, Operation, Plain, Sharded, forward, forward_backward

GOAL = 0.5
"""The largest allowed share of DTensor's time."""

RUN = 10
"""Calls between two looks at the clock."""

Calls = dict[str, dict[str, Callable[[], Any]]]
"""Mode -> kind of tensor -> the call."""
Microseconds = dict[str, dict[str, dict[str, list[float]]]]
"""Operator -> mode -> kind -> a number per round."""


def seconds_per_call(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call, the slowest rank's: the median over short runs of calls, which no interruption moves."""
    for _ in range(RUN):
        call()
    seconds = []
    dist.barrier()
    for _ in range(max(1, repeats // RUN)):
        start = time.perf_counter()
        for _ in range(RUN):
            call()
        seconds.append((time.perf_counter() - start) / RUN)
    return over_ranks(statistics.median(seconds), dist.ReduceOp.MAX)


def dispatch_task(rounds: int, repeats: int) -> tuple[Microseconds, list[str]]:
    """Checks all operators on every rank, then measures them. Returns the times and the faults."""
    plain, kinds = Plain(), {"dtensor": Distributed(), "plait": Sharded()}
    problems: list[str] = []
    calls: dict[str, Calls] = {}
    for operation in OPERATIONS:
        calls[operation.name] = _calls(operation, {"torch": plain, **kinds})
        problems += _problems(operation, kinds, calls[operation.name])
    microseconds: Microseconds = {
        name: {mode: {kind: [] for kind in by_kind} for mode, by_kind in modes.items()} for name, modes in calls.items()
    }
    for turn in range(rounds):
        with no_collection():
            for name, modes in calls.items():
                for mode, by_kind in modes.items():
                    for kind in rotated(list(by_kind), turn):
                        microseconds[name][mode][kind].append(1e6 * seconds_per_call(by_kind[kind], repeats))
    return microseconds, problems


def _calls(operation: Operation, kinds: dict[str, Any]) -> Calls:
    calls: Calls = {"forward": {}, "forward + backward": {}}
    for name, kind in kinds.items():
        operands = [kind.operand(o, o.values(seed)) for seed, o in enumerate(operation.operands)]
        calls["forward"][name] = forward(operation, operands)
        seed = kind.seed(calls["forward"][name]())
        calls["forward + backward"][name] = forward_backward(operation, operands, seed)
    return calls


def _problems(operation: Operation, kinds: dict[str, Any], calls: Calls) -> list[str]:
    """Messages that are sent, and values that are not the ones of the whole tensors on one process."""
    operands = [o.values(seed).requires_grad_() for seed, o in enumerate(operation.operands)]
    result = operation.function(*operands)
    result.backward(torch.ones_like(result))
    expected = {"forward": [result.detach()], "forward + backward": [o.grad for o in operands]}
    problems = []
    for name, kind in kinds.items():
        for mode, by_kind in calls.items():
            call = by_kind[name]
            if count := kind.messages(call):
                problems.append(
                    f"!!! {operation.name}, {mode}: {name} SENDS {count} MESSAGES; its time means little !!!"
                )
            found = call()
            found = found if isinstance(found, list) else [found]
            for number, (ours, theirs) in enumerate(zip(found, expected[mode], strict=True)):
                if not torch.allclose(kind.whole(ours), theirs, rtol=1e-4, atol=1e-5):
                    problems.append(f"!!! {operation.name}, {mode}: number {number} of {name} is WRONG !!!")
    return problems


def above_torch(kinds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Dispatch alone: the time beyond torch's, in each round."""
    return {kind: [t - torch for t, torch in zip(kinds[kind], kinds["torch"], strict=True)] for kind in kinds}


def dispatch_rows(microseconds: Microseconds, ranks: int) -> list[Row]:
    """DTensor's dispatch over ours, for each operator; at most half of it is at least twice as fast."""
    rows = []
    for name, modes in microseconds.items():
        for mode, kinds in modes.items():
            above = above_torch(kinds)
            ours, theirs = ("plait", above["plait"]), ("DTensor", above["dtensor"])
            rows.append(ratio_row("dispatch", f"{name}, {mode}, {ranks} ranks", ours, theirs, "us", 1 / GOAL))
    return rows


def print_dispatch(microseconds: Microseconds) -> None:
    """One table per mode: the whole operator, and its dispatch alone, which is the time beyond torch's."""
    for mode in next(iter(microseconds.values())):
        columns = ("torch", "DTensor", "plait", "plait / DTensor", "dispatch alone", "min - max", "goal")
        print(f"\n| {mode}, microseconds | {' | '.join(columns)} |")
        print("|---|---|---|---|---|---|---|---|")
        met = met_alone = 0
        for name, modes in microseconds.items():
            kinds = modes[mode]
            share = ratios(kinds["plait"], kinds["dtensor"])
            above = above_torch(kinds)
            alone = ratios(above["plait"], above["dtensor"])
            met, met_alone = met + (share.median <= GOAL), met_alone + (alone.median <= GOAL)
            medians = " | ".join(f"{Spread.of(kinds[kind]).median:.1f}" for kind in ("torch", "dtensor", "plait"))
            verdict = f"{GOAL:.2f}: {'met' if alone.median <= GOAL else 'MISSED'}"
            spread = f"{alone.low:.2f} - {alone.high:.2f}"
            print(f"| {name} | {medians} | {share.median:.2f} | {alone.median:.2f} | {spread} | {verdict} |")
        print(
            f"\n{mode}: at most {GOAL:g} of DTensor's for {met_alone} of {len(microseconds)} operators (dispatch "
            f"alone), for {met} (the whole operator)"
        )
