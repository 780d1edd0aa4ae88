"""The memory of the fullest rank, from the pieces of its buffers and its program.

state         parameters at rest, gradients, optimizer, master weights                           exact: predict.memory
gathered      whole parameters at once, at most, one unit ahead, and copies kept for backwards    an upper bound
gradients     whole gradients of a microbatch that are being reduced: two units of each stage     an upper bound
activations   of the microbatches in flight on each stage, and of the block that is recomputed    an estimate
              masks of a context axis, tokens of other ranks that come to experts

Activations are those of ``predict.activations``: a norm and a loss as plait's own decoder writes them, which keep more
than fused ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from plait.messages.wording import fitting, human
from plait.predict.activations import DecoderSizes, decoder, expert_bytes
from plait.predict.memory import held
from plait.referee.prove.decoder import PaperRun
from plait.referee.prove.program import settle_all, write_program
from plait.referee.prove.scenes import Laid
from plait.schedule.actions import Line, Schedule, activations, owners
from plait.table.agreement import DATA_ORDER
from plait.table.cells import ITEMSIZE, TABLE
from plait.table.flat import UnitLayout


@dataclass(frozen=True)
class Room:
    """Bytes of one rank."""

    rank: int
    state: int
    gathered: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        return self.state + self.gathered + self.gradients + self.activations

    def __str__(self) -> str:
        kinds = ("state", "gathered", "gradients", "activations")
        return ", ".join(f"{name} {human(getattr(self, name))}" for name in kinds)


RECOMPUTE = ("selective", "full")
AROUND = {"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"}
"""The links that are no blocks, in the words of ``predict.activations``."""


def room_of(run: PaperRun, schedule: Schedule, laid: Laid) -> Room:
    """The memory of the rank that needs most."""
    owner, links = owners(schedule), run.links()
    rooms, known = [], dict[object, tuple[int, int]]()
    for pipe, line in enumerate(schedule):
        stages = [s for s in owner if owner[s] == pipe]
        each = {s: _activations(run, links[s]) for s in stages}
        most = max(accumulate(each[a.stage] * activations(a) if a.stage in each else 0 for a in line), default=0)
        most += _again(run, [link for s in stages for link in links[s]]) + _sizes(run).masks
        most += round(expert_bytes(_sizes(run), all_to_all=run.all_to_all))
        for tensor in range(run.mesh.tensor):
            units = {s: laid[s, tensor] for s in stages}
            flats = [flat for of_stage in units.values() for unit in of_stage for flat in unit.flats]
            kind = pipe, tuple(flat.numel for flat in flats)
            if kind not in known:
                known[kind] = _gathered(run, line, units, run.mesh.rank(pipe=pipe, tensor=tensor)), _reduced(run, units)
            for data in range(run.mesh.count(DATA_ORDER) if any(not flat.even for flat in flats) else 1):
                replica, shard = divmod(data, run.mesh.shard)
                rank = run.mesh.rank(pipe=pipe, replica=replica, shard=shard, tensor=tensor)
                rooms.append(Room(rank, _state(run, units, rank), *known[kind], most))
    return max(rooms, key=lambda room: room.total)


def changes(run: PaperRun, schedule: Schedule, laid: Laid, need: int) -> str:
    """The single changes of a run with which its fullest rank has room, with what that rank then needs."""
    tried = {f"--recompute {kind}": room_of(replace(run, recompute=kind), schedule, laid) for kind in RECOMPUTE}
    if run.mesh.tensor > 1 and not run.sequence and not run.decoder.shared_ffn:
        cut = replace(run, sequence=True)
        tried["--sequence-parallel"] = room_of(cut, schedule, cut.laid())
    if run.mesh.expert > 1:
        tried["--all-to-all"] = room_of(replace(run, all_to_all=True), schedule, laid)
    mixed = run.strategy.params.dtype
    sharded = replace(run, strategy=TABLE["zero3"].mixed(mixed) if mixed else TABLE["zero3"])
    completed = run.pipeline.completed(run.microbatches, sharded.strategy)
    tried["--strategy zero3"] = room_of(sharded, completed, sharded.laid())
    return fitting({name: room.total for name, room in tried.items()}, need, run.memory or 0)


def _state(run: PaperRun, units: Mapping[int, Sequence[UnitLayout]], rank: int) -> int:
    of_rank = held([unit for of_stage in units.values() for unit in of_stage], run.mesh, run.strategy, rank, run.states)
    return of_rank.params + of_rank.grads + (0 if run.strategy.optim.device else of_rank.optimizer)


def _gathered(run: PaperRun, line: Line, units: dict[int, Sequence[UnitLayout]], rank: int) -> int:
    """The most bytes of whole parameters that are open or kept at once."""
    if run.mesh.count(run.strategy.params.split) == 1:
        return 0
    flats = {(s, u.name, i): f for s in units for u in units[s] for i, f in enumerate(u.flats)}
    sizes = {key: flat.itemsize_in(run.strategy.params) for key, flat in flats.items()}
    open_, kept, most = dict[object, int](), dict[object, int](), 0
    for op in write_program(line, settle_all(units, run.mesh, run.strategy, rank), run.mesh):
        if op.kind == "open":
            open_[op.flat] = flats[op.flat].numel * sizes[op.flat]
        elif op.kind == "keep":
            kept[op.flat] = (op.stop - op.start) * sizes[op.flat]
        elif op.kind in ("close", "forget"):
            (open_ if op.kind == "close" else kept).pop(op.flat, None)
        most = max(most, sum(open_.values()) + sum(kept.values())) if op.kind in ("open", "keep") else most
    ahead = max((flat.numel * sizes[key] for key, flat in flats.items()), default=0) if most else 0
    return most + (ahead if run.pipeline.hold is None or run.pipeline.num_stages == 1 else 0)


def _reduced(run: PaperRun, units: Mapping[int, Sequence[UnitLayout]]) -> int:
    """Bytes of the two largest whole gradients of each stage, which has buffers of its own."""
    if run.mesh.count(run.strategy.grads.split) == 1:
        return 0
    stages = ([flat for unit in of_stage for flat in unit.flats] for of_stage in units.values())
    sizes = (sorted(flat.numel * flat.itemsize_in(run.strategy.grads) for flat in flats) for flats in stages)
    return sum(sum(of_stage[-2:]) for of_stage in sizes)


def _again(run: PaperRun, links: Sequence[str]) -> int:
    """Bytes of the block whose activations are made again while its backward runs."""
    blocks = [link for link in links if link not in AROUND]
    return _activations(replace(run, recompute=None), blocks[:1]) if run.recompute == "full" and blocks else 0


def _activations(run: PaperRun, links: Sequence[str]) -> int:
    """Bytes of one microbatch's activations in some links."""
    model, sizes = run.decoder, _sizes(run)
    mixed = [link for link in links if link in AROUND or not (model.experts and model.is_dense(link))]
    dense = replace(sizes, hidden=model.dense_ffn, experts=0, chosen=0)
    found = decoder(sizes, [AROUND.get(link, "blocks") for link in mixed], run.recompute)
    return found + decoder(dense, ["blocks"] * (len(links) - len(mixed)), run.recompute)


def _sizes(run: PaperRun) -> DecoderSizes:
    """A microbatch in the decoder on one rank."""
    model = run.decoder
    return DecoderSizes(
        batch=run.batch,
        length=run.length,
        width=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        hidden=model.shared_ffn if model.experts else model.ffn,
        experts=model.experts,
        chosen=model.chosen,
        expert_hidden=model.ffn if model.experts else 0,
        expert_ranks=run.mesh.expert,
        vocabulary=model.vocab,
        itemsize=run.strategy.params.itemsize(ITEMSIZE[run.dtype]),
        dropout=False,
        ways=run.mesh.tensor,
        sequence=run.cuts_time,
        context=run.mesh.context,
        head_dim=model.head,
        gated=model.gated,
        projections=model.projections() if model.latent else (),
        ring=run.ring,
    )
