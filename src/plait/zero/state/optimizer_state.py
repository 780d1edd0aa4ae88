"""Moves the optimizers' state, whole and by parameter names, out of one layout and into any other.

    {"state":        {"blocks.0.weight": {"step": 3., "exp_avg": a whole tensor, ...}, ...},
     "param_groups": [{"params": ["blocks.0.weight", ...], "lr": 0.001, "initial_lr": 0.001, ...}, ...]}

    out   every rank lists its runs and describes their state; numbers are in this table         one exchange of texts
          the first rank that has a run sends its values to all                                    a broadcast each
    in    nothing is sent: a rank reads its runs out of the whole state

This is the format of torch's ``get_optimizer_state_dict``; the groups of several optimizers follow one another.
``optimizer.load_state_dict`` takes it too, and so the state of a plain optimizer, whose parameters have numbers instead
of names.  ``optimizer.state_dict()`` is refused, because a rank has pieces.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait.comm import Comm
from plait.comm.texts import gather_texts
from plait.table.collectives import Note
from plait.table.flat import Run, Slot
from plait.table.mesh import AXES
from plait.table.tensor_cut import TensorCut
from plait.zero.optim import OwnedOptimizer
from plait.zero.owned import Owned
from plait.zero.place import RunPlace

State: TypeAlias = Mapping[str, Any]
ELEMENTS, NUMBER, OTHER = "elements", "number", "other"
"""Kinds of state: a value per element of the parameter; one for all; a tensor of another shape, or a plain value."""
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Told:
    """A run of any rank, and the state that its optimizer keeps for it: kind, dtype, value or shape."""

    rank: int
    place: RunPlace
    values: dict[str, tuple[str, str, Any]]

    @property
    def key(self) -> tuple[str, int, int]:
        return self.place.run.slot.name, self.place.run.start, self.place.tensor_rank


class OptimizerState:
    """Reads and writes the state of a placed model's optimizers.

    Args:
        shapes: whole shapes of the model's parameters, by name.
        cuts: the cuts of parameters by the tensor axis, by name.
        first: the runs of this rank that no lower rank has.
        trainable: the parameters that were not frozen when the model was placed.
    """

    def __init__(
        self,
        comm: Comm,
        owner: OwnedOptimizer,
        shapes: Mapping[str, tuple[int, ...]],
        cuts: Mapping[str, TensorCut],
        first: Sequence[Owned],
        *,
        trainable: Collection[str],
    ) -> None:
        self.comm, self.owner, self.shapes, self.cuts, self.first = comm, owner, shapes, cuts, first
        self.trainable = frozenset(trainable)
        self._by_view = {id(piece.view): piece for piece in owner.owned}
        self._exact: dict[Tensor, dict[str, Any]] = {}
        """Values that torch would convert to the parameter's dtype while an optimizer loads."""
        for optimizer in owner.optimizers:  # hooks on the user's objects: see docs/guide/your-own-loop.md
            optimizer.register_state_dict_pre_hook(self._refuse)
            optimizer.register_load_state_dict_pre_hook(self.cut)
            optimizer.register_load_state_dict_post_hook(self._as_saved)

    # ---- out --------------------------------------------------------------------------------------------------------

    def of(self, piece: Owned) -> dict[str, Any]:
        """The state that an optimizer keeps for a run; empty before its first gradient."""
        found = (optimizer.state.get(piece.view) for optimizer in self.owner.optimizers)
        return next((state for state in found if state), {})

    def by_name(self, *, elements: bool) -> dict[str, Any]:
        """The whole state, on the CPU of every rank; all ranks call it together.

        Without ``elements``, state with a value per element of the parameter is an empty tensor on meta.
        """
        mine = {(o.name, o.run.start, o.flat.tensor_rank): o for o in self.first}
        state: dict[str, dict[str, Any]] = {name: {} for name in self.shapes if name in self.trainable}
        for one in self._told():
            name = one.place.run.slot.name
            here, values = self.of(mine[one.key]) if one.rank == self.comm.rank else {}, state[name]
            for key, (kind, dtype, given) in one.values.items():
                if kind == NUMBER:
                    number = torch.tensor(given, dtype=getattr(torch, dtype)) if dtype else given
                    if values.setdefault(key, number) != number and number == number:
                        raise ValueError(f"the ranks have different {key!r} of {name!r}: {values[key]} and {number}")
                    continue
                if kind == ELEMENTS and not elements:
                    values[key] = torch.empty(self.shapes[name], dtype=getattr(torch, dtype), device="meta")
                    continue
                shape = (one.place.run.numel,) if kind == ELEMENTS else tuple(given)
                sent = torch.empty(shape, dtype=getattr(torch, dtype), device=self.comm.device)
                if key in here:
                    sent.copy_(here[key].reshape(shape))
                self.comm.broadcast(sent.view(-1), AXES, one.rank, note=Note("state", name)).wait()
                if kind == OTHER:
                    values[key] = sent.cpu()
                    continue
                whole = values.setdefault(key, torch.empty(self.shapes[name], dtype=sent.dtype))
                for region, part in one.place.regions(sent):
                    whole[tuple(slice(*ends) for ends in region)] = part.cpu()
        return {"state": state, "param_groups": [{**options, "params": list(own)} for own, options in self.groups()]}

    def elements_of(self, piece: Owned) -> dict[str, Tensor]:
        """The state that an optimizer keeps for each element of a run, in its own memory."""
        return {key: value for key, value in self.of(piece).items() if _per_element(piece, value)}

    def _told(self) -> list[Told]:
        """Returns every run of the model, with a description of its state, by rank."""
        found, error, text = [], None, ""
        try:
            _check_keys(self.owner.optimizers)
            text = json.dumps([_described(piece, self.of(piece)) for piece in self.first])
        except ValueError as problem:
            error = problem
        for rank, row in enumerate(gather_texts(self.comm, text, Note("state"), error)):
            for name, shape, start, stop, tensor_rank, values in json.loads(row):
                run, whole = Run(Slot(name, tuple(shape), 0), start, stop, 0), tuple(shape) == self.shapes[name]
                place = RunPlace(run, None if whole else self.cuts.get(name), tensor_rank)
                found.append(Told(rank, place, {key: tuple(value) for key, value in values.items()}))
        return found

    def groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yields every group of the optimizers: the names of its parameters, and its options."""
        for optimizer in self.owner.optimizers:
            for group, own in zip(optimizer.param_groups, self.owner.groups[optimizer], strict=True):
                yield own, _options(group)

    def classes(self) -> list[str]:
        """For each group, the class of its optimizer and its base classes: ``AdamW < Adam``."""
        return [_classes(optimizer) for optimizer in self.owner.optimizers for _ in self.owner.groups[optimizer]]

    # ---- in ---------------------------------------------------------------------------------------------------------

    def load(self, state: State) -> None:
        """Loads a whole state, by names or, for a single optimizer, by numbers.

        Raises:
            ValueError: groups or parameters that differ from the optimizers'; a state that cannot be cut.
        """
        self.check(state)  # all are checked before any is loaded
        for optimizer in self.owner.optimizers:
            optimizer.load_state_dict(dict(state))

    def check(self, state: State) -> None:
        """Raises ValueError if groups or parameters differ from the optimizers'."""
        for optimizer in self.owner.optimizers:
            groups, values = self._named(optimizer, state)
            self._fitting(optimizer, groups)
        known = {name for groups in self.owner.groups.values() for names in groups for name in names}
        with_state = (n for n, own in values.items() if own or n not in self.shapes)  # empty if no optimizer has it
        if surplus := sorted({*with_state, *(name for group in groups for name in group["params"])} - known):
            raise ValueError(
                f"the state has {len(surplus)} parameters that no optimizer of the engine has: {', '.join(surplus[:3])}"
            )
        if frozen := sorted({name for name in known if values.get(name)} - self.trainable):
            raise ValueError(
                f"the state has values of {len(frozen)} parameters that were frozen when the engine was built, so that "
                f"they have no place here: {', '.join(frozen[:3])}. Freeze them after the load"
            )

    def check_classes(self, state: State, classes: Sequence[str]) -> None:
        """Raises ValueError if a group was saved by an optimizer of another class; base and subclasses are fine.

        Two classes may keep values of the same names (Adam, RAdam) with other meanings.
        """
        saved = {frozenset(group["params"]): one for group, one in zip(state["param_groups"], classes, strict=True)}
        for optimizer in self.owner.optimizers:
            own = _classes(optimizer).split(" < ")
            for names in filter(None, self.owner.groups[optimizer]):
                there = saved[frozenset(names)].split(" < ")
                if own[0] not in there and there[0] not in own:
                    raise ValueError(
                        f"the state of the group of {names[0]!r} is that of {there[0]}, and its optimizer here is "
                        f"{own[0]}: build it with {there[0]}, or with a class that is made from it"
                    )

    def _named(self, optimizer: Optimizer, state: State) -> tuple[list[State], Mapping[str, State]]:
        """Returns groups and values by name; raises ValueError if those by numbers are not the optimizer's."""
        groups, values, own = state["param_groups"], state["state"], self.owner.groups[optimizer]
        given = [name for group in groups for name in group["params"]]
        if not given or isinstance(given[0], str):
            return list(groups), values
        sizes, own_sizes = ([len(x) for x in names] for names in ([g["params"] for g in groups], own))
        if sizes != own_sizes:
            raise ValueError(
                f"the state has groups of {sizes} parameters, with numbers instead of names, and the optimizer "
                f"{type(optimizer).__name__} groups of {own_sizes}: build it as the one that was saved"
            )
        known = dict(zip(given, [name for names in own for name in names], strict=True))
        values = {known[number]: value for number, value in values.items()}
        return [{**group, "params": [known[number] for number in group["params"]]} for group in groups], values

    def _fitting(self, optimizer: Optimizer, groups: Sequence[State]) -> list[State | None]:
        """For each group of the optimizer, the one that fits; raises ValueError if one is missing.

        Groups without parameters go by their order; None if their number differs.
        """
        there = {frozenset(group["params"]): group for group in groups}
        without = [group for group in groups if not group["params"]]
        own = [one for one in self.owner.optimizers for names in self.owner.groups[one] if not names]
        if len(own) != len(without):  # the state may be only this optimizer's
            own = [one for one in own if one is optimizer]
        pairs = zip(own, without, strict=True) if len(own) == len(without) else ()
        empty = iter([group for one, group in pairs if one is optimizer])
        kind = type(optimizer).__name__
        options = [key for key, value in optimizer.defaults.items() if value is not None and type(value) is not bool]
        found: list[State | None] = []
        for number, names in enumerate(self.owner.groups[optimizer]):
            saved = there.get(frozenset(names)) if names else next(empty, None)
            if names and saved is None:
                raise ValueError(
                    f"no group of the state has the parameters of group {number} of {kind}, {len(names)} of them "
                    f"({', '.join(names[:3])}, ...): build its groups as they were when the state was saved"
                )
            lacking = [] if saved is None else [key for key in options if key not in saved]
            if saved is not None and lacking and names:
                raise ValueError(
                    f"the state is another optimizer's: its group of {names[0]!r} has no {', '.join(lacking)}, which "
                    f"{kind} needs, but {', '.join(key for key in saved if key != 'params')}. Build that optimizer, "
                    f"or begin with a new state by leaving this one out"
                )
            found.append(None if lacking else saved)
        return found

    def cut(self, optimizer: Optimizer, state: State) -> dict[str, Any]:
        """Returns this rank's part of a state for one optimizer, in the form in which torch loads it.

        The optimizer's values per element of a run are overwritten: a rank never has one run twice at a time.
        """
        groups, values = self._named(optimizer, state)
        saved = self._fitting(optimizer, groups)
        for view in (view for group in optimizer.param_groups for view in group["params"]):
            for key, value in values.get((piece := self._by_view[id(view)]).name, {}).items():
                _check_cut(piece, key, value)  # all of them, before any is written
        pieces: list[dict[str, Any]] = []
        own_groups = []
        for group, given in zip(optimizer.param_groups, saved, strict=True):
            start = len(pieces)
            for piece in (self._by_view[id(view)] for view in group["params"]):
                here = optimizer.state.get(piece.view, {})
                pieces.append({k: _read(piece, v, here.get(k)) for k, v in values.get(piece.name, {}).items()})
                self._exact[piece.view] = {k: v for k, v in pieces[-1].items() if k != "step" and not _may_be_cast(v)}
            options = _options(group if given is None else given)
            own_groups.append({**options, "params": list(range(start, len(pieces)))})
        return {"state": {i: piece for i, piece in enumerate(pieces) if piece}, "param_groups": own_groups}

    def _as_saved(self, optimizer: Optimizer) -> None:
        """Restores, after torch's own load, the dtype of values that are not per element of a run."""
        for view, values in self._exact.items():
            own = optimizer.state.get(view, {})
            own |= {k: v.to(own[k].device) if isinstance(v, Tensor) else v for k, v in values.items() if k in own}
        self._exact.clear()

    # ---- the optimizer's own calls ----------------------------------------------------------------------------------

    def _refuse(self, optimizer: Optimizer) -> None:
        raise ValueError(
            f"{type(optimizer).__name__}.state_dict() would have only this rank's pieces: call "
            f"engine.optimizer_state_dict() on all ranks, which is whole and by name, and "
            f"engine.load_optimizer_state_dict(state)"
        )


