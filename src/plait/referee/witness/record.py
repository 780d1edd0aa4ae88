"""Writes down what a training loop does, on every rank while it runs; the loop stays as it is.

    with plait.witness(model, optimizer, "witnessed") as witness:
        for batch in loader:                forward      which samples enter the model, and its parameters if they were
            loss = ...                                   changed since the last update
            loss.backward()
            optimizer.step()                before it    each p.grad, the options of each group
            optimizer.zero_grad()           after it     each parameter; the step is written

    witnessed/rank-00000/start.safetensors          the parameters, their places in the whole, and the buffers
                         step-000000.safetensors    a step, written completely or not at all
                         end.safetensors            the loop has left the block

A rank writes its own pieces; nothing is sent.  The file's metadata holds the rest as JSON.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.checkpoint.files.writing import told, write_bytes
from plait.referee.values import packed
from plait.referee.witness.pieces import Piece, Row, local, of_engine, of_model, rows_of
from plait.step import Engine
from plait.table.region import Region
from plait.zero.elementwise import has_stepped

FORMAT = "plait witness 1"
BUFFER = "buffer/"
"""The prefix of the names of buffers at the start."""

MOST_STEPS = 100_000
MOST_CALLS = 1024
"""The largest number of forwards after the last update that are written."""


def rank_folder(folder: str | Path, rank: int) -> Path:
    """The folder that a rank writes."""
    return Path(folder) / f"rank-{rank:05d}"


def step_file(place: Path, step: int) -> Path:
    """The file of a rank's step, from 0."""
    return place / f"step-{step:06d}.safetensors"


