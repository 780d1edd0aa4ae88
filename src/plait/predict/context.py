"""The messages of a context axis: keys and values of each attention, gathered forward and reduced backward.

    forward     all_gather       [time, samples, ..., width]     of keys, then of values
    backward    reduce_scatter   the same
    packed      all_gather       [time, samples] int64           documents, once in each forward of the model

    in a ring of n, n - 1 times: send and receive keys and values together; in the backward, n times their gradients too

Inside a recomputed block the forward's messages are sent twice.
"""

from collections.abc import Collection, Iterable, Mapping

from plait.table.collectives import Entry, Note, bytes_sent
from plait.table.mesh import Mesh
from plait.table.tensor_plan import CONTEXT_BACKWARD, CONTEXT_FORWARD

AXES = ("context",)


def check_time(mesh: Mesh, length: int, *, ring: bool = False) -> None:
    """Raises ValueError for samples that a mesh cannot cut in time, or for a ring without a context axis."""
    if ring and mesh.context == 1:
        raise ValueError(f"a ring goes over a context axis, and mesh '{mesh}' has none: give context=n")
    if mesh.context > 1 and length % (2 * mesh.context):
        more = -(-length // (2 * mesh.context)) * 2 * mesh.context
        raise ValueError(
            f"length {length} is cut in {2 * mesh.context} blocks of time over context={mesh.context}: give a multiple "
            f"of {2 * mesh.context}, as {more}"
        )


def predict_context(
    widths: Mapping[str, Iterable[int]],
    mesh: Mesh,
    tokens: Iterable[int],
    itemsize: int,
    *,
    packed: bool = False,
    ring: bool = False,
    twice: Collection[str] = (),
) -> tuple[Entry, ...]:
    """Returns every message of a rank's stage over the context axis in one step.

    Args:
        widths: by module, the elements of a step of time in each tensor that the attention gathers.
        tokens: samples x steps of time on this rank, for each microbatch.
        itemsize: bytes per element of the activations.
        packed: True if rows hold documents.
        ring: True if keys and values travel in a ring.
        twice: the modules whose forward runs again in the backward.
    """
    ways = mesh.context
    if ways == 1:
        return ()

    def entry(kind: str, size: int, phase: str) -> Entry:
        return Entry(kind, AXES, size, bytes_sent(kind, size, ways), Note(phase))

    entries = []
    for mine in tokens:
        for name, gathered in widths.items():
            again = any(f"{name}.".startswith(f"{block}.") for block in twice)
            if ring:
                block = mine * sum(gathered) * itemsize
                turns = {CONTEXT_FORWARD: [block] * (ways - 1) * (1 + again)}
                turns[CONTEXT_BACKWARD] = [block] * (ways - 1) + [block // itemsize * max(itemsize, 4)] * ways
                for phase, sizes in turns.items():
                    entries += [Entry("send", AXES, size, size, Note(phase)) for size in sizes]
                    entries += [Entry("recv", AXES, size, 0, Note(phase)) for size in sizes]
                continue
            for size in (mine * ways * width * itemsize for width in gathered):
                entries += [entry("all_gather", size, CONTEXT_FORWARD)] * (1 + again)
                entries.append(entry("reduce_scatter", size, CONTEXT_BACKWARD))
        if packed:
            entries.append(entry("all_gather", mine * ways * 8, CONTEXT_FORWARD))
    return tuple(entries)
