"""Proves a layout that has never run, from the table, the plan and the schedule.

    schedule    written, completed, proved by ``schedule.check``: passes, sends and receives
    owners      every parameter is on one stage; tensor ranks' pieces fill it
    symmetry    every rank of the mesh behaves as its model rank
    buffers     for each kind of flat buffer: sums, owners, reads, the order of collectives, in two steps

Buffers with the same pieces in the same actions are one kind, which is proved once.  A failure raises ``Refuted``.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from plait.messages.progress import counted
from plait.predict.context import predict_context
from plait.predict.experts import predict_experts
from plait.predict.tensor import predict_tensor
from plait.referee.prove.decoder import LAYERS, TIED, PaperRun
from plait.referee.prove.machine import Machine
from plait.referee.prove.program import COLLECTIVES, Settled, write_program
from plait.referee.prove.scenes import Counterexample, Laid, Refuted, Scene, of_ranks, scene_of
from plait.referee.prove.symmetry import check_symmetry, model_ranks
from plait.schedule.actions import SENDS, Schedule, owners, placed
from plait.schedule.check import check, late_gradient
from plait.table.additions import additions
from plait.table.agreement import COUNTS, IN_STAGE, NUMBER_BYTES, num_reported
from plait.table.cells import ITEMSIZE
from plait.table.collectives import bytes_sent
from plait.table.mesh import DATA_AXES


@dataclass(frozen=True)
class Traffic:
    """The traffic of a step over all ranks: a collective counts once for each member, as in the ledger."""

    messages: int = 0
    bytes: int = 0

    def plus(self, messages: int, size: int) -> "Traffic":
        return Traffic(self.messages + messages, self.bytes + size)


@dataclass(frozen=True)
class Proved:
    """The proof in numbers."""

    ranks: int
    parameters: int
    """Elements of the model."""
    stages: int
    microbatches: int
    buffers: int
    """Flat buffers of all stages and tensor ranks."""
    kinds: int
    """Kinds of buffers that were carried out."""
    compared: int
    """Facts about ranks that were compared with their models'."""
    operations: int
    """Operations that the machine carried out."""
    traffic: Traffic
    """Traffic of a step."""
    order: tuple[str, ...]
    """The order of the axes over which a gradient's terms are added, innermost first."""
    in_order: bool
    """True if microbatches are added by number."""
    seconds: float
    """Processor time."""


def prove(run: PaperRun) -> Proved:
    """Proves a layout for every rank, element and microbatch; raises ``Refuted`` with a counterexample if it cannot.

    Raises:
        ValueError: the settings do not fit together; nothing has been proved.
    """
    start = time.process_time()
    mesh, strategy = run.mesh, run.strategy
    schedule = run.pipeline.completed(run.microbatches, strategy)
    if run.pipeline.num_stages == 1:
        check(schedule)  # a pipeline's is checked when it is completed
    laid = run.laid()
    check_parameters(run, laid)
    compared = 0
    for axes in dict.fromkeys(unit.axes for units in laid.values() for unit in units):
        alike = [unit for units in laid.values() for unit in units if unit.axes == axes]
        flats = {flat.bounds: flat for unit in alike for flat in unit.flats}
        compared += check_symmetry(mesh, strategy, list(flats.values()), axes)
    tied = _tied(run, schedule, laid)
    kinds, operations, traffic = _prove_buffers(run, schedule, laid)
    traffic = traffic.plus(tied.messages, tied.bytes)
    return Proved(
        ranks=mesh.size,
        parameters=run.decoder.num_parameters,
        stages=run.pipeline.num_stages,
        microbatches=run.microbatches,
        buffers=sum(len(unit.flats) for units in laid.values() for unit in units),
        kinds=kinds,
        compared=compared,
        operations=operations,
        traffic=_with_others(run, schedule, traffic),
        order=additions(strategy),
        in_order=late_gradient(schedule) is None,
        seconds=time.process_time() - start,
    )


def check_parameters(run: PaperRun, laid: Laid) -> None:
    """Checks that every parameter is on one stage, and that tensor ranks' pieces fill it, each element once."""
    decoder, ways = run.decoder, run.mesh.tensor
    stages = {s for s, _ in laid}
    names: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for (_, tensor), units in laid.items():
        for slot in (slot for unit in units for flat in unit.flats for slot in flat.slots):
            names[slot.name] += tensor == 0
            held[slot.name] += slot.numel
    for parameter in (p for link in decoder.links for p in (*decoder.parameters(link), *decoder.experts_of(link))):
        name, shape, _ = parameter
        copies = 2 if name == TIED and any(map(decoder.ties, run.links())) else 1
        if names[name] != copies:
            text = f"{names[name]} of {len(stages)} stages have it"
            raise Refuted(Counterexample("owners", text, parameter=name))
        cut = decoder.cut(parameter, ways)
        end = 0
        for start, stop in (r for t in range(ways if cut else 0) for r in (cut.ranges(t) if cut else ())):
            if start != end:
                raise Refuted(
                    Counterexample("owners", f"rows {min(start, end)}.. do not have one tensor rank", parameter=name)
                )
            end = stop
        due = math.prod(shape) * (1 if cut else ways)
        if ".mlp.experts." in name:
            due = math.prod(shape) // run.mesh.expert  # each rank of the expert axis has as many of them
        if held.pop(name) != due * copies or (cut and end != shape[cut.dim]):
            raise Refuted(Counterexample("owners", f"its pieces are not all of its {due:,} elements", parameter=name))
    if held:
        raise Refuted(Counterexample("owners", "it is not a parameter of the model", parameter=next(iter(held))))


