"""Checks that a run fits: compares the least memory of its ranks with this machine's.  Also sizes a checkpoint.

    parameters, gradients, optimizer state      the row's formula, for the ranks on this host
    a step's samples                            twice: as made, and as moved to the device
    activations of one microbatch               the prediction, if there is one; otherwise one vector for each token

A run that needs less than this may still be too large; one that needs more is refused before it starts.
"""

import os

from plait.checkpoint.files.reading import memory
from plait.comm.environment import started
from plait.messages.wording import human
from plait.predict.activations import DecoderSizes, decoder
from plait.predict.memory import formula
from plait.run.config.machine import resolve_device
from plait.run.config.settings import RunConfig, TrainConfig
from plait.run.job.families import FOLDER

GPUS = {
    **dict.fromkeys(("T4", "V100"), 16),
    **dict.fromkeys(("L4", "A10", "A10G", "RTX3090", "RTX4090"), 24),
    **dict.fromkeys(("V100-32GB", "RTX5090"), 32),
    **dict.fromkeys(("A100", "A100-40", "A100-40GB"), 40),
    **dict.fromkeys(("A40", "A6000", "L40", "L40S"), 48),
    **dict.fromkeys(("A100-80", "A100-80GB", "H100"), 80),
    **{"GH200": 96, "H200": 141, "B200": 180, "GB200": 186, "B300": 288},
}
"""GB of memory of the GPUs that a job can ask for, by the names that schedulers and clouds give them."""


def check_room(config: RunConfig) -> None:
    """Raises ValueError, with need and have, for a run on CPUs that cannot fit into this machine's memory."""
    if resolve_device(config.machine) != "cpu" or config.task.network.job is not None:
        return
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    size = config.machine.parsed_mesh.size
    if given.isdecimal() and len(given) < 9:
        ranks = min(int(given), size)
    else:  # started by hand, perhaps one on each host, or by plait
        ranks = 1 if started() else size
    check_fits(config, ranks, memory(1 if config.machine.world == "thread" else ranks), "this machine")


def check_job(config: RunConfig, ranks_per_host: int, gpu: str | None, memory: int | None) -> None:
    """Raises ValueError for a run that cannot fit into these GPUs or hosts.  Models that only the hosts know may pass.

    Args:
        gpu: the kind, one of ``GPUS``; each rank has one. None: ranks compute on CPUs.
        memory: GiB of a host, if known.
    """
    network = config.task.network
    if network.job is not None or network.model.startswith(FOLDER):
        return
    if gpu:
        check_fits(config, 1, GPUS[gpu.upper()] * 10**9, f"one {gpu}")
    elif memory:
        check_fits(config, ranks_per_host, memory << 30, "a host (--memory)")


def check_fits(config: RunConfig, ranks: int, have: int, where: str) -> None:
    """Raises ValueError, with need and have, if ranks need more memory than there is."""
    kinds = _kinds(config)
    need = ranks * sum(kinds.values())
    if need > have:
        parts = ", ".join(f"{human(one)} of {what}" for what, one in kinds.items())
        raise ValueError(
            f"{ranks} ranks need at least {human(need)} of memory, and {where} has {human(have)} ({parts} on each "
            f"rank): plait plan finds layouts that fit; or give smaller sizes, or more hosts"
        )


def _kinds(config: RunConfig) -> dict[str, int]:
    """Bytes that one rank needs, by purpose."""
    return {"state": _state(config), "a step's samples": _samples(config), "activations": _activations(config)}


def checkpoint_bytes(config: TrainConfig) -> int:
    """Least number of bytes of one checkpoint: each parameter, with the optimizer's numbers for it."""
    return (1 + config.task.optimizer_row.states) * _parameters(config) * config.dtypes.computed.itemsize


def decoder_sizes(config: RunConfig) -> DecoderSizes:
    """Sizes of a microbatch in plait's decoder, on one rank."""
    mesh, model = config.machine.parsed_mesh, config.task.sizes
    return DecoderSizes(
        batch=-(-config.task.samples.batch // (mesh.data_size * config.layout.microbatches)),
        length=config.task.network.length,
        width=model.width,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        hidden=model.hidden_width,
        vocabulary=model.vocabulary,
        itemsize=config.dtypes.computed.itemsize,
        dropout=model.dropout > 0,
        ways=mesh.tensor,
        sequence=config.layout.sequence_parallel and mesh.tensor > 1,
    )


def _parameters(config: RunConfig) -> int:
    """Number of the model's parameters.  0 if only its files know it."""
    return int(getattr(config.task.sizes, "num_parameters", 0))


def _state(config: RunConfig) -> int:
    mesh, own = config.machine.parsed_mesh, config.dtypes.computed.itemsize
    numbers = _parameters(config) / (mesh.pipe * mesh.tensor)
    sizes = {"param_bytes": own, "grad_bytes": own, "optimizer_bytes": own * config.task.optimizer_row.states}
    return formula(numbers, mesh, config.row, **sizes).total


def _samples(config: RunConfig) -> int:
    task = config.task
    values = task.sizes.width * config.dtypes.computed.itemsize
    each = 2 * 8 * task.network.length if task.family.reads_text else values
    return 2 * each * task.samples.batch // config.machine.parsed_mesh.data_size


def _activations(config: RunConfig) -> int:
    task, mesh = config.task, config.machine.parsed_mesh
    if not task.family.predicted or task.samples.pack:
        tokens = task.network.length if task.family.reads_text else 1
        samples = task.samples.batch // (mesh.data_size * config.layout.microbatches)
        return samples * tokens * int(task.sizes.width) * config.dtypes.computed.itemsize // mesh.tensor
    links = ("embed", *(f"blocks.{i}" for i in range(task.sizes.num_layers)), "norm", "head")
    return decoder(decoder_sizes(config), links, config.layout.recompute) // mesh.pipe
