"""An engine for ``torch.distributed.checkpoint``: ``dcp.save({"app": plait.Checkpointed(engine)}, ...)``.

    app.model.blocks.0.weight                      regions of the whole tensor, as this rank holds them
    app.optimizer.state.blocks.0.weight.exp_avg    the same; numbers and whole tensors as they are
    app.optimizer.param_groups.0.lr                as torch's ``get_optimizer_state_dict`` names it
    app.ema.blocks.0.weight                        an average
    app.plait                                      groups, numbers, step, seed, loss scale, exactly

DCP asks a tensor for its regions (``__create_write_items__``, ``__create_chunk_list__``) and their memory
(``__get_tensor_shard__``), so it needs no planner of ours; a load reads into the engine's own memory.  It asks for no
key that isn't in ``state_dict()``, so a trial step of another optimizer finds the state that this one has not made yet.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from plait.checkpoint.snapshot import RankPiece, pieces_of
from plait.checkpoint.values import InFile, decoded, encoded
from plait.step import EMA, Engine
from plait.table.layout import Region, extent
from plait.torch_private import make_wrapper_subclass
from plait.zero.elementwise import rebuilt
from plait.zero.optim import Owned
from plait.zero.state.pieces import StatePiece


class Checkpointed:
    """A run as a ``Stateful`` of ``torch.distributed.checkpoint``; each rank writes and reads its own pieces::

        dcp.save({"app": plait.Checkpointed(engine)}, checkpoint_id="runs/step-100")
        dcp.load({"app": plait.Checkpointed(engine)}, checkpoint_id="runs/step-100")

    The engine that loads may have any other layout, with the same parameters, optimizers, seed and average.  DCP has no
    hashes, and makes no promise for a save that is interrupted; ``plait.save`` has both.

    Args:
        engine: an engine between two steps.
        ema: an average to save and load too.

    Raises:
        ValueError: ranks that are threads, which DCP takes for one each.
    """

    def __init__(self, engine: Engine, *, ema: EMA | None = None) -> None:
        size = engine.comm.world_size
        if size > 1 and not (distributed.is_initialized() and distributed.get_world_size() == size):
            raise ValueError(
                f"torch.distributed.checkpoint knows ranks that are processes of torch.distributed, and these {size} "
                f"are not (threads, or processes that share memory): use plait.save and plait.load, or start processes "
                f"with --world process"
            )
        if ema is not None:
            ema.check_of(engine)
        self.engine, self.ema = engine, ema

    def state_dict(self) -> dict[str, Any]:
        """The state that DCP writes, or reads into; all ranks call it together."""
        engine = self.engine
        engine.check_between_steps("plait.Checkpointed")
        shapes, aliases = engine.placed.directory.shapes, engine.placed.directory.aliases
        held: dict[str, list[RankPiece]] = {}
        for piece in pieces_of(engine, self.ema):
            held.setdefault(piece.name, []).append(piece)
        state: dict[str, Any] = {
            "model": {alias: Pieces.of(*shapes[name], held.get(f"model/{name}", ())) for alias, name in aliases.items()}
        }
        about: dict[str, Any] = {"run": engine.step_state(), "names": {n: list(s) for n, (s, _) in shapes.items()}}
        if engine.placed.optimizer_state is not None:
            now = engine.optimizer_state_dict(elements=False)
            about["optimizer"] = {**now, "state": _in_file(now["state"])}
            about["optimizer_classes"] = engine.placed.optimizer_state.classes()
            values: dict[str, dict[str, Any]] = {
                name: {
                    key: Pieces.of(value.shape, value.dtype, held.get(f"optimizer/{key}/{name}", ()))
                    if isinstance(value, Tensor) and value.is_meta
                    else value
                    for key, value in kept.items()
                }
                for name, kept in now["state"].items()
            }
            for name, key, value in self._to_come():
                values.setdefault(name, {}).setdefault(key, value)
            state["optimizer"] = {"state": values, "param_groups": now["param_groups"]}
        if self.ema is not None:
            names = sorted({aliases.get(name, name) for name in engine.placed.exchange.names})
            state["ema"] = {name: Pieces.of(*shapes[name], held.get(f"ema/{name}", ())) for name in names}
            about["ema"] = self.ema.decay
        return {**state, "plait": json.dumps(encoded(about, {}))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the values that DCP has read; all ranks call it together.

        Raises:
            ValueError: they belong to another model, optimizer, seed or average.  DCP has overwritten values by then:
                build the engine anew.
        """
        engine = self.engine
        shapes = engine.placed.directory.shapes

        def tensor(name: str) -> Any:
            key, _, parameter = name.partition("/")
            kept = state_dict["optimizer"]["state"].get(parameter, {})
            return kept.get(key, torch.empty(shapes[parameter][0], device="meta"))

        about = decoded(saved := json.loads(state_dict["plait"]), lambda name: name)
        names = {name: list(shape) for name, (shape, _) in shapes.items()}
        if about["names"] != names:
            other = sorted(n for n in {*names, *about["names"]} if names.get(n) != about["names"].get(n))
            raise ValueError(
                f"what was saved is of another model: {len(other)} of its tensors are not this one's, as {other[0]!r}, "
                f"saved as {about['names'].get(other[0])}, here {names.get(other[0])}"
            )
        for what, here, there in (
            ("an optimizer", bool(engine.optimizers), "optimizer" in about),
            ("an average", self.ema is not None, "ema" in about),
        ):
            if here != there:
                raise ValueError(f"{what} {'was' if there else 'was not'} saved, and {'is' if here else 'is not'} here")
        if engine.placed.optimizer_state is not None and "optimizer_classes" in about:
            engine.placed.optimizer_state.check_classes(about["optimizer"], about["optimizer_classes"])
        engine.load_step_state(about["run"])
        engine.placed.publish()
        if engine.optimizers:
            engine.load_optimizer_state_dict(decoded(saved, tensor)["optimizer"])
        if self.ema is not None:
            self.ema.decay = about["ema"]

    def _to_come(self) -> Iterator[tuple[str, str, Any]]:
        """State that this rank's optimizers will make for parameters without a gradient so far, as zeros."""
        state = self.engine.placed.optimizer_state
        assert state is not None
        groups = {
            id(view): (optimizer, group)
            for optimizer in self.engine.optimizers
            for group in optimizer.param_groups
            for view in group["params"]
        }
        for owned in self.engine.placed.owned:
            if id(owned.view) in groups and not state.of(owned):
                first = self.engine.placed.norm.counts(owned)
                yield from _after_a_step(owned, *groups[id(owned.view)], first=first)


