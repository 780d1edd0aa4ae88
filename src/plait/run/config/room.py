"""Checks that a run fits: compares the least memory of its ranks with this machine's.  Also sizes a checkpoint.

    parameters, gradients, optimizer state      the row's formula, for the ranks on this host
    a step's samples                            twice: as made, and as moved to the device
    activations of one microbatch               the prediction, if there is one; otherwise one vector for each token

A run that needs less than this may still be too large; one that needs more is refused before it starts.
"""

from collections.abc import Sequence

from plait.checkpoint.files.reading import memory
from plait.comm.environment import ranks_here
from plait.messages.wording import human
from plait.predict.activations import decoder
from plait.predict.cluster import PRESETS
from plait.predict.memory import formula, state_bytes
from plait.predict.plan import decoder_sizes
from plait.run.config.machine import resolve_device
from plait.run.config.settings import RunConfig, TrainConfig
from plait.run.job.families import FOLDER
from plait.run.job.outline import transformer_of


def check_room(config: RunConfig) -> None:
    """Raises ValueError, with need and have, for a run on CPUs that cannot fit into this machine's memory."""
    if resolve_device(config.machine) != "cpu" or config.task.network.job is not None:
        return
    size = config.machine.parsed_mesh.size
    ranks = min(ranks_here(size), size)
    check_fits(config, ranks, memory(1 if config.machine.world == "thread" else ranks), "this machine")


def check_job(config: RunConfig, ranks_per_host: int, gpu: str | None, memory: int | None) -> None:
    """Raises ValueError for a run that cannot fit into its GPUs, one for each rank, if the planner knows them, or
    without GPUs into the GiB of memory of a host.  Models that only the hosts know may pass."""
    network = config.task.network
    if network.job is not None or network.model.startswith(FOLDER):
        return
    if gpu and gpu.lower() in PRESETS:
        check_fits(config, 1, round(PRESETS[gpu.lower()].device.memory), f"one {gpu}")
    elif memory and not gpu:
        check_fits(config, ranks_per_host, memory << 30, "a host (--memory)")


def check_fits(config: RunConfig, ranks: int, have: int, where: str) -> None:
    """Raises ValueError, with need and have, if ranks need more memory than there is."""
    kinds = _needs(config)
    need = ranks * sum(kinds.values())
    if need > have:
        parts = ", ".join(f"{human(one)} of {what}" for what, one in kinds.items())
        raise ValueError(
            f"{ranks} ranks need at least {human(need)} of memory, and {where} has {human(have)} ({parts} on each "
            f"rank): plait plan finds layouts that fit; or give smaller sizes, or more hosts"
        )


def checkpoint_bytes(config: TrainConfig) -> int:
    """Least number of bytes of one checkpoint: each parameter, with the optimizer's numbers for it."""
    return (1 + config.task.optimizer_row.states) * _parameters(config) * config.dtypes.computed.itemsize


def predictable(config: RunConfig) -> bool:
    """True if the activations of a run are predicted: it trains plait's decoder, on rows of one document."""
    return config.task.family.predicted and not config.task.samples.pack


def activation_bytes(config: RunConfig, links: Sequence[str] = ()) -> int:
    """Bytes that links of plait's decoder, or all of it, keep of a microbatch from its forward to its backward."""
    mesh, model = config.machine.parsed_mesh, transformer_of(config.task.sizes)
    assert model is not None
    sizes = decoder_sizes(
        model,
        -(-config.task.samples.batch // (mesh.data_size * config.layout.microbatches)),
        config.task.network.length,
        itemsize=config.dtypes.computed.itemsize,
        ways=mesh.tensor,
        sequence=config.layout.sequence_parallel and mesh.tensor > 1,
    )
    return decoder(sizes, links or model.links, config.layout.recompute)


def _parameters(config: RunConfig) -> int:
    """Number of the model's parameters.  0 if only its files know it."""
    sizes = config.task.sizes
    return int(getattr(transformer_of(sizes) or sizes, "num_parameters", 0))


def _needs(config: RunConfig) -> dict[str, int]:
    """The least bytes of one rank, by kind."""
    task, mesh, itemsize = config.task, config.machine.parsed_mesh, config.dtypes.computed.itemsize
    sizes = state_bytes(config.row, task.network.dtype.partition("-")[0], task.optimizer_row.states)
    state = formula(_parameters(config) / (mesh.pipe * mesh.tensor), mesh, config.row, **sizes).total
    tokens, text = task.network.length, task.family.reads_text
    samples = 2 * (2 * 8 * tokens if text else task.sizes.width * itemsize) * task.samples.batch // mesh.data_size
    microbatch = task.samples.batch // (mesh.data_size * config.layout.microbatches)
    activations = microbatch * (tokens if text else 1) * int(task.sizes.width) * itemsize // mesh.tensor
    if predictable(config):
        activations = activation_bytes(config) // mesh.pipe
    return {"state": state, "a step's samples": samples, "activations": activations}
