"""The single process that repeats the run of a layout: a plain model, plain autograd, a stock optimizer.

It knows nothing of units, flat storage or collectives.  It takes only the *order of additions* (``table.additions``)
from the layout: each global microbatch's gradient is a leaf, and the tree says which two are added first.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from plait.forward.compiled import CompiledUnits, closed_units
from plait.forward.context import CurrentForward, RNGPosition, token_counts
from plait.forward.dropout import DropoutRNG
from plait.forward.interceptor import Interceptor
from plait.messages.progress import counted
from plait.referee.contributions import add
from plait.referee.tape import Tape
from plait.referee.verify.observed import OneStep, Piece, Record, TiedWeights
from plait.run.job.job import Job
from plait.step.norm import block_norms, clip_factor, dtype_of_norm, norm_of, sum_squares
from plait.step.step import num_samples, whole_count
from plait.table.additions import MICROBATCH, fold
from plait.table.mesh import Mesh
from plait.zero.state.init import materialise
from plait.zero.storage import dtype_in
from plait.zero.wrap import automatic

Gradients = dict[str, Tensor]


class Turns:
    """Places parameters by the name under which they are used, even if one module has several names.

    blocks.0, blocks.1, ... are one block       its n-th call in a forward uses its n-th name
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(module, []).append(name)
        self._turns: dict[nn.Module, dict[str, list[tuple[nn.Module, str, nn.Parameter]]]] = {}
        self._calls = Counter[nn.Module]()

    def place(self, parameter: nn.Parameter, keys: Sequence[str]) -> None:
        """Uses a parameter under these names, and only there."""
        for key in keys:
            owner, _, short = key.rpartition(".")
            module, parts = self.model.get_submodule(owner), owner.split(".")
            around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            name = next((one for one in around if len(self._names[self.model.get_submodule(one)]) > 1), None)
            if name is None:
                setattr(module, short, parameter)
                continue
            shared = self.model.get_submodule(name)  # the outermost that has several names
            if shared not in self._turns:
                self._turns[shared] = {}
                shared.register_forward_pre_hook(self._begin, prepend=True)
            self._turns[shared].setdefault(name, []).append((module, short, parameter))

    def _begin(self, shared: nn.Module, *call: Any) -> None:
        names = self._names[shared]
        name = names[self._calls[shared] % len(names)]
        self._calls[shared] += 1
        for module, short, parameter in self._turns[shared].get(name, ()):
            module._parameters[short] = parameter