class Witness:
    """Writes down what a training loop does, on every rank, for ``plait judge``::

        with plait.witness(model, optimizer, "witnessed"):
            train(model, optimizer, loader)

    Args:
        model: the model that trains, wrapped (DDP, FSDP2, Accelerate) or not; or plait's ``Engine``.
        optimizer: its optimizer, or all of them.
        folder: a new one, the same on every rank.
        steps: the number of steps to write, from the first one on; each takes the bytes of the rank's gradients and
            parameters, and the parameters are also written at the start.
        rank: the rank of this process; None: as torch.distributed says, 0 without it.
        ranks: the number of ranks; None: as torch.distributed says, 1 without it.
        names: the names in the job's model of parameters that have another name here, as in a pipeline stage.
        pieces: start and stop in each dim of the whole, for parameters that were cut by hand; a DTensor knows its own.
        inputs: True if the model's inputs are the batch's samples; False for a later stage of a pipeline.

    Raises:
        ValueError: the optimizer has other tensors, the folder is not new, or pieces have another size.
    """

    def __init__(
        self,
        model: nn.Module | Engine,
        optimizer: Optimizer | Sequence[Optimizer],
        folder: str | Path,
        *,
        steps: int = 10,
        rank: int | None = None,
        ranks: int | None = None,
        names: Mapping[str, str] | None = None,
        pieces: Mapping[str, Region] | None = None,
        inputs: bool = True,
    ) -> None:
        import torch.distributed as dist

        if isinstance(model, Engine):
            rank, ranks = model.comm.rank, model.comm.world_size
        joined = dist.is_available() and dist.is_initialized()
        rank = rank if rank is not None else dist.get_rank() if joined else 0
        ranks = ranks if ranks is not None else dist.get_world_size() if joined else 1
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}: ranks go from 0 to {ranks - 1}")
        if not 1 <= steps <= MOST_STEPS:
            raise ValueError(f"steps is {steps}: give a whole number from 1 to {MOST_STEPS:,}")
        given: list[Any] = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        optimizers: list[Any] = [getattr(o, "optimizer", o) for o in given]  # Accelerate's wraps torch's
        source = of_engine(model) if isinstance(model, Engine) else of_model(model, names or {}, pieces or {})
        self._model, self._buffers, self._parameters = source.model, source.buffers, source.parameters
        self._optimizers, self._place = optimizers, rank_folder(folder, rank)
        self._steps, self._rank, self._ranks, self._inputs = steps, rank, ranks, inputs
        groups = [(i, j, group) for i, o in enumerate(optimizers) for j, group in enumerate(o.param_groups)]
        owner = {id(p): (i, j) for i, j, group in groups for p in group["params"]}
        self._names = {id(p): name for name, p in self._parameters.items()}
        if strange := [i for i in owner if i not in self._names]:
            raise ValueError(
                f"{len(strange)} of the optimizer's tensors are not parameters of the model: make the optimizer of "
                f"the model that is given here, after it was wrapped"
            )
        if any(map(has_stepped, optimizers)):
            raise ValueError(
                "the optimizer has made steps already, and the judge begins with a new one: put the witness around the "
                "first steps of a run"
            )
        self.pieces = [
            Piece(name, source.regions[name], p.requires_grad, owner.get(id(p)), name in source.flat)
            for name, p in self._parameters.items()
        ]
        self._handles: list[Any] = []
        self._within: Counter[int] = Counter()
        """The depth of each optimizer's ``step`` calls: a subclass may call its parent's."""
        self.step = 0
        """The number of steps that were written completely."""
        self._last: dict[str, Tensor] = {}
        self._begin()

    # ---- what the loop does --------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with told(self._place, 0):
            self._place.mkdir(parents=True, exist_ok=True)
        if any(self._place.iterdir()):
            raise ValueError(f"{str(self._place)!r} is not empty: give a new folder")
        about = {"format": FORMAT, "rank": self._rank, "ranks": self._ranks}
        about["pieces"] = [asdict(piece) for piece in self.pieces]
        self._last = kept("after", self._parameters)
        buffers = {f"{BUFFER}{name}": local(buffer) for name, buffer in self._buffers.items()}
        start = {name: self._last[f"after/{name}"] for name in self._parameters}
        self._write(self._place / "start.safetensors", start | buffers, about)
        self._handles.append(self._model.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True))
        for number, optimizer in enumerate(self._optimizers):
            self._handles.append(optimizer.register_step_pre_hook(lambda *call, n=number: self._before(n, *call)))
            self._handles.append(optimizer.register_step_post_hook(lambda *_, n=number: self._after(n)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if kind is not None:
            return
        if self._stepped:
            self._close()
        about = {"all": self.step < self._steps, "calls": self._calls[:MOST_CALLS]}
        tensors = self._changed() if about["all"] else {}
        self._write(self._place / "end.safetensors", tensors, about)

    def _begin(self) -> None:
        self._calls: list[tuple[Row, ...] | None] = []
        self._stepped: list[int] = []
        self._options: dict[int, list[dict[str, Any]]] = {}
        self._tensors: dict[str, Tensor] = {}

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step >= self._steps or not torch.is_grad_enabled():  # an evaluation
            return
        self._within.clear()
        if self._stepped:  # some optimizers may make no step
            self._close()
        if not self._calls:
            self._tensors.update(self._changed())
        self._calls.append(rows_of(args, kwargs) if self._inputs else None)

    def _before(self, number: int, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._within[number] += 1
        if self._within[number] > 1:
            return
        if any(callable(value) for value in (*args, *kwargs.values())):
            raise ValueError(
                "optimizer.step(closure) makes its gradients inside the step, where they are not witnessed: run "
                "forward and backward before, then call optimizer.step() (an optimizer that needs a closure cannot be "
                "judged)"
            )
        if number in self._stepped:
            self._close()
        if self.step >= self._steps:
            return
        groups = self._optimizers[number].param_groups
        scale = getattr(self._optimizers[number], "grad_scale", None)  # a fused optimizer divides by it inside its step
        self._options[number] = [options_of(group) for group in groups]
        for parameter in (p for group in groups for p in group["params"]):
            if (gradient := parameter.grad) is not None:
                if isinstance(scale, Tensor):
                    gradient = gradient / scale
                summed = not any(p.is_partial() for p in getattr(gradient, "placements", ()))
                name = self._names[id(parameter)]
                self._tensors[f"{'gradient' if summed else 'pending'}/{name}"] = local(gradient)

    def _after(self, number: int) -> None:
        self._within[number] -= 1
        if self._within[number] or self.step >= self._steps:
            return
        self._stepped.append(number)
        if len(self._stepped) == len(self._optimizers):
            self._close()

    # ---- what is written -----------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._last = kept("after", self._parameters)
        tensors = self._tensors | self._last
        about = {
            "step": self.step,
            "calls": self._calls,
            "stepped": self._stepped,
            "options": [self._options.get(number, []) for number in range(len(self._optimizers))],
        }
        self._write(step_file(self._place, self.step), tensors, about)
        self.step += 1
        self._begin()

    def _changed(self) -> dict[str, Tensor]:
        """The parameters whose bits differ from those that were last written."""
        now = kept("before", self._parameters)
        return {key: value for key, value in now.items() if not _same(value, self._last[f"after/{key[7:]}"])}

    def _write(self, path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        write_bytes(path, packed(about, tensors), lasting=False)  # the loop waits for it


def kept(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors on the CPU, by kind and parameter."""
    return {f"{kind}/{name}": local(tensor) for name, tensor in tensors.items()}


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)) if one.numel() else True


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among a group's options: learning rate, decay, momentum, betas."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        numbers = value if isinstance(value, tuple | list) else [value]
        if name in ("params", "initial_lr") or not numbers:
            continue
        if all(isinstance(v, int | float) or (isinstance(v, Tensor) and v.numel() == 1) for v in numbers):
            floats = [float(v) for v in numbers]
            if all(map(math.isfinite, floats)):
                found[name] = floats if isinstance(value, tuple | list) else floats[0]
    return found


witness = Witness
"""The name to use in a ``with``."""
