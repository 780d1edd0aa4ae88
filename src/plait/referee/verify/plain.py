"""Trains on full batches in plain PyTorch: the reference that shares as little as possible with the engine.

                     the layout and its replay             this run
    norm and clip    the engine's sums of squares          torch.nn.utils.clip_grad_norm_
    dropout          the engine's streams                  the documented formula, written again (``Masks``)
    learning rate    torch's LambdaLR                      ``rate``
    optimizer        the table's row, ``decay_groups``     torch's classes, constants and groups written out

A fault that a layout and its replay share passes there as bitwise, and differs here.  This run still shares the model,
its loss, its data, its initial values, names of sites, and random operators other than dropout.

Its dropout formula for (seed, step, global sample, site, element), as in decision 007:

    key     64 bits of BLAKE2b over "dropout", seed, step, sample and site, joined by 0x1f; site is "name#draw"
    hash    (x ^ x >> 16) * 0x7feb352d, (x ^ x >> 15) * 0x6c078965, x ^ x >> 16, modulo 2^32
    keep    hash(hash(element ^ low half of the key) + high half) >= p * 2^32
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.overrides import TorchFunctionMode

from plait.forward.context import RNGPosition, token_counts
from plait.forward.masks import stream_key
from plait.forward.random_streams import STREAMS
from plait.forward.sites import Sites, Turns
from plait.messages.progress import counted
from plait.referee.verify.observed import OneStep, Record
from plait.referee.verify.reference import copied, uncached
from plait.run.job.config import JobConfig
from plait.run.job.job import Job
from plait.step.step import num_samples, whole_count
from plait.table.cells import LONG
from plait.torch_private import TorchDispatchMode
from plait.zero.state.init import materialise


@uncached()
def run_plain(job: Job, task: JobConfig, along: Record) -> Record:
    """Trains a job on one full batch per step, with the settings that it was made from.

    Each link of a step begins with the value of the run ``along``: the forward with its parameters, the norm and the
    clip with its sums, the update with its clipped gradients.  So no difference grows, and the first wrong one is the
    cause.  The initial values are the job's own.
    """
    model = job.build()
    materialise(model, job.seed, torch.device("cpu"), job.weights)
    parameters = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in parameters.items()}
    for p in parameters.values():
        p.data = cast(p.data, job.dtype)
    optimizer = make(task, masters)
    sums = LONG.get(job.precision.sums.dtype or "", "")
    masks, record = Masks(model, job.seed), Record()
    for step, theirs in enumerate(counted("steps of plain PyTorch", along.steps)):
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * rate(task, step)
        (batch,) = job.microbatches(step, 0, 1, 1)
        count = whole_count(job.count_fn(batch))
        model.zero_grad()
        with masks.of(step, batch):
            loss = job.loss_fn(model, batch)
        with masks.of(step, batch):  # a model that recomputes draws its masks again
            (loss * theirs.scale / count).backward()
        made = OneStep(loss.item() / count)
        record.steps.append(made)
        gradients = {
            name: cast(p.grad, getattr(torch, sums) if sums else p.grad.dtype) / theirs.scale
            for name, p in parameters.items()
            if p.grad is not None
        }
        scaled = job.precision.first_scale is not None
        if theirs.summed or not scaled:
            made.summed = {} if scaled and not all(g.isfinite().all() for g in gradients.values()) else gradients
            _give(masters, theirs.summed)
            if task.update.clip is not None:
                made.norm = nn.utils.clip_grad_norm_(masters.values(), task.update.clip).item()
            made.clipped = {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}
        _give(masters, theirs.clipped)
        optimizer.step()
        made.updated = copied({name: master for name, master in masters.items() if master.requires_grad})
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(masters[name].copy_(theirs.updated.get(name, masters[name])))
    return record


def _give(masters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    """Gives the parameters gradients for an optimizer; None if there is none."""
    for name, master in masters.items():
        master.grad = gradients[name].to(master.dtype, copy=True) if name in gradients else None


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a floating-point tensor to a dtype; others stay as they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def loss_in_parts(job: Job, data_ranks: int, microbatches: int) -> tuple[float, float, str]:
    """The loss of the first step's batch, summed over its terms: of the whole, and of its parts added up; no dropout,
    and the same buffers before each.  NaN if the model draws other random numbers, so that its loss changes each time.

    Then a module, if there is one, whose buffers decide on the loss and are others after a rank's microbatches.
    """
    model = job.build()
    materialise(model, job.seed, torch.device("cpu"), job.weights)
    for p in model.parameters():
        p.data = cast(p.data, job.dtype)
    first = copied(dict(model.named_buffers()))

    def run(batches: Sequence[Any], buffers: Mapping[str, Tensor] = first) -> tuple[float, dict[str, Tensor]]:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        total = math.fsum(job.loss_fn(model, batch).item() for batch in batches)
        return total, copied(dict(model.named_buffers()))

    with torch.no_grad(), NoDropout():
        batch = job.microbatches(0, 0, 1, 1)
        (whole, after), (again, _) = run(batch), run(batch)
        parts = math.fsum(run([part])[0] for part in job.microbatches(0, 0, 1, data_ranks * microbatches))
        others = run(job.microbatches(0, 0, data_ranks, microbatches))[1]
        names = [name for name, buffer in others.items() if not torch.equal(buffer, after[name])]
        moved = (name.rpartition(".")[0] for name in names if run(batch, first | {name: after[name]})[0] != whole)
        return whole if whole == again else math.nan, parts, next(moved, "")


def make(task: JobConfig, parameters: dict[str, nn.Parameter]) -> Optimizer:
    """Makes the optimizer that a config names; parameters of two dims or more decay, if a decay is given."""
    if task.family.optimizer is not None:
        return task.family.optimizer.make(parameters.values())
    groups: Any = list(parameters.values())
    if task.update.weight_decay is not None:
        flat = [p for p in groups if p.ndim < 2]
        rest = [p for p in groups if p.ndim > 1]
        groups = [{"params": flat, "weight_decay": 0.0}, {"params": rest, "weight_decay": task.update.weight_decay}]
    if task.update.optimizer == "adamw":
        return AdamW(groups, task.update.lr, (0.9, 0.999), 1e-8, 0.01)
    if task.update.optimizer == "adam":
        return Adam(groups, task.update.lr, (0.9, 0.999), 1e-8)
    if task.update.optimizer == "sgd":
        return SGD(groups, task.update.lr, 0.9)
    return task.optimizer_row.make(groups, lr=task.update.lr)


def rate(task: JobConfig, step: int) -> float:
    """A step's share of ``lr``: warmup, then constant, linear or cosine down to ``min_lr``."""
    done, warmup, least = step + 1, task.update.warmup, task.update.min_lr
    if done <= warmup:
        return done / warmup
    way = (step - warmup) / max(1, task.samples.steps - warmup)
    falls = {"constant": 0.0, "linear": way, "cosine": math.sin(math.pi * way / 2) ** 2}
    return 1 - (1 - least) * falls[task.update.lr_schedule]


