"""Says how far an answer to a puzzle is off: in elements and bits, in bytes, and in a schedule's idle time.

Each function returns lines of text, and none where the answer holds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import plait
from plait.schedule.actions import Action, count_stages, parse_schedule
from plait.schedule.check import check
from plait.schedule.simulate import Costs, simulate


def off(what: str, found: object, expected: Tensor, most: float = 0.0) -> list[str]:
    """Compares whole tensors: equal to the bit, or within ``most``."""
    if not isinstance(found, Tensor):
        return [f"{what}: {type(found).__name__}, where a tensor of shape {tuple(expected.shape)} is expected"]
    if found.shape != expected.shape:
        return [f"{what}: shape {tuple(found.shape)}, where {tuple(expected.shape)} is expected"]
    gap = (found.detach() - expected.detach()).abs()
    wrong = int((~(gap <= most)).sum())  # NaN is wrong too
    if not wrong:
        return []
    largest, whole = gap.max().item(), expected.abs().max().item()
    bits = 1 - round(math.log2(torch.finfo(expected.dtype).eps))
    agree = min(bits, max(0, math.floor(math.log2(whole / largest)))) if 0 < largest < math.inf and whole else 0
    why = " (rounding, as after additions in another order)" * (agree >= bits - 4)
    how = f"{wrong} of {gap.numel()} elements are wrong, by up to {largest:.1e}; {agree} of {bits} bits agree"
    return [f"{what}: {how}{why}"]


def over(what: str, amount: float, target: float, unit: str = "bytes") -> list[str]:
    """Compares an amount with the most that it may be."""
    return [f"{what} {amount:,g} {unit}, {amount - target:,g} more than {target:,g}"] if amount > target else []


class Alive:
    """Counts the tensors whose memory is still in use, views and those that autograd saved included."""

    def __init__(self) -> None:
        self._seen: list[StorageWeakRef] = []
        self.most = 0

    def add(self, tensor: Tensor) -> Tensor:
        """Counts a tensor from now on until its memory is freed; ``most`` is the largest count."""
        self._seen = [seen for seen in self._seen if not seen.expired()]
        self._seen.append(StorageWeakRef(tensor.untyped_storage()))
        self.most = max(self.most, len(self._seen))
        return tensor


def schedule(text: str, ranks: int, microbatches: int | None, idle: float, held: Sequence[int] | None) -> list[str]:
    """Proves a schedule, times it (a forward and each half of a backward take one tick) and trains with it."""
    try:
        actions = parse_schedule(text)
        proof = check(actions, num_stages=ranks, num_microbatches=microbatches)
    except ValueError as error:
        return [f"the schedule is refused: {error}"]
    if len(actions) != ranks or proof.owner != tuple(range(ranks)):
        return [f"{len(actions)} ranks with stages {list(proof.owner)}: give a line for each of {ranks} ranks"]
    share = simulate(actions, Costs()).idle_share()
    problems = over("ranks are idle for", round(100 * share, 2), round(100 * idle, 2), "% of the time")
    for rank, (most, target) in enumerate(zip(proof.peaks, held or proof.peaks, strict=True)):
        problems += over(f"rank {rank} holds", most, target, "activations at once")
    return problems + trained(actions, proof.num_microbatches)


def trained(actions: tuple[tuple[Action, ...], ...], microbatches: int) -> list[str]:
    """Makes a step of SGD by a schedule on ranks, and in one process that adds the microbatches in order."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages, x = count_stages(actions), torch.randn(4 * microbatches, 8)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(stages)))
    whole = copy.deepcopy(model)
    for part in x.chunk(microbatches):
        loss = (whole(part) - part.flip(1)).square().sum()
        loss.backward(torch.full_like(loss, 1 / len(x)))

    def body(comm: plait.Comm) -> dict[str, Tensor]:
        ours = copy.deepcopy(model)
        loss = {"loss_fn": lambda net, b: (net(b) - b.flip(1)).square().sum(), "count_fn": len}
        optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
        engine = plait.Engine(ours, comm, strategy="ddp", schedule=actions, optimizer=optimizer, **loss)
        engine.step(x.chunk(microbatches))
        return engine.full_state_dict()

    state = plait.run_threads(f"pipe={stages}", body)[0]
    expected = {name: p.detach() - p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return [line for name, value in expected.items() for line in off(name, state[name], value)]
