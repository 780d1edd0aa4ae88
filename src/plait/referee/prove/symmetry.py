"""Checks, rank by rank, which ranks behave the same, so that one proof covers them all.

    rank (pipe, replica, shard, tensor)  ──►  (0, replica, shard, 0), its *model* rank

A rank and its model have the same messages and the same pieces of every flat buffer, and the rank's groups are its
model's groups, moved.  So a fact about a buffer on the model ranks holds on every rank.
"""

from collections.abc import Sequence

from plait.messages.progress import counted
from plait.referee.prove.program import PHASES
from plait.referee.prove.scenes import Counterexample, Refuted
from plait.table.agreement import IN_STAGE
from plait.table.cells import DENSE, EXPERTS, StateAxes, Strategy, moves
from plait.table.flat import FlatLayout, Message, lower
from plait.table.mesh import Mesh


def check_symmetry(mesh: Mesh, strategy: Strategy, layouts: Sequence[FlatLayout], where: StateAxes = DENSE) -> int:
    """Checks every rank of a mesh; raises ``Refuted`` for one that differs from its model.

    Args:
        layouts: one of each kind that differs in its pieces.
        where: the axes over which their state is kept.

    Returns:
        The number of compared facts.
    """
    path = moves(strategy, mesh, where)
    sent = [
        (move, layout)
        for move in dict.fromkeys(m for p in PHASES for m in getattr(path, p))
        if move.sends(mesh)
        for layout in layouts
    ]
    axes = tuple(dict.fromkeys(move.axes for move, _ in sent))
    cells = tuple(
        dict.fromkeys(where.of(cell.split) for cell in (strategy.params, strategy.kept, strategy.grads, strategy.optim))
    )
    models: dict[int, tuple[tuple[tuple[Message, ...], ...], tuple[int, ...]]] = {}
    compared = 0
    for rank in counted("ranks", range(mesh.size)):
        model = model_of(mesh, rank)
        facts = (
            tuple(lower(move, layout, mesh, rank) for move, layout in sent),
            tuple(mesh.index(rank, split) for split in cells),
        )
        due = models.setdefault(model, facts)
        if facts != due:
            raise Refuted(
                Counterexample("messages", f"it does not send what rank {model} sends of the same buffer", rank)
            )
        compared += len(sent) + len(cells)
    for over in (*axes, *[("context",)] * (mesh.context > 1), *[("expert",)] * (where == EXPERTS)):
        compared += _check_groups(mesh, over)
    return compared


def model_of(mesh: Mesh, rank: int) -> int:
    """The rank with the same data coordinates at the beginning of the other axes."""
    at = mesh.coordinates(rank)
    return mesh.rank(replica=at["replica"], shard=at["shard"])


def model_ranks(mesh: Mesh, *, tensor: bool) -> list[int]:
    """All model ranks; ``tensor``: at every coordinate of the tensor axis, as a gradient may be pending over it."""
    return [rank for rank in range(mesh.count(IN_STAGE)) if tensor or not mesh.index(rank, ("tensor",))]


def _check_groups(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Checks that every rank is in one group over these axes, at the place that it assumes, and that the group is its
    model's, moved by the same distance as the rank."""
    places: dict[int, int] = {}
    for rank in range(mesh.size):
        if rank in places:
            continue
        group = mesh.group(rank, axes)
        within = mesh.count(IN_STAGE)
        shift = rank // within * within if "tensor" in axes else rank - model_of(mesh, rank)
        moved = tuple(member + shift for member in mesh.group(rank - shift, axes)) if shift else group
        if group != moved:
            raise Refuted(
                Counterexample("messages", f"its group over {', '.join(axes)} is not its model's, moved", rank)
            )
        for place, member in enumerate(group):
            if member in places or mesh.index(member, axes) != place:
                text = f"it is member {place} of a group over {', '.join(axes)}, and takes itself for another"
                raise Refuted(Counterexample("messages", text, member))
            places[member] = place
    return len(places)
