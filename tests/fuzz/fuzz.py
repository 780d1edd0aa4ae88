"""Random models under random layouts and loops against plain PyTorch; each is right, or plait refuses it.

python tests/fuzz/fuzz.py 0 200          seeds 0 to 199, one JSON line each
python tests/fuzz/fuzz.py 17 --show      seed 17, with its traceback

right      every loss, parameter and buffer of three steps, within 1e-9 (1e-7 with an fp32 parameter)
refused    an error that plait raises itself, of a type meant for users
invalid    plain PyTorch fails as well
wrong      another number
unclear    any other error
"""

import argparse
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from random_models import VOCABULARY, Drawn, drawn

import plait
from plait.schedule.orders import ORDERS
from plait.table.mesh import Mesh

Verdict = Literal["right", "refused", "invalid", "wrong", "unclear"]
STEPS = 3
CLEAR = (ValueError, TypeError, NotImplementedError, FloatingPointError)
HERE = str(Path(plait.__file__).parent)

Batch = tuple[Tensor, Tensor]


class Layout(NamedTuple):
    mesh: str
    settings: dict[str, Any]
    optimizer: str
    clip: float | None
    loop: Literal["step", "own"]
    microbatches: int


class Outcome(NamedTuple):
    seed: int
    verdict: Verdict
    seconds: float
    parts: tuple[str, ...]
    layout: Layout
    reason: str


def drawn_layout(seed: int) -> Layout:
    draw = random.Random(-1 - seed)
    mesh = draw.choice(["shard=2", "shard=3", "replica=2", "replica=2 shard=2", "shard=1", "pipe=2", "pipe=2 shard=2"])
    row = draw.choice([*plait.TABLE] + ["zero3"] * 4)
    settings: dict[str, Any] = {"strategy": row, "prefetch": draw.choice([0, 1, 2])}
    microbatches = draw.choice([1, 2, 3])
    if draw.random() < 0.2:
        settings["strategy"] = plait.TABLE[row].offloaded()
    if draw.random() < 0.25:
        settings["cut"] = "tensor"
    if draw.random() < 0.25:
        settings["recompute"] = "full"
    if "pipe" in mesh:
        settings["schedule"] = draw.choice(list(ORDERS))
        settings |= {"chunks": 2} if settings["schedule"] == "interleaved" else {}
        settings |= {"hold": None} if draw.random() < 0.3 else {}
        microbatches = draw.choice([2, 4, 5])
    loop: Literal["step", "own"] = "step" if "pipe" in mesh or draw.random() < 0.5 else "own"
    clip = draw.choice([None, None, 0.5, math.inf])
    return Layout(mesh, settings, draw.choice(["sgd", "adamw", "groups"]), clip, loop, microbatches)


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
    wide = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "lr": 0.002}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, eps=1e-3)


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])[:, : batch[1].shape[1]]
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch[1], reduction="sum", ignore_index=-100)
    return loss


def with_auxiliary(model: nn.Module, batch: Batch) -> Tensor:
    """As mixtures of experts do it."""
    loss = loss_sum(model, batch)
    for module in model.modules():
        if getattr(module, "auxiliary", None) is not None:
            loss = loss + module.auxiliary
    return loss


def loss_of(model: Drawn) -> Callable[[nn.Module, Batch], Tensor]:
    return with_auxiliary if "auxiliary" in model.parts[0] else loss_sum


def count(batch: Batch) -> int:
    return int((batch[1] != -100).sum())


def batches(seed: int, tokens: bool, parts: int) -> Iterator[list[Batch]]:
    """For each step the microbatches of all data ranks, ragged in samples and in targets, none empty."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        sizes = (1 + torch.randint(3, (parts,), generator=generator)).tolist()
        made = []
        for size in sizes:
            x = torch.randint(VOCABULARY, (size, 5), generator=generator)
            y = torch.randint(VOCABULARY, (size, 5), generator=generator)
            y[torch.rand(size, 5, generator=generator) < 0.3] = -100
            made.append((x if tokens else torch.randn(size, 5, 4, generator=generator, dtype=torch.float64), y))
        made[0][1][0, 0] = 1  # one target at least
        yield made


State = tuple[list[float], dict[str, Tensor]]


def alone(seed: int, model: Drawn, layout: Layout, parts: int) -> State:
    """One process, autograd and torch's optimizer."""
    net, loss_fn = model.build(), loss_of(model)
    optimizer, losses = optimizer_of(layout.optimizer, net), []
    for step in batches(seed, model.tokens, parts):
        number, total = sum(map(count, step)), 0.0
        for batch in step:
            loss = loss_fn(net, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= number
        if layout.clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), layout.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / number)
    return losses, net.state_dict()


