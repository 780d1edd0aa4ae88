"""From a layout to the ranks and programs that the machine carries out: all of them, or those of one claim.

    whole        every rank, every buffer                                       small meshes, and tests
    of_flat      the ranks that share one flat buffer, and its operations       sums, owners, reads
    of_pipe      one rank for each coordinate of the pipe axis                  sends, receives, agreements

The parts are enough where ranks behave the same: see ``symmetry``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plait.referee.prove.claims import Counterexample, Refuted, Scene
from plait.referee.prove.program import (
    Buffered,
    Key,
    Op,
    Program,
    Settled,
    Token,
    Tokens,
    bind,
    settle_all,
    write_program,
    write_tokens,
)
from plait.referee.prove.sums import Sums, promised
from plait.schedule.actions import (
    ADDS_GRADIENTS,
    PASSES,
    Action,
    Line,
    Schedule,
    count_microbatches,
    count_stages,
    owners,
)
from plait.table.cells import Moves, Strategy, moves
from plait.table.flat import UnitLayout
from plait.table.mesh import Mesh

Laid = Mapping[tuple[int, int], Sequence[UnitLayout]]
"""The units of each stage (first) on each tensor rank (second)."""


OF_PIPE = ("pass", "send", "recv", "report")
"""Operations that concern several stages."""
OF_GRADIENTS = ("count", "clear", "gradient", "microbatch", "add", "summed", "step")
"""Operations on gradients, which concern no parameter."""


@dataclass(frozen=True)
class Played:
    """A scene and the programs of its ranks."""

    scene: Scene
    programs: Mapping[int, Program]


def whole(
    schedule: Schedule, laid: Laid, mesh: Mesh, strategy: Strategy, sums: Sums, path: Moves | None = None
) -> Played:
    """All ranks of a mesh, with all their operations."""
    owner = owners(schedule)
    programs: dict[int, Program] = {}
    flats: dict[int, dict[Key, Settled]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        stages = {s: laid[s, at["tensor"]] for s in owner if owner[s] == at["pipe"]}
        programs[rank] = write_program(schedule[at["pipe"]], settle_all(stages, mesh, strategy, rank, path), mesh)
        flats[rank] = by_key(settle_all(stages, mesh, strategy, rank))
    lines = {s: schedule[pipe] for s, pipe in owner.items()}
    keys = {key: flat for of_rank in flats.values() for key, flat in of_rank.items()}
    due, reads = expected(keys, lines, mesh, strategy, sums)
    stages_count = count_stages(schedule)
    passes = {rank: passes_of(schedule[mesh.coordinates(rank)["pipe"]]) for rank in programs}
    scene = Scene(mesh, flats, strategy.optim.split, due, stages_count, owner, reads, passes, everyone=True)
    return Played(scene, programs)


def passes_of(line: Line) -> frozenset[Action]:
    """The passes in a line."""
    return frozenset(action for action in line if action.kind in PASSES)


def by_key(flats: Buffered) -> dict[Key, Settled]:
    """The buffers of all stages of a rank."""
    return {flat.key: flat for of_stage in flats.values() for flat in of_stage}


def expected(
    keys: Mapping[Key, Settled], lines: Mapping[int, Line], mesh: Mesh, strategy: Strategy, sums: Sums | None
) -> tuple[dict[Key, int], dict[Key, frozenset[tuple[str, int]]]]:
    """The sum that is due for each trained buffer, and the reads of each that a step makes.

    Args:
        lines: the line of the rank that has a stage, by stage.
    """
    due: dict[Key, int] = {}
    reads: dict[Key, frozenset[tuple[str, int]]] = {}
    made: dict[tuple[tuple[int, ...], bool], int] = {}
    for key, flat in keys.items():
        order = tuple(a.microbatch for a in lines[key[0]] if a.kind in ADDS_GRADIENTS and a.stage == key[0])
        count = count_microbatches((lines[key[0]],))
        order = order if sorted(order) == list(range(count)) else tuple(range(count))
        ways = ("F", "B") if flat.differentiated else ("F",)
        reads[key] = frozenset((way, m) for way in ways for m in range(count))
        if sums is None:
            continue
        if flat.trains and (order, flat.summed) not in made:
            made[order, flat.summed] = promised(sums, strategy, mesh, order, summed=flat.summed)
        if flat.trains:
            due[key] = made[order, flat.summed]
    return due, reads


@dataclass(frozen=True)
class OneFlat:
    """The operations of the ranks that share a flat buffer, in two parts, which only meet in ``update``, and in that a
    backward comes before its gradient, which ``of`` checks."""

    values: Tokens
    """The operations on parameters.  Consecutive reads are one."""
    gradients: Tokens

    @classmethod
    def of(cls, tokens: Tokens) -> "OneFlat":
        values: list[Token | Op] = []
        gradients: list[Token | Op] = []
        read: set[int] = set()
        for token in tokens:
            if token.kind == "read" and isinstance(token, Token):
                read |= {token.microbatch} if token.phase == "B" else set()
                if values and values[-1].kind == "read" and values[-1].buffer == token.buffer:
                    last = values[-1]
                    values[-1] = last._replace(also=(*last.also, (token.phase, token.microbatch)))
                    continue
            if token.kind == "gradient" and token.microbatch not in read:
                text = f"{token.flat[1]} has a gradient before its backward"
                raise Refuted(Counterexample("sums", text, microbatch=token.microbatch))
            if token.kind not in OF_PIPE:
                if token.kind == "update" or token.kind not in OF_GRADIENTS:
                    values.append(token)
                if token.kind == "update" or token.kind in OF_GRADIENTS:
                    gradients.append(token)
        return cls(tuple(values), tuple(gradients))


def one_flat(line: Line, stage: int, unit: UnitLayout, index: int, mesh: Mesh, strategy: Strategy) -> OneFlat:
    """The operations on one buffer of a unit, as the line of its pipeline rank has them."""
    own = tuple(action for action in line if action.stage == stage)
    return OneFlat.of(write_tokens(own, settle_all({stage: (alone(unit, index),)}, mesh, strategy, 0), mesh))


def alone(unit: UnitLayout, index: int) -> UnitLayout:
    """A unit with one of its buffers."""
    only = slice(index, index + 1)
    return replace(unit, flats=unit.flats[only], trainable=unit.trainable[only], summed=unit.summed[only])


def of_flat(
    tokens: Tokens, line: Line, flats: Mapping[int, Mapping[Key, Settled]], mesh: Mesh, strategy: Strategy, sums: Sums
) -> Played:
    """The ranks that share one flat buffer, with one part of their operations on it.

    Args:
        flats: that buffer, by rank.
        line: the line that has the operations.
    """
    programs = {rank: bind(tokens, flats[rank]) for rank in flats}
    passes: dict[int, frozenset[Action]] = {rank: frozenset() for rank in flats}
    of_sums = any(token.kind == "count" for token in tokens)
    buffers = next(iter(flats.values()))
    ((stage, _, _),) = buffers
    due, reads = expected(buffers, {stage: line}, mesh, strategy, sums if of_sums else None)
    scene = Scene(
        mesh, flats, strategy.optim.split, due, 1, {stage: 0}, reads, passes, sums=of_sums, values=not of_sums
    )
    return Played(scene, programs)


def of_ranks(
    stage: int, unit: UnitLayout, index: int, mesh: Mesh, strategy: Strategy, ranks: Sequence[int]
) -> dict[int, dict[Key, Settled]]:
    """One buffer of a unit, on each of some ranks."""
    path, stages = moves(strategy, mesh), {stage: (alone(unit, index),)}
    return {rank: by_key(settle_all(stages, mesh, strategy, rank, path)) for rank in ranks}


def of_pipe(schedule: Schedule, mesh: Mesh, strategy: Strategy) -> Played:
    """One rank for each coordinate of the pipe axis, with its sends, receives and agreements."""
    owner = owners(schedule)
    programs: dict[int, Program] = {}
    for pipe, line in enumerate(schedule):
        programs[mesh.rank(pipe=pipe)] = write_program(line, {s: () for s in owner if owner[s] == pipe}, mesh)
    nothing: dict[int, dict[Key, Settled]] = {rank: {} for rank in programs}
    # Every message is received within its step, so the next step begins as this one did.
    passes = {mesh.rank(pipe=pipe): passes_of(line) for pipe, line in enumerate(schedule)}
    scene = Scene(mesh, nothing, strategy.optim.split, {}, count_stages(schedule), owner, {}, passes, steps=1)
    return Played(scene, programs)
