"""One model under one layout against plain PyTorch on one process: a word, and the reason.

bitwise     every loss and every parameter after the last step is the same number
equal       within ``TOLERANCE`` of it (everything is fp64)
refused     plait raised an error of its own, in a line that says ``raise``
wrong       any other numbers
crash       an error of torch or Python, which plait has not raised
unknown     plain PyTorch itself does not give the same numbers twice
"""

from __future__ import annotations

import copy
import linecache
import math
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from catalogue import SIZES, Batches, NotBuiltError, count, first_line, leading, logits_of
from torch import Tensor, nn
from wide import wide

import plait
from plait import anymodel
from plait.comm import Comm
from plait.referee.verify.record import irregular, predict, unlike, unpredicted

STEPS = 2
TOLERANCE = 1e-10
"""The allowed difference, relative to the largest element of the tensor (or to 1, for small tensors)."""
OPTIMIZER = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
SAID = (ValueError, TypeError, NotImplementedError, FloatingPointError, LookupError)
"""Classes of plait's own refusals; an assertion that fails is a crash."""
DEADLINE = 120.0

Order = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """A mesh, a row, and the order in which they add gradients: groups of microbatches, and then these."""

    mesh: str
    strategy: str
    order: Order
    settings: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """It adds in an order that plain PyTorch cannot use, so fp32 inside of the model would hide faults."""

    @property
    def shape(self) -> plait.Mesh:
        return plait.Mesh.parse(self.mesh)


LAYOUTS = {
    "ddp": Layout("shard=3", "ddp", ((0, 1), (2, 3), (4, 5))),
    "zero3": Layout("shard=3", "zero3", ((0, 2, 4), (1, 3, 5))),
    "pipe": Layout("pipe=2 shard=2", "zero3", ((0, 3), (1, 4), (2, 5)), wide=True),
    "tensor": Layout("tensor=2", "ddp", ((0, 1, 2, 3, 4, 5),), wide=True),
}


PEER = "fsdp2"
"""torch's own FSDP2, in addition to our layouts."""


@dataclass
class Result:
    """The result of one layout."""

    word: str
    why: str = ""
    difference: float = 0.0
    ledger: list[str] = field(default_factory=list)
    """Messages that were not as predicted; the first few."""
    once: bool = True
    """False if gathers were not compared: those of units that ``plait.referee.verify.record.irregular`` names."""
    seconds: float = 0.0
    traceback: str = ""


@dataclass
class Run:
    """The losses of all steps, and the parameters after the last."""

    losses: list[float]
    parameters: dict[str, Tensor]
    ledger: list[str] = field(default_factory=list)
    once: bool = True