def on_ranks(seed: int, model: Drawn, layout: Layout, mesh: Mesh) -> list[State]:
    loss_fn = loss_of(model)
    nets = [model.build() for _ in range(mesh.size)]  # torch's generator is the process's, so not in threads

    def body(comm: plait.Comm) -> State:
        net = nets[comm.rank]
        optimizer, losses = optimizer_of(layout.optimizer, net), []
        functions = {"loss_fn": loss_fn, "count_fn": count} if layout.loop == "step" else {}
        engine = plait.Engine(net, comm, optimizer=optimizer, clip=layout.clip, **functions, **layout.settings)
        first = mesh.data_rank(comm.rank) * layout.microbatches
        for step in batches(seed, model.tokens, mesh.data_size * layout.microbatches):
            mine = step[first : first + layout.microbatches]
            if layout.loop == "step":
                losses.append(engine.step(mine).loss)
                continue
            for batch in mine:
                engine.backward(loss_fn(net, batch), count(batch))
            optimizer.step()
            optimizer.zero_grad()
            assert engine.last is not None
            losses.append(engine.last.loss)
        return losses, engine.full_state_dict()

    return plait.run_threads(mesh, body, deadline=30)


def difference(ours: State, theirs: State) -> str:
    """The first that differs; "" if nothing does."""
    # the sum of an fp32 parameter's gradient is rounded, in an order of its own, and later steps build on it
    wide = 1e-7 if any(value.dtype == torch.float32 for value in theirs[1].values()) else 1e-9
    for step, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if not abs(a - b) <= wide * max(1, abs(b)):
            return f"the loss of step {step} is {a!r}, not {b!r}"
    if ours[1].keys() != theirs[1].keys():
        return f"names {sorted(ours[1].keys() ^ theirs[1].keys())}"
    for name, b in theirs[1].items():
        a = ours[1][name]
        close = wide if b.dtype == torch.float64 else 1e-5
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
        if b.numel() and not (a - b).abs().max() <= close * max(1.0, b.abs().max().item()):
            return f"{name} differs by {(a - b).abs().max().item():.3g}"
    return ""


def try_seed(seed: int, *, show: bool = False) -> Outcome:
    layout = drawn_layout(seed)
    model = drawn(seed, at_least=4 if "pipe" in layout.mesh else 1)
    mesh = Mesh.parse(layout.mesh)
    try:
        theirs = alone(seed, model, layout, mesh.data_size * layout.microbatches)
    except Exception as error:
        return Outcome(seed, "invalid", 0, model.parts, layout, repr(error))
    start = time.monotonic()

    def outcome(verdict: Verdict, reason: str = "") -> Outcome:
        return Outcome(seed, verdict, round(time.monotonic() - start, 2), model.parts, layout, reason)

    try:
        states = on_ranks(seed, model, layout, mesh)
    except Exception as error:
        if show:
            traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {error} ({last.filename.removeprefix(HERE)}:{last.lineno})"
        return outcome("refused" if isinstance(error, CLEAR) and last.filename.startswith(HERE) else "unclear", reason)
    for rank, ours in enumerate(states):
        if reason := difference(ours, theirs):
            return outcome("wrong", f"rank {rank}: {reason}")
    return outcome("right")


def main() -> None:
    """Tries the seeds of the command line."""
    parser = argparse.ArgumentParser(description="fuzz plait with random models")
    parser.add_argument("first", type=int)
    parser.add_argument("stop", type=int, nargs="?")
    parser.add_argument("--show", action="store_true", help="the traceback of what is refused or unclear")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(arguments.first, arguments.stop or arguments.first + 1):
        print(json.dumps({"began": seed}), flush=True)
        print(json.dumps(try_seed(seed, show=arguments.show)._asdict(), default=str), flush=True)


if __name__ == "__main__":
    main()
