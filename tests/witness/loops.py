"""Training loops written by hand, right and wrong, for ranks that take turns in one process.

A loop trains as many copies of the model as it has ranks. What ranks would send is read from the other copies.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plait
from plait.run.data.batches import split_samples
from plait.run.job.config import JobConfig
from plait.run.job.job import Job, make_job

WIDTH, BATCH = 5, 11
RATE = 0.1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


def batch(step: int) -> dict[str, Tensor]:
    """Samples of 1 to 3 terms each; the last is blank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    mask = torch.arange(3)[None, :] < torch.tensor([1, 3, 3, 2, 1, 1, 1, 2, 3, 1, 0])[:, None]
    return {"x": x, "y": torch.randn(BATCH, 3, generator=generator), "mask": mask.float()}


def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return ((model(batch["x"]) - batch["y"].to(batch["x"].dtype)).square() * batch["mask"]).sum()


def terms(batch: dict[str, Tensor]) -> int:
    return int(batch["mask"].sum())


def user_job(optimizer: str = "sgd") -> plait.UserJob:
    makers = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
    }
    return plait.UserJob(Net, loss_sum, batch, terms, makers[optimizer])


def the_job(optimizer: str = "sgd", dtype: Any = "fp32") -> Job:
    return make_job(JobConfig(job=user_job(optimizer), dtype=dtype, batch=BATCH))


def samples(step: int, first: int, count: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value[first : first + count].to(dtype) for name, value in batch(step).items()}


def run(
    folder: Path,
    fault: str = "",
    *,
    ranks: int = 2,
    calls: int = 1,
    steps: int = 3,
    optimizer: str = "sgd",
    dtype: torch.dtype = torch.float32,
    clip: float | None = None,
    kill: int | None = None,
) -> None:
    """A loop of data-parallel ranks under the witness; ``fault`` says what it does wrong.

    Args:

        kill: the step in which rank 1 ends without a word, after its optimizer's step.
    """
    models = []
    for rank in range(ranks):
        torch.manual_seed(rank if fault == "own weights" else 0)
        models.append(Net().to(dtype))
    if fault == "lost weights":
        models[1].up.weight.data[0, 0] = torch.nan
    made = []
    for model in models:
        parameters = list(model.parameters())
        made.append(user_job(optimizer).optimizer(parameters[:-1] if fault == "left out" else parameters))  # type: ignore[misc]
    with contextlib.ExitStack() as stack:
        for rank, (model, o) in enumerate(zip(models, made, strict=True)):
            stack.enter_context(plait.witness(model, o, folder, steps=max(10, steps), rank=rank, ranks=ranks))
        for step in range(steps):
            count, parts = terms(batch(step)), split_samples(BATCH, ranks * calls)
            for rank, model in enumerate(models):
                if fault != "no zero_grad":
                    model.zero_grad()
                where = 0 if fault == "no sampler" else rank
                data = step + 1 if fault == "ahead" and rank == 1 and step == 1 else step
                own = [samples(data, *parts[where * calls + call], dtype) for call in range(calls)]
                if fault == "drop_last":
                    own[-1] = {name: value[:-1] for name, value in own[-1].items()}
                for part in own:
                    if fault == "last forward":
                        model.zero_grad()
                    loss = loss_sum(model, part) * ranks
                    divisors = {"mean of means": terms(part) * calls, "local count": sum(map(terms, own)), "sum": 1}
                    loss = loss / (divisors | {"not divided": count / calls}).get(fault, count)
                    loss.backward()  # type: ignore[no-untyped-call]
                if fault == "clip first":
                    nn.utils.clip_grad_norm_(model.parameters(), clip or 1.0)
            if fault != "no all-reduce":
                all_reduce(models)
            if fault == "no gradient":
                models[1].down.bias.grad = None
            if fault == "not finite":
                models[1].up.weight.grad[2, 1] = torch.nan  # type: ignore[index]
            if fault == "missing rank":
                for p in models[1].parameters():
                    p.grad.mul_(0.5)  # type: ignore[union-attr]
            for rank, (model, o) in enumerate(zip(models, made, strict=True)):
                if clip is not None and fault not in ("clip first", "no clip"):
                    many = {"norm of all ranks": ranks, "squares of all ranks": ranks**0.5}.get(fault, 1.0)
                    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
                    nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm * many)
                if fault == "rate" and step == 1:
                    o.param_groups[0]["lr"] = RATE / 2
                if fault == "no step" and rank == 1 and step == 1:
                    continue
                before = [p.detach().clone() for p in model.parameters()]
                o.step()
                if step == 1 and (fault == "two steps" or (fault == "one rank's two steps" and rank == 1)):
                    o.step()
                if fault == "twice by hand" and step == 1:
                    with torch.no_grad():
                        for p, old in zip(model.parameters(), before, strict=True):
                            p.add_(p - old)
                if kill == step and rank == 1:
                    return stop(stack)


def stop(stack: contextlib.ExitStack) -> None:
    """As a process that is killed: nothing is written at the end."""
    stack.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def all_reduce(models: list[Net]) -> None:
    """The mean of the ranks' gradients, everywhere."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
        for p in same:
            p.grad = mean.clone()


def pieces_of(rank: int, ranks: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """Rows of each parameter, as a loop that cuts them by hand has them."""
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, p in Net().named_parameters():
        first, count = split_samples(len(p), ranks)[rank]
        found[name] = ((first, first + count), *((0, size) for size in p.shape[1:]))
    return found


class Pieces(nn.Module):
    """A rank's rows of each parameter; the forward computes with whole ones."""

    def __init__(self, rank: int, ranks: int, whole: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Module(), nn.Module()
        for name, region in pieces_of(rank, ranks).items():
            module, _, leaf = name.partition(".")
            rows = slice(*region[0])
            setattr(self.get_submodule(module), leaf, nn.Parameter(whole.get_parameter(name).detach()[rows].clone()))

    def forward(self, x: Tensor) -> Tensor:
        return x


def run_cut(folder: Path, *, local_norm: bool, ranks: int = 2, steps: int = 2, clip: float = 0.05) -> None:
    """A loop whose ranks have rows of each parameter, and clip by the norm of the whole or of their own rows."""
    torch.manual_seed(0)
    whole = Net()
    cut = [Pieces(rank, ranks, whole) for rank in range(ranks)]
    made: list[Any] = [user_job().optimizer(c.parameters()) for c in cut]  # type: ignore[misc]
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            where = pieces_of(rank, ranks)
            told = {"rank": rank, "ranks": ranks, "pieces": where}
            stack.enter_context(plait.witness(cut[rank], made[rank], folder, **told))
        for step in range(steps):
            with torch.no_grad():
                for name, p in whole.named_parameters():
                    p.copy_(torch.cat([c.get_parameter(name) for c in cut]))
            whole.zero_grad()
            for rank, (first, count) in enumerate(split_samples(BATCH, ranks)):
                part = samples(step, first, count, torch.float32)
                cut[rank](part["x"])
                (loss_sum(whole, part) / terms(batch(step))).backward()  # type: ignore[no-untyped-call]
            if not local_norm:
                nn.utils.clip_grad_norm_(whole.parameters(), clip)
            for rank in range(ranks):
                for name, region in pieces_of(rank, ranks).items():
                    gradient: Any = whole.get_parameter(name).grad
                    cut[rank].get_parameter(name).grad = gradient[slice(*region[0])].clone()
                if local_norm:
                    nn.utils.clip_grad_norm_(cut[rank].parameters(), clip)
                made[rank].step()