def loss_sum(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return plait.cross_entropy_sum(logits_of(model, batch["inputs"]), batch["targets"])


def plain(model: nn.Module, batches: Batches, order: Order) -> Run:
    """A plain loop: backward of each microbatch, the gradients added in this order, a step."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    losses = []
    for step in range(STEPS):
        made = [batches.microbatch(step, index) for index in range(len(SIZES))]
        total = sum(map(count, made))
        whole: dict[str, Tensor] = {}
        loss_of_step = 0.0
        for group in order:
            optimizer.zero_grad()
            for index in group:
                logits, targets = logits_of(model, made[index]["inputs"]), made[index]["targets"]
                loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
                if loss.requires_grad:
                    loss.backward(torch.full_like(loss, 1 / total))
                loss_of_step += loss.item()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    whole[name] = whole[name] + parameter.grad if name in whole else parameter.grad.clone()
        for name, parameter in model.named_parameters():
            parameter.grad = whole.get(name)
        optimizer.step()
        losses.append(loss_of_step / total)
    return Run(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def ours(model: nn.Module, batches: Batches, layout: Layout) -> Run:
    """The same steps on threads, by ``engine.step``."""
    size = layout.shape.data_size
    num = len(SIZES) // size
    copies = [copy.deepcopy(model) for _ in range(layout.shape.size)]

    def body(comm: Comm) -> Run:
        mine = copies[comm.rank]
        optimizer = torch.optim.SGD(mine.parameters(), **OPTIMIZER)
        plan = {"tensor_plan": anymodel.plan_of(mine)} if comm.mesh.tensor > 1 else {}
        engine = plait.Engine(
            mine, comm, strategy=layout.strategy, optimizer=optimizer, loss_fn=loss_sum, count_fn=count,
            **layout.settings, **plan,
        )  # fmt: skip
        losses, ledger, once = [], [], True
        first = comm.data_rank * num
        for step in range(STEPS):
            made = [batches.microbatch(step, first + m) for m in range(num)]
            checks = step == 0 or engine.placed.p2p.learns_from(made)
            skipped = ("sanitize", "setup") if checks else ("sanitize",)
            mark = len(comm.ledger)
            losses.append(engine.step(made).loss)
            job = SimpleNamespace(width=0, leading=leading, one_stream=False, dtype=torch.float64)
            sent = [e for e in comm.ledger.since(mark) if e.note.phase not in {*skipped, *unpredicted(job, engine)}]
            runs = irregular(engine, num)
            ledger += unlike(predict(engine, job, made), sent, runs)
            once = once and not runs
        return Run(losses, engine.full_state_dict(), ledger, once)

    runs = plait.run_threads(layout.mesh, body, deadline=DEADLINE)
    for other in runs[1:]:
        if other.losses != runs[0].losses or any(
            not torch.equal(value, other.parameters[name]) for name, value in runs[0].parameters.items()
        ):
            raise AssertionError("ranks end with different losses or parameters")
    once = all(run.once for run in runs)
    return Run(runs[0].losses, runs[0].parameters, [line for run in runs for line in run.ledger], once)


def compare(run: Run, expected: Run) -> Result:
    """The distance of a run from the plain one."""
    worst, where = 0.0, ""
    for step, (mine, theirs) in enumerate(zip(run.losses, expected.losses, strict=True)):
        worst, where = max(
            (worst, where), (_off(torch.tensor(mine), torch.tensor(theirs), 1.0), f"loss of step {step}")
        )
    for name, value in expected.parameters.items():
        worst, where = max((worst, where), (_off(run.parameters[name], value, 1e-3), name))
    if worst > TOLERANCE:
        return Result("wrong", f"{where} is off by {worst:.2g}", worst, run.ledger, run.once)
    # the losses' sums are added in an order of their own
    same = all(torch.equal(run.parameters[name], value) for name, value in expected.parameters.items())
    return Result("bitwise" if same else "equal", "", worst, run.ledger, run.once)


def _off(mine: Tensor, theirs: Tensor, least: float) -> float:
    """The largest difference, relative to the largest element or to ``least``."""
    if not mine.numel():
        return 0.0
    off = ((mine - theirs).abs().max() / theirs.abs().max().clamp(min=least)).item()
    return math.inf if math.isnan(off) else off


def judged(error: BaseException) -> Result:
    """A refusal if plait has raised it on purpose, otherwise a crash."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    ours = last is not None and str(Path(plait.__file__).parent) in last.filename
    said = (
        ours
        and isinstance(error, SAID)
        and linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")
    )
    text = "".join(traceback.format_exception(error))[-4000:]
    if said:
        return Result("refused", first_line(error), traceback=text)
    return Result("crash", f"{type(error).__name__}: {first_line(error)}", traceback=text)


class Trial:
    """One model, and the plain runs that its layouts are compared with."""

    def __init__(self, model: nn.Module, batches: Batches) -> None:
        self.model, self.batches = model, batches
        self._plain: dict[tuple[Order, bool], Run] = {}

    def expected(self, order: Order, *, wide: bool = False) -> Run:
        if (order, wide) not in self._plain:
            self._plain[order, wide] = plain(self.model, self.batches, order)
        return self._plain[order, wide]

    def check(self) -> None:
        """Raises ``NotBuiltError`` where the model does not train on one process."""
        try:
            first = self.expected(LAYOUTS["ddp"].order)
        except Exception as error:
            raise NotBuiltError(f"on one process, {type(error).__name__}: {first_line(error)}") from error
        values = [*first.parameters.values(), torch.tensor(first.losses)]
        if not all(bool(value.isfinite().all()) for value in values):
            raise NotBuiltError("on one process, the loss or a parameter is not finite")

    def run(self, name: str) -> Result:
        """The verdict on a layout of ``LAYOUTS``, or on ``PEER``."""
        if name in LAYOUTS and LAYOUTS[name].wide:
            with wide():  # a router that casts itself to fp32 has done so when its batches were tried
                return Trial(copy.deepcopy(self.model).double(), self.batches)._run(name, wide=True)
        return self._run(name, wide=False)

    def _run(self, name: str, *, wide: bool) -> Result:
        start = time.perf_counter()
        try:
            if name == PEER:
                from fsdp2 import ORDER, fsdp2

                order, run = ORDER, fsdp2(self.model, self.batches)
            else:
                order, run = LAYOUTS[name].order, ours(self.model, self.batches, LAYOUTS[name])
            expected = self.expected(order, wide=wide)
            result = compare(run, expected)
            if result.word == "wrong" and compare(plain(self.model, self.batches, order), expected).word == "wrong":
                result = Result("unknown", "two runs on one process differ, for the model draws random numbers")
        except Exception as error:
            result = judged(error) if name != PEER else Result("fails", first_line(error))
        result.ledger = result.ledger[:6]
        result.seconds = round(time.perf_counter() - start, 2)
        return result
