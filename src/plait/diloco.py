"""DiLoCo: islands of ranks train separately, and an outer optimizer unites them every few steps.

    comm = plait.join("replica=2 shard=4")
    island = plait.diloco.Island(comm)                    the ranks of this replica, as a world: shard=4
    engine = plait.Engine(model, island, strategy="zero3", optimizer=AdamW(model.parameters()))
    diloco = plait.diloco.DiLoCo(engine, partial(SGD, lr=0.7, momentum=0.9, nesterov=True), every=50)
    ...
    optimizer.step()
    diloco.step()                                         call it after each step; every 50th sends something

In the table's words the weights are ``shard, pending(replica)`` for that many steps: their mean is still due.  Then

    shard, pending(replica) ── reduce_scatter(replica) ──► shard/replica ── all_gather(replica) ──► shard
                                                       outer optimizer

so its state, and the last united weights, are cut over the replicas as well.

Source: DiLoCo (Douillard et al. 2023); fragments at different times: Streaming DiLoCo (Douillard et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm.agree import gather_ints
from plait.comm.base import Comm, Work
from plait.comm.checks import group_of
from plait.comm.operation import Group, Prepared
from plait.comm.texts import check_together, same_tensors
from plait.step import Engine
from plait.table.cells import Cell, move
from plait.table.collectives import Note, bytes_sent
from plait.table.mesh import AXES

NOTE = Note("outer")
AXIS = "replica"
"""The axis that separates the islands."""


class Island(Comm):
    """The ranks that share this rank's place on the replica axis, as a world; the whole world moves its tensors.

    Args:
        comm: the world of all ranks; its ledger has the island's lines too.
    """

    def __init__(self, comm: Comm) -> None:
        self.whole, mesh = comm, comm.mesh
        here = mesh.coordinates(comm.rank)
        self._at, here[AXIS] = here[AXIS], 0
        hosts = max(1, mesh.hosts // mesh.replica) if mesh.pipe == 1 else 1
        inside = replace(mesh, replica=1, hosts=hosts)
        how: dict[str, Any] = {"device": comm.device, "deadline": comm.deadline, "deterministic": comm.deterministic}
        super().__init__(inside, inside.rank(**here), **how)
        self.ledger, self.engine_watchers, self.attempt = comm.ledger, comm.engine_watchers, comm.attempt
        self.peers = tuple(comm.peers[self.outside(r)] for r in range(inside.size) if comm.peers)
        self.store = comm.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)  # the methods that move tensors

    def outside(self, rank: int) -> int:
        """Returns the number, in the whole world, of a rank of this island."""
        return self.whole.mesh.rank(**{**self.mesh.coordinates(rank), AXIS: self._at})

    def _group(self, axes: Sequence[str]) -> Group:
        axes = tuple(axes)
        if axes not in self._groups:
            group = group_of(self.mesh, self.rank, tuple(axis for axis in axes if axis != AXIS))
            self._groups[axes] = replace(group, ranks=tuple(map(self.outside, group.ranks)))
        return self._groups[axes]

    def _message(self, kind: str, tensor: Tensor, peer: int, note: Note) -> Work:
        return self.whole._message(kind, tensor, self.outside(peer), note)

    def begin(self, prepared: Prepared) -> Work:
        return self.whole.begin(prepared)

    def begin_step(self, number: int) -> None:
        self.whole.begin_step(number)

    @property
    def overlaps(self) -> bool:
        return self.whole.overlaps

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.whole.empty(numel, dtype)

    def _common(self, group: Group, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self.whole._common(group, numel, dtype)

    def wait_for_readers(self) -> None:
        self.whole.wait_for_readers()

    def wrote_common(self, *, later: bool = False) -> None:
        self.whole.wrote_common(later=later)

    def close(self) -> None:
        self.whole.close()


class DiLoCo:
    """Unites the weights of the islands.

    A fragment of the model may have a separate DiLoCo: ``names`` and ``first`` select the fragment and the time.

    Args:
        engine: trains on an ``Island``; its optimizer is the inner one.
        outer: makes the outer optimizer from a list of flat pieces: an element-wise one, without weight decay.
        every: the number of steps between two meetings.
        first: the step after which the islands meet for the first time; None: ``every``.
        delay: the number of steps between the first message and the outer update, to hide the sum.
        names: names of modules or parameters; none: the whole model.
        keep: the share of its weights that an island keeps, 0 to 1.
        state: where the engine has made steps, this rank's ``outer.state_dict()`` at that meeting; {} begins anew.

    Raises:
        ValueError: no island; impossible numbers; no such parameter; weights that differ between the islands.
    """

    def __init__(
        self,
        engine: Engine,
        outer: Callable[[list[nn.Parameter]], Optimizer],
        *,
        every: int,
        first: int | None = None,
        delay: int = 0,
        names: Sequence[str] = (),
        keep: float = 0.0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(engine.comm, Island):
            raise ValueError("DiLoCo: build the engine on plait.diloco.Island(comm), so that its steps stay inside")
        first = every if first is None else first
        if not 0 <= delay < first <= every or not 0 <= keep <= 1:
            raise ValueError(
                f"DiLoCo: every={every}, first={first}, delay={delay}, keep={keep}: give 0 <= delay < first <= every, "
                f"and keep from 0 to 1"
            )
        self.engine, self.comm, self.every, self.keep = engine, engine.comm.whole, every, keep
        self.delay, self.steps = delay, every - first
        """The steps since the islands last met."""
        self.runs = [
            owned.view
            for owned in engine.placed.owned
            if not names or any(f"{owned.name}.".startswith(f"{one}.") for one in names)
        ]
        """The runs of this rank that it unites."""
        split = tuple(axis for axis in engine.placed.strategy.optim.split if axis != AXIS)
        apart, cut = Cell(split, pending=(AXIS,)), Cell((*split, AXIS))
        (self.reduce,), (self.publish,) = move(apart, cut), move(cut, Cell(split))
        self.islands = self.comm.mesh.replica
        numel = sum(run.numel() for run in self.runs)
        dtypes = {run.dtype for run in self.runs} or {torch.float32}
        self.flat = self.comm.empty(numel + -numel % self.islands, min(dtypes, key=str)).zero_()
        self.fill()
        self._check(names, len(dtypes))
        own = self.flat.tensor_split(self.islands)[self.comm.mesh.index(self.comm.rank, (AXIS,))]
        self.mean = torch.empty_like(own)
        self.anchor = nn.Parameter(own.clone())
        """This rank's piece of the weights that all islands last had in common, which the outer optimizer updates."""
        self.outer = outer([self.anchor])
        if engine.steps and state is None:
            raise ValueError(
                "DiLoCo: the engine has made steps: give state, the outer.state_dict() of this rank's DiLoCo, or {}"
            )
        if state:
            self.outer.load_state_dict(dict(state))
        if any(group.get("weight_decay") for group in self.outer.param_groups):
            raise ValueError("DiLoCo: the outer optimizer sees differences, not weights: give weight_decay=0")

    def _check(self, names: Sequence[str], dtypes: int) -> None:
        error = None
        alike = same_tensors(self.comm, [self.flat], (AXIS,), NOTE)
        if not any(number for (number,) in gather_ints(self.comm, [len(self.runs)], AXES, NOTE)):
            error = ValueError(f"DiLoCo: the model has no parameter of {names}: give names of modules or parameters")
        elif dtypes > 1:
            error = ValueError("DiLoCo: the weights have several dtypes: give the names of those with one dtype")
        elif not alike:
            error = ValueError("DiLoCo: the islands' weights differ: build the model from one seed, or load one state")
        check_together(self.comm, error, AXES)

    def fill(self) -> None:
        """Copies the runs into the flat tensor."""
        for part, run in zip(self._parts(), self.runs, strict=True):
            part.copy_(run.detach())

    def step(self) -> bool:
        """Counts a step, and unites the islands when it is time; all ranks call it after each step.  Returns True if it
        united them.  ValueError in the middle of a step, which is then not counted."""
        self.engine.check_between_steps("diloco.step()")
        self.steps += 1
        if self.steps == self.every - self.delay:
            self.fill()
            if self.runs:
                self._sum = self.comm.reduce_scatter(self.mean, self.flat, self.reduce.axes, note=NOTE)
        if self.steps < self.every:
            return False
        self.steps = 0
        with torch.no_grad():
            new = self._update() if self.runs else {}
            runs = [owned.view for owned in self.engine.placed.owned]
            self.engine.placed.exchange_values([new.get(id(run), run.detach().clone()) for run in runs])
        return True

    def _update(self) -> dict[int, Tensor]:
        """Takes the mean of the islands, and applies the outer optimizer to it.  Returns the new values of the runs."""
        self._sum.wait()
        self.mean /= self.islands
        lag = self.anchor - self.mean
        self.anchor.copy_(lag)
        self.anchor.grad = lag  # the outer optimizer subtracts a part of it; plain SGD at rate 1 subtracts all
        self.outer.step()
        self.anchor.grad = None
        self.anchor.add_(self.mean)
        self.comm.all_gather(self.flat, self.anchor.detach(), self.publish.axes, NOTE).wait()
        new = {id(run): part for run, part in zip(self.runs, self._parts(), strict=True)}
        if self.keep:
            for run in self.runs:
                new[id(run)].lerp_(run, self.keep)
        return new

    def _parts(self) -> list[Tensor]:
        """The flat tensor's parts, each in the shape of its run."""
        numels = [run.numel() for run in self.runs]
        parts = self.flat[: sum(numels)].split(numels)
        return [part.view(run.shape) for part, run in zip(parts, self.runs, strict=True)]

    def bytes_sent(self) -> int:
        """The bytes that this rank sends at each meeting."""
        size = self.flat.nbytes
        return sum(bytes_sent(one.kind, size, self.comm.mesh.count(one.axes)) for one in (self.reduce, self.publish))