def _classes(optimizer: Optimizer) -> str:
    """The names of the optimizer's class and its base classes, without those that every optimizer has."""
    made_from = [one for one in type(optimizer).__mro__ if one is not Optimizer and issubclass(one, Optimizer)]
    return " < ".join(one.__name__ for one in made_from)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of all options of a group, except for its parameters."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in options.items()}


def _described(piece: Owned, state: State) -> list[Any]:
    """Describes a run and its state for the table; raises ValueError for a value that is unknown or cannot be cut."""
    values: dict[str, tuple[str, str, Any]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and not is_plain(value):
            raise ValueError(
                f"the optimizer's {key!r} of {piece.name!r} is a {type(value).__name__}, a tensor subclass, "
                f"whose memory plait does not know: it trains, but this state is not brought together or saved. Keep "
                f"plain tensors in the state (codes and scales apart), or save each rank's part yourself"
            )
        if _per_element(piece, value):
            values[key] = (ELEMENTS, str(value.dtype)[6:], None)
        elif isinstance(value, Tensor) and not value.dim() and not value.is_complex():
            values[key] = (NUMBER, str(value.dtype)[6:], value.item())
        elif isinstance(value, Tensor) and piece.run.whole and piece.place.cut is None:
            values[key] = (OTHER, str(value.dtype)[6:], list(value.shape))
        elif isinstance(value, _PLAIN):
            values[key] = (NUMBER, "", value)
        else:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the optimizer's {key!r} of {piece.name!r} is {what}, which cannot be put together from this rank's "
                f"{piece.run.numel} of {piece.run.slot.numel} elements: give a number, or a tensor shaped like the "
                f"parameter"
            )
    slot, run = piece.run.slot, piece.run
    return [piece.name, slot.shape, run.start, run.stop, piece.flat.tensor_rank, values]