# ---- dropout ------------------------------------------------------------------------------------------------


class Masks(TorchDispatchMode):
    """Draws every dropout mask of a model by the formula instead of from torch's generator.

    On a CPU, all of torch's dropout (functional, in attention, on whole channels) fills its mask by ``bernoulli_``.
    """

    by_head = False
    """True in torch's attention, where the rows of a mask may be the heads of each sample."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.calls, self.sites, self.turns = seed, [""], Sites(model), Turns()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, args, name=name: self._enter(name))
            module.register_forward_hook(lambda module, args, out: self._leave(), always_call=True)

    def _enter(self, name: str) -> None:
        self.calls.append(self.sites.enter(self.calls[-1], name, self.turns))

    def _leave(self) -> None:
        self.calls.pop()

    @contextmanager
    def of(self, step: int, batch: Any) -> Iterator[None]:
        """Covers the forward of a step, or its backward."""
        self.step, self.num_samples = step, num_samples(batch)
        self.lengths = token_counts(batch, self.num_samples)
        self.drawn: dict[str, int] = {}
        with self, Noise(self):
            yield

    def site(self) -> tuple[RNGPosition, str, str]:
        """The place of the running module's next draw, in the form that ``random_streams`` needs."""
        module = self.calls[-1]
        draw = self.drawn[module] = self.drawn.get(module, -1) + 1
        return RNGPosition(self.step, 0, 0, self.num_samples, self.lengths), module, f"{module}#{draw}"

    def sample_keys(self, kind: str, site: str) -> list[int]:
        """The keys of all samples of the batch."""
        return [stream_key(kind, self.seed, self.step, sample, site) for sample in range(self.num_samples)]

    def place(self, module: str, shape: Sequence[int]) -> None:
        """Returns None: activations are whole here."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:
            kept = args[1] if len(args) > 1 else 0.5  # torch omits its default
            return args[0].copy_(self.mask(args[0].shape, 1 - kept))
        if func is torch.ops.aten.exponential_.default:  # inside F.gumbel_softmax
            return STREAMS[Tensor.exponential_](self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def mask(self, shape: torch.Size, p: float) -> Tensor:
        """True where an element survives."""
        _, _, site = self.site()
        of_samples = shape[0] in (self.num_samples, *(self.num_samples * length for length in self.lengths))
        of_samples |= self.by_head and shape[0] % self.num_samples == 0
        kind, rows = ("dropout", self.num_samples) if of_samples else ("microbatch dropout", 1)
        words = [(kind, self.seed, self.step, row, site) for row in range(rows)]
        return torch.stack([keep(words_, math.prod(shape) // rows, p) for words_ in words]).view(shape)


class NoDropout(TorchDispatchMode):
    """Makes every mask keep all elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].fill_(1) if func is torch.ops.aten.bernoulli_.float else func(*args, **(kwargs or {}))


class Noise(TorchFunctionMode):
    """Serves random operators other than dropout from the engine's streams, which layout and replay also use."""

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self.masks = masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in STREAMS and kwargs.get("generator") is None:
            return STREAMS[func](self.masks, *args, **kwargs)
        self.masks.by_head = func is nn.functional.multi_head_attention_forward
        return func(*args, **kwargs)


def keep(words: tuple[object, ...], numel: int, p: float) -> Tensor:
    """The mask of a sample's elements that survive."""
    digest = hashlib.blake2b("\x1f".join(map(str, words)).encode(), digest_size=8).digest()
    low, high = (int.from_bytes(half, "little") for half in (digest[:4], digest[4:]))
    return mixed(mixed(torch.arange(numel) ^ low) + high) >= int(p * 2**32)


def mixed(x: Tensor) -> Tensor:
    """A 32-bit hash of whole numbers, computed in 64 bits so that neither product overflows."""
    x = x % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x6C078965 % 2**32
    return x ^ x >> 16