def _in_file(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Numbers, and names in the place of tensors."""
    return {
        name: {
            key: InFile(f"{key}/{name}") if isinstance(value, Tensor) and (value.dim() or value.is_meta) else value
            for key, value in kept.items()
        }
        for name, kept in state.items()
    }


def _after_a_step(
    owned: Owned, optimizer: Optimizer, group: Mapping[str, Any], *, first: bool
) -> Iterator[tuple[str, str, Any]]:
    """The state that a new optimizer of this class makes for a run, as zeros: name, key, values."""
    trial = nn.Parameter(torch.zeros_like(owned.view))
    trial.grad = torch.zeros_like(trial)
    new = rebuilt(optimizer, [{**group, "params": [trial]}])
    new.step()
    for key, value in new.state[trial].items():
        if isinstance(value, Tensor) and value.shape == owned.view.shape:
            pieces = list(StatePiece.of(owned.name, key, owned.place, torch.zeros_like(value), first=first))
            yield owned.name, key, Pieces.of(owned.place.shape, value.dtype, pieces)
        else:
            yield owned.name, key, torch.zeros_like(value) if isinstance(value, Tensor) else value


class Pieces(Tensor):
    """A whole tensor's shape and dtype, and this rank's regions of it, for DCP to write or to fill."""

    pieces: list[RankPiece | StatePiece]
    written: bool

    @classmethod
    def of(cls, shape: Iterable[int], dtype: torch.dtype, pieces: Iterable[RankPiece | StatePiece]) -> Tensor:
        """An empty tensor has no regions, and is itself."""
        size = torch.Size(shape)
        if not math.prod(size):
            return torch.empty(size, dtype=dtype)
        here: list[RankPiece | StatePiece] = list(pieces)
        made: Pieces = make_wrapper_subclass(cls, size, dtype=here[0].tensor.dtype if here else dtype)
        made.pieces, made.written = here, False
        return made

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        self.written = True
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(start for start, _ in piece.region)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(piece.region), TensorProperties.create_from_tensor(piece.tensor), self.size()
                ),
            )
            for piece in self.pieces
            if piece.first
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.written = False
        return [_chunk(piece.region) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Finds pieces by offset for a write, by number for a read, as tied pieces may begin at one place."""
        if not self.written:
            assert index.index is not None
            return self.pieces[index.index].tensor
        starts = tuple(index.offset or ())
        return next(p.tensor for p in self.pieces if p.first and tuple(start for start, _ in p.region) == starts)

    def __getitem__(self, slices: Any) -> Tensor:
        """One of the regions."""
        region = tuple((one.start, one.stop) for one in slices)
        return next(piece.tensor for piece in self.pieces if piece.region == region)

    def new_empty(self, size: Any, **_: Any) -> Tensor:  # type: ignore[override]
        """The beginning of a copy by ``dcp.async_save``, which then copies the pieces into it."""
        return Pieces.of(self.size(), self.dtype, ())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pieces({tuple(self.shape)}, {self.dtype}, {[piece.region for piece in self.pieces]})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        raise TypeError(f"{function} of a tensor of which a rank has pieces only: it is for DCP to save and to load")


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start for start, _ in region), torch.Size(extent(region)))