def _per_element(piece: Owned, value: Any) -> bool:
    return is_plain(value) and bool(value.shape == piece.view.shape)


def _check_keys(optimizers: Sequence[Optimizer]) -> None:
    """Raises ValueError if an optimizer keeps state that belongs to no parameter."""
    for optimizer in optimizers:
        if strange := [key for key in optimizer.state if not isinstance(key, Tensor)]:
            raise ValueError(
                f"{type(optimizer).__name__} keeps {strange[0]!r}, which belongs to no parameter, and the state of "
                f"optimizers goes by parameters: keep it in a group's options, or save it yourself (extra=)"
            )


def _may_be_cast(value: Any) -> bool:
    """True for moments, which take their parameter's present dtype; numbers, counters and masks keep theirs."""
    return isinstance(value, Tensor) and value.dim() > 0 and (value.is_floating_point() or value.is_complex())


def _check_cut(piece: Owned, key: str, value: Any) -> None:
    """Raises ValueError if a rank cannot have its part of a value."""
    shape = tuple(value.shape) if hasattr(value, "shape") else ()
    if shape and shape != piece.place.shape and not (piece.run.whole and piece.place.cut is None):
        raise ValueError(
            f"{key!r} of {piece.name!r} has shape {shape}, the parameter {piece.place.shape}: the state is not one "
            f'number per element, so a row that cuts parameters cannot take it; use cut="tensor", or a row that keeps '
            f"the optimizer state full (ddp)"
        )


def _read(piece: Owned, value: Any, here: Any) -> Any:
    """Returns this rank's part of one value of a whole state, in the memory of ``here`` if it fits."""
    if not hasattr(value, "shape"):
        return copy.deepcopy(value)
    shape = tuple(value.shape)
    if shape != piece.place.shape:
        return torch.as_tensor(value[tuple(slice(0, size) for size in shape)]).clone()
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, torch.dtype):  # for example an array
        dtype = torch.as_tensor(value[tuple(slice(0, 0) for _ in shape)]).dtype
    fits = _per_element(piece, here) and here.dtype == dtype
    found = here if fits else torch.empty_like(piece.view, dtype=dtype)
    piece.place.fill(value, found)
    return found


def is_plain(value: Any) -> bool:
    """True for a tensor of torch's own class; a subclass (an 8-bit state) need not have one memory."""
    return isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter, nn.Buffer)