class SingleProcess:
    """A whole model in one process, which can play any data rank: it keeps one set of buffers for each.

    ``losses`` are those of the current step, by global microbatch.  The optimizer updates the ``masters``: the
    parameters themselves, or wider copies of them; ``dtypes`` are the model's original ones.  ``ties`` has the weights
    whose uses are summed separately, with their names, use by use.
    """

    def __init__(
        self, job: Job, num_data_ranks: int, num_microbatches: int, ties: TiedWeights, device: str = "cpu"
    ) -> None:
        self.job, self.ranks, self.microbatches, self.device = job, num_data_ranks, num_microbatches, device
        self.model = job.build()
        materialise(self.model, job.seed, torch.device(device), job.weights)
        self.current = CurrentForward()
        interceptor = Interceptor(self.current, [DropoutRNG(job.seed, self.current)])
        closed = closed_units(self.model, automatic(self.model)) if job.compile else []
        interceptor.follow(self.model, closed=closed)
        CompiledUnits(interceptor, self.model, closed)
        self.parameters = dict(self.model.named_parameters())
        self.dtypes = {name: p.dtype for name, p in self.parameters.items()}
        self.masters = {name: self._master(p) for name, p in self.parameters.items()}
        self.loss_scale = job.precision.loss_scale()
        self.optimizer = job.optimizer(self.masters.values())
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self.buffers = [{name: b.clone() for name, b in self.model.named_buffers()} for _ in range(num_data_ranks)]
        self.losses: list[float] = []
        self.turns = Turns(self.model)
        self.uses = {name: [self._use(name) for _ in others] for name, (_, *others) in ties.items()}
        for name, keys in ties.items():
            for parameter, own in zip((self.parameters[name], *self.uses[name]), keys, strict=True):
                self.turns.place(parameter, own)

    def _master(self, parameter: nn.Parameter) -> nn.Parameter:
        """Gives a parameter the dtype of the computation; returns the parameter that the optimizer updates."""
        own, precision = parameter.data, self.job.precision
        parameter.data = own.to(dtype_in(precision.params, own.dtype))
        wide = dtype_in(precision.optim, parameter.dtype)
        return nn.Parameter(own.to(wide)) if parameter.requires_grad and wide != parameter.dtype else parameter

    @property
    def scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def _use(self, name: str) -> nn.Parameter:
        """A second parameter over the memory of the first."""
        return nn.Parameter(self.parameters[name].detach(), self.parameters[name].requires_grad)

    def begin(self, step: int) -> int:
        """Fetches the batches of all data ranks; returns the number of targets."""
        of_ranks = (
            self.job.microbatches(step, d, self.ranks, self.microbatches, self.device) for d in range(self.ranks)
        )
        self.step, self.batches = step, [batch for batches in of_ranks for batch in batches]
        self.samples = [num_samples(batch) for batch in self.batches]
        self.losses = [math.nan] * len(self.batches)
        self.count = sum(whole_count(self.job.count_fn(batch)) for batch in self.batches)
        return self.count

    def gradient(self, data_rank: int, microbatch: int) -> Gradients:
        """One microbatch's gradient, computed as its data rank would."""
        place = data_rank * self.microbatches + microbatch
        own = self.buffers[data_rank]
        for name, buffer in self.model.named_buffers():
            buffer.copy_(own[name])
        lengths, first = token_counts(self.batches[place], self.samples[place]), sum(self.samples[:place])
        self.current.begin(RNGPosition(self.step, place, first, self.samples[place], lengths))
        for parameter in (*self.parameters.values(), *chain.from_iterable(self.uses.values())):
            parameter.grad = None  # if stages use a weight under one name, the model has only its last use
        loss = self.job.loss_fn(self.model, self.batches[place])
        loss.backward(torch.full_like(loss, 1 / self.count * self.scale))
        self.losses[place] = loss.item()
        for name, buffer in self.model.named_buffers():
            own[name].copy_(buffer)
        used = {f"{name} {i}": use for name, uses in self.uses.items() for i, use in enumerate(uses)}
        gradients = {key: p.grad for key, p in (self.parameters | used).items() if p.grad is not None}
        return {key: g.to(dtype_in(self.job.precision.sums, g.dtype)) for key, g in gradients.items()}

    def summed(self, gradients: Gradients) -> Gradients:
        """Adds up the uses of tied weights in order, without the loss scale; empty if not finite: a skipped step."""
        for name, uses in self.uses.items():
            for i in range(len(uses)):
                if (use := gradients.pop(f"{name} {i}", None)) is not None:
                    gradients = add(gradients, {name: use})
        if self.loss_scale is None:
            return gradients
        for gradient in gradients.values():
            gradient.mul_(1 / self.scale)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        self.loss_scale.update(finite=finite)
        return gradients if finite else {}

    @torch.no_grad()
    def update(self, gradients: Gradients) -> None:
        for name, master in self.masters.items():
            gradient = gradients.get(name)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.optimizer.step()
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])
        if self.scheduler is not None:
            self.scheduler.step()


def place_in(current: CurrentForward, window: Collection[int], made: Sequence[OneStep]) -> tuple[int, int] | None:
    """The step after those that are recorded, if it is in the window, and its microbatch; engines may count wrongly."""
    step, position = len(made), current.context.position
    return (step, position.microbatch) if position is not None and step in window else None


