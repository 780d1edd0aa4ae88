"""The messages of tensor parallelism, from the sites of a plan and the shapes of the activations that pass them.

    site      without sequence parallelism          with it
    enter     backward  all_reduce [.., width]      forward all_gather, backward reduce_scatter [batch, time, width]
    leave     forward   all_reduce [.., width]      forward reduce_scatter, backward all_gather
    sum       forward   all_reduce [.., width]      the same
    split     -                                     backward all_gather
    unsplit   -                                     forward all_gather
    gather    forward   all_gather [.., width]      the same
    part      backward  all_gather [.., width]      the same
    share     backward  all_reduce [.., width]      the same
    loss      forward   all_gather [ranks, 3, ..]   the same

Inside a recomputed block (``forward.recompute``) every forward message is sent twice.

A transformer layer has two of each of the first: two all-reduces forward and two backward of batch * time * width
elements, or the same volume as reduce-scatters and all-gathers (Megatron-LM, Korthikanti et al. 2022).
"""

import math
from collections.abc import Collection, Sequence

from plait.table.collectives import UPDATE, Entry, Note, bytes_sent
from plait.table.mesh import Mesh
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import BACKWARD, FORWARD, MESSAGES, Site

AXES = ("tensor",)


def predict_tensor(
    sites: Sequence[Site],
    shapes: Sequence[tuple[int, ...]],
    mesh: Mesh,
    itemsize: int,
    *,
    sequence: bool,
    twice: Collection[str] = (),
) -> tuple[Entry, ...]:
    """Returns every message of a rank over the tensor axis in one step.

    Args:
        sites: the sites of a plan.
        shapes: the shapes of each microbatch's activations, without their last dim: (batch, time), or (batch,).
        itemsize: bytes per element of the activations; losses are summed in 4 bytes at least.
        sequence: the stream is cut in time; time that the ranks cannot share evenly travels padded.
        twice: the modules whose forward runs again in the backward.
    """
    ways = mesh.tensor
    if ways == 1:
        return ()
    entries = []

    def add(kind: str, numel: int, size: int, note: Note) -> None:
        again = note.phase == FORWARD and any(f"{note.unit}.".startswith(f"{block}.") for block in twice)
        entries.extend([Entry(kind, AXES, numel * size, bytes_sent(kind, numel * size, ways), note)] * (1 + again))

    for microbatch, shape in enumerate(shapes):
        rows = math.prod(shape)
        cut = sequence and len(shape) > 1
        padded = shape[0] * -(-shape[1] // ways) * ways * math.prod(shape[2:]) if cut else rows
        for site in sites:
            forward, backward = MESSAGES[site.kind][0 if sequence else 1]
            if site.kind == "loss":
                add(forward, ways * 3 * rows, max(itemsize, 4), Note(FORWARD, site.name))
                continue
            for phase, kind in ((FORWARD, forward), (BACKWARD, backward if site.trains_input else "")):
                size = (rows if kind == "all_reduce" else padded) * site.width
                if site.kind in ("gather", "part"):
                    size = rows * -(-site.width // ways) * ways
                if kind:
                    add(kind, size, itemsize, Note(phase, site.name, microbatch))
    return tuple(entries)


def predict_update(
    name: str, cut: TensorCut, axes: tuple[str, ...], index: int, itemsize: int, *, owner: int
) -> tuple[Entry, ...]:
    """Returns the messages of rank ``index`` of the axes that cut a parameter whose owner updates it whole: its values
    and its gradient are gathered, and the new values scattered, in pieces padded to the longest."""
    size = cut.ways * math.prod(cut.local_shape(0)) * itemsize
    kinds = ("gather", "gather", "scatter")
    sent = (bytes_sent(kind, size, cut.ways, root=index == owner) for kind in kinds)
    return tuple(Entry(kind, axes, size, own, Note(UPDATE, name)) for kind, own in zip(kinds, sent, strict=True))
