"""Cases of the judge: a job of samples of their own, and a loop of one process under a witness."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.referee.witness.judgement import Judgement

Batch = tuple[Tensor, ...]
Body = Callable[[nn.Module, Any, int], None]
WIDTH = 8


def batch(step: int) -> Batch:
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sin()


def squares(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(batch[0]) - batch[1]).square().sum()
    return loss


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Linear(16, WIDTH))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def judged(
    path: Path,
    body: Body | None = None,
    *,
    gradient: Callable[[nn.Module, int], object] | None = None,
    change: Callable[[Any], object] = lambda model: None,
    sizes: int | list[int] | None = None,
    scale: float = 1.0,
    build: Callable[[], nn.Module] = net,
    loss: Callable[[nn.Module, Batch], Tensor] = squares,
    batches: Callable[[int], Batch] = batch,
    optimizer: Callable[[Any], Any] = adamw,
    optimizers: Callable[[nn.Module], Any] | None = None,
    steps: int = 3,
    witnessed: int = 10,
    due: int | None = None,
    seed: int = 1,
    **settings: Any,
) -> Judgement:
    """The judgement of a loop of one process.

    Args:
        body: its step; None: a gradient, a change, and the update.
        gradient: makes the gradient of a step; None: the plain one.
        change: what a step does between backward and update.
        sizes: of the forwards of the plain gradient; None: one of the whole batch.
        scale: of the losses of the plain gradient.
    """

    def plain(model: nn.Module, step: int) -> None:
        whole = batches(step)
        for part in zip(*(x.split(sizes or len(x)) for x in whole), strict=True):
            (loss(model, part) * scale / whole[1].numel()).backward()

    job = plait.UserJob(build, loss, batches, lambda b: b[1].numel(), optimizer)
    torch.manual_seed(seed)
    model = build()
    own = optimizers(model) if optimizers else optimizer(model.parameters())
    with plait.witness(model, own, path / "w", steps=witnessed):
        for step in range(steps):
            if body is not None:
                body(model, own, step)
                continue
            (gradient or plain)(model, step)
            change(model)
            own.step()
            own.zero_grad()
    return plait.judge(job, path / "w", steps=due, **settings)


def backward(model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], Tensor] = squares) -> None:
    (loss(model, batch) / batch[1].numel()).backward()