@contextmanager
def uncached() -> Iterator[None]:
    """Makes autocast keep no casts of weights, as on thread ranks: two forwards cast twice."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@uncached()
def run_reference(
    job: Job, mesh: Mesh, num_microbatches: int, order: Sequence[str], steps: int, *, clip: float | None,
    norm_pieces: Sequence[Sequence[Piece]] | None = None, keep_links: bool = True, ties: TiedWeights | None = None,
    built: Callable[[SingleProcess], None] | None = None, window: Collection[int] = (), device: str = "cpu",
) -> Record:  # fmt: skip
    """Trains ``steps`` steps in this process, adding gradients in the given order.

    ``order`` has the sums, innermost first, as ``table.additions`` derives them from a row; only the data axes of
    ``mesh`` matter.  ``norm_pieces`` are, by rank, the pieces whose squares it sums for the norm; None: whole
    parameters.  ``built`` is called with the process before its first step.  The steps of the ``window`` are traced.
    ``keep_links``: every step keeps its sums, the optimizer's gradients, and the updated parameters.  It runs on the
    ``device``; its record is on the CPU.
    """
    one = SingleProcess(job, mesh.data_size, num_microbatches, ties or {}, device)
    if built is not None:
        built(one)
    record = Record(initial=copied(one.masters) if keep_links or window else {})
    tape = Tape(partial(place_in, one.current, window, record.steps))
    if window:
        tape.follow(one.model)
    sizes = {"replica": mesh.replica, "shard": mesh.shard, MICROBATCH: num_microbatches}

    def leaf(at: dict[str, int]) -> Gradients:
        part, steps_of_time = divmod(at["replica"] * mesh.shard + at["shard"], mesh.context)
        return {} if steps_of_time else one.gradient(part, at[MICROBATCH])  # the first has its context group's

    for number in counted("steps of one process", range(steps)):
        count, scale, traced = one.begin(number), one.scale, number in window
        kept = keep_links or traced
        gradients = one.summed(fold(tuple(order), sizes, leaf, add))
        step = OneStep(math.fsum(one.losses) / count, losses=dict(enumerate(one.losses)), scale=scale)
        step.summed = copied(gradients) if kept else {}
        step.norm = _clip(gradients, clip if gradients else None, norm_pieces)
        step.clipped = copied(gradients) if kept else {}
        if traced:
            step.marks = tape.marks
            step.counts = {m: float(job.count_fn(batch)) for m, batch in enumerate(one.batches)}
        tape.clear()
        one.update(gradients)
        step.updated = copied({name: p for name, p in one.masters.items() if p.requires_grad}) if kept else {}
        record.steps.append(step)
    record.parameters = {name: p.detach().to("cpu", one.dtypes[name], copy=True) for name, p in one.masters.items()}
    record.buffers = {name: one.buffers[0][name].cpu() for name in one.model.state_dict() if name in one.buffers[0]}
    for name, parameter in one.masters.items():
        state = one.optimizer.state.get(parameter, {})
        record.state[name] = {key: _kept(value) for key, value in state.items() if torch.is_tensor(value)}
    return record


def copied(tensors: Mapping[str, Tensor]) -> Gradients:
    """Copies of tensors on the CPU, by name."""
    return {name: _kept(tensor) for name, tensor in tensors.items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _square_sum(runs: Iterable[Tensor]) -> float:
    """The sum of squares in fp64, run by run."""
    return sum_squares([norm.item() for norm in block_norms(runs)])


def _clip(gradients: Gradients, clip: float | None, pieces: Sequence[Sequence[Piece]] | None) -> float | None:
    """Clips in place; returns the norm before, summed in fp64 in the order of the pieces and rounded once."""
    if clip is None:
        return None
    if pieces is None:
        total = _square_sum(gradients.values())
    else:
        total = 0.0
        for rank in pieces:
            total += _square_sum(gradients[n].reshape(-1)[a:b] for n, a, b in rank if n in gradients)
    norm = norm_of(total, dtype_of_norm({g.dtype for g in gradients.values()}))
    factor = clip_factor(norm, clip)
    if factor < 1:
        for gradient in gradients.values():
            gradient.mul_(factor)
    return norm