def _tied(run: PaperRun, schedule: Schedule, laid: Laid) -> Traffic:
    """The traffic of a weight on two stages: the owners of a piece send each other its gradient, and add both.

    Raises ``Refuted`` if a rank of one stage and its counterpart own different pieces.
    """
    mesh, row, owner, traffic = run.mesh, run.strategy, owners(schedule), Traffic()
    stages = [stage for stage, links in enumerate(run.links()) if run.decoder.ties(links)]
    ways = mesh.count(row.optim.split)
    for tensor in range(mesh.tensor if stages else 0):
        one, other = (
            next(flat for unit in laid[stage, tensor] for flat in unit.flats if flat.slots[0].name == TIED)
            for stage in stages
        )
        if one != other:
            raise Refuted(Counterexample("sums", "its two stages do not cut it in the same places", parameter=TIED))
        for start, stop in (one.piece(ways, index) for index in range(ways)):
            if start < stop and owner[stages[0]] != owner[stages[1]]:
                size, times = (stop - start) * one.itemsize_in(row.grads), mesh.count(DATA_AXES) // ways
                traffic = traffic.plus(4 * times, 2 * size * times)
    return traffic


def _prove_buffers(run: PaperRun, schedule: Schedule, laid: Laid) -> tuple[int, int, Traffic]:
    """Returns the number of kinds of buffers, the number of operations carried out, and the traffic of all buffers."""
    mesh, strategy, owner = run.mesh, run.strategy, owners(schedule)
    cells = dict.fromkeys(("forward", "backward", "unshard", "publish"), strategy.params)
    cells |= dict.fromkeys(("microbatch", "step"), strategy.grads)
    known: dict[object, Traffic] = {}
    settled: dict[object, dict[int, Settled]] = {}
    written: dict[object, object] = {}
    operations, traffic = 0, Traffic()
    for (stage, tensor), units in counted("stages", list(laid.items())):
        line = tuple(action for action in schedule[owner[stage]] if action.stage == stage)
        for unit, index in [(one, i) for one in units for i in range(len(one.flats))]:
            flat, summed = unit.flats[index], bool(unit.summed and unit.summed[index])
            if summed and tensor:
                continue  # its scene has all tensor ranks
            facts = (
                flat.bounds,
                flat.itemsize,
                flat.real,
                unit.uses,
                unit.trainable[index],
                summed,
                unit.differentiated,
                unit.axes,
            )
            if facts not in settled:
                ranks = model_ranks(mesh, tensor=summed)
                settled[facts] = of_ranks(unit, index, mesh, strategy, ranks)
            here = {rank: one._replace(name=unit.name, layout=flat) for rank, one in settled[facts].items()}
            if (stage, facts) not in written:
                written[stage, facts] = write_program(line, here[0], mesh), facts
            kind = written[stage, facts]
            if kind not in known:
                scene = scene_of(line, here, mesh, strategy)
                Machine(scene).run()
                operations += sum(map(len, scene.programs.values()))
                known[kind] = _traffic(scene, {phase: flat.itemsize_in(cell) for phase, cell in cells.items()})
            traffic = traffic.plus(known[kind].messages, known[kind].bytes)
    return len(known), operations, traffic


def _traffic(scene: Scene, itemsize: Mapping[str, int]) -> Traffic:
    """The traffic of the collectives of a scene's ranks."""
    mesh, messages, size = scene.mesh, 0, 0
    for rank, program in scene.programs.items():
        for op in program:
            if op.kind in COLLECTIVES:
                whole = (op.stop - op.start) * itemsize[op.phase]
                root = op.root >= 0 and mesh.index(rank, op.axes) == op.root
                messages += 1
                size += bytes_sent(op.kind, whole, mesh.count(op.axes), root=root)
    return Traffic(messages, size)


def _with_others(run: PaperRun, schedule: Schedule, traffic: Traffic) -> Traffic:
    """Adds the traffic between stages, over the tensor and context axes inside passes, and of agreements."""
    mesh, decoder = run.mesh, run.decoder
    itemsize, alike = run.strategy.params.itemsize(ITEMSIZE[run.dtype]), mesh.count(IN_STAGE)
    sends = sum(action.kind in SENDS for action, _ in placed(schedule))
    steps = run.length // mesh.context
    handed = run.batch * steps * decoder.hidden * itemsize
    parts = mesh.tensor if run.cuts_time else 1
    traffic = traffic.plus(2 * sends * alike, sends * handed * alike // parts)
    for links in run.links():
        twice = [link for link in links if link.startswith(LAYERS)] if run.recompute == "full" else ()
        shapes = [(run.batch, steps)]
        entries = predict_tensor(
            decoder.sites(links, sequence=run.cuts_time), shapes, mesh, itemsize, sequence=run.cuts_time, twice=twice
        )
        gathered = decoder.gathered(links, mesh.tensor)
        tokens = [run.batch * steps]
        entries += predict_context(gathered, mesh, tokens, itemsize, ring=run.ring, twice=twice)
        layers = {link: (decoder.hidden, decoder.chosen) for link in links if decoder.experts_of(link)}
        entries += predict_experts(layers, mesh, tokens, itemsize, twice=twice, all_to_all=run.all_to_all)
        times = run.microbatches * alike
        traffic = traffic.plus(len(entries) * times, sum(entry.sent for entry in entries) * times)
    if mesh.size > 1:
        for numbers in (COUNTS, num_reported(run.microbatches, decoder.num_tensors)):
            traffic = traffic.plus(mesh.size, mesh.size * (mesh.size - 1) * NUMBER_BYTES * numbers)
    return traffic
