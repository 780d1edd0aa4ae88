"""The messages of ranks that share experts, for each layer and microbatch.  If tokens are gathered:

    forward     all_reduce       8 bytes                    the most tokens of a rank
                all_gather       [tokens, width]            tokens, then [tokens, chosen] int64 and their weights
                reduce_scatter   [tokens, width]            the experts' outputs
    backward    all_gather       [tokens, width]            gradients of the outputs
                reduce_scatter   [tokens, width]            those of the tokens, then [tokens, chosen] of the weights

A tensor axis whose ranks have the same tokens adds all_reduces of one rank's tokens: the experts' outputs in the
forward, two gradients in the backward.  Inside a recomputed block the forward's messages are sent twice.

With all_to_all the sizes depend on the router.  If every expert gets equally many tokens they are, for each layer:

    forward     all_reduce       8 bytes                    the most tokens that go to one rank
                all_to_all       [tokens x chosen, width]   tokens, then int64 numbers of experts, then the outputs
    backward    all_to_all       [tokens x chosen, width]   the two gradients
"""

from collections.abc import Collection, Iterable, Mapping

from plait.table.cells import EXPERTS
from plait.table.collectives import Entry, Note, bytes_sent
from plait.table.mesh import Mesh
from plait.table.tensor_plan import BALANCE, EXPERT_BACKWARD, EXPERT_FORWARD

AXES_OF_EXPERTS = ("pipe", "replica", "expert_shard", "expert", "tensor")
"""The axes of the same ranks if they share experts."""


def predict_experts(
    layers: Mapping[str, tuple[int, int]],
    mesh: Mesh,
    tokens: Iterable[int],
    itemsize: int,
    *,
    sequence: bool = False,
    twice: Collection[str] = (),
    all_to_all: bool = False,
) -> tuple[Entry, ...]:
    """Returns every message of a rank's stage for its experts in one step, except those that balance them.

    Args:
        layers: by the name of a layer's experts, the width of a token and the number of experts that it chooses.
        tokens: the tokens of each rank, for each microbatch.
        itemsize: bytes per element of the activations and the weights.
        sequence: the ranks of the tensor axis have different tokens.
        twice: the modules whose forward runs again in the backward.
        all_to_all: tokens go only to the ranks of their experts, equally many to each.
    """
    gathered = EXPERTS.cut if sequence else ("expert",)
    ways, entries = mesh.count(gathered), list[Entry]()

    def add(kind: str, axes: tuple[str, ...], size: int, phase: str, times: int = 1) -> None:
        entries.extend([Entry(kind, axes, size, bytes_sent(kind, size, mesh.count(axes)), Note(phase))] * times)

    for mine in tokens:
        for name, (width, chosen) in layers.items():
            rows, weights = (mine * numbers * itemsize for numbers in (width, chosen))
            times = 1 + any(f"{name}.".startswith(f"{block}.") for block in twice)
            if ways > 1:
                add("all_reduce", gathered, 8, EXPERT_FORWARD, times)
            if ways > 1 and all_to_all:
                most = ways * -(-mine * chosen // mesh.count(EXPERTS.cut))
                for size in (width * itemsize, 8, width * itemsize):
                    add("all_to_all", gathered, most * size, EXPERT_FORWARD, times)
                add("all_to_all", gathered, most * width * itemsize, EXPERT_BACKWARD, 2)
            elif ways > 1:
                for size in (rows, mine * chosen * 8, weights):
                    add("all_gather", gathered, ways * size, EXPERT_FORWARD, times)
                add("reduce_scatter", gathered, ways * rows, EXPERT_FORWARD, times)
                add("all_gather", gathered, ways * rows, EXPERT_BACKWARD)
                for size in (rows, weights):
                    add("reduce_scatter", gathered, ways * size, EXPERT_BACKWARD)
            if mesh.tensor > 1 and not sequence:
                add("all_reduce", ("tensor",), rows, EXPERT_FORWARD, times)
                for size in (rows, weights):
                    add("all_reduce", ("tensor",), size, EXPERT_BACKWARD)
    return tuple(entries)


def predict_routers(
    routers: Mapping[str, tuple[int, bool]],
    mesh: Mesh,
    samples: Iterable[int],
    itemsize: int,
    *,
    sequence: bool = False,
    twice: Collection[str] = (),
) -> tuple[Entry, ...]:
    """Returns every message by which routers count the tokens of samples that several ranks share.

    Args:
        routers: by name, the number of experts, and True if they have a capacity.
        samples: the samples of each microbatch.
        sequence: the ranks of the tensor axis have parts of a sample's time.
    """
    tensor = ("tensor",) if sequence else ()
    over, number = ("context", *tensor), max(itemsize, 4)
    entries: list[Entry] = []
    for batch in samples:
        for name, (experts, capacity) in routers.items():
            counts = 2 * batch * experts * 8 * mesh.count(over)
            steps, running = ("all_reduce", tensor, 8), ("all_gather", over, counts)
            whole, loss = ("all_reduce", over, batch * experts * number), ("all_reduce", tensor, number)
            times = 1 + any(f"{name}.".startswith(f"{block}.") for block in twice)
            for kind, axes, size in (steps, running, whole, loss) if capacity else (whole, loss):
                if (ways := mesh.count(axes)) > 1:
                    entries += [Entry(kind, axes, size, bytes_sent(kind, size, ways), Note(BALANCE))] * times
    return tuple(entries)
