"""The few calls that a script needs besides ``Engine``.

Your own loop changes by a few lines (``torchrun --nproc-per-node 4 script.py``):

    comm = plait.join()                                             # was: init_process_group()
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)   # was: DDP(model)
    for x, y in loader:
        x, y = x.to(comm.device), y.to(comm.device)
        loss = F.cross_entropy(model(x), y)
        engine.backward(loss, y.numel(), reduction="mean")          # was: loss.backward()
        optimizer.step()                                            # the same optimizer object
"""

import itertools
from collections.abc import Callable, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from plait.comm import Comm, ThreadWorld
from plait.comm.environment import WorldVariables, launched, own_device
from plait.comm.run_threads import run
from plait.referee.sanitize.collectives import check_collectives as checked
from plait.run.data.rank_batches import RankBatches, check_alike
from plait.run.watch.joined import watch_joined
from plait.step.reduction import as_sum
from plait.table.mesh import Mesh

Result = TypeVar("Result")


def join(
    mesh: str | Mesh | None = None,
    *,
    device: str | torch.device = "auto",
    deadline: float = 60.0,
    deterministic: bool = True,
    check_collectives: bool = False,
    shared_memory: bool = False,
    sanitize: bool = True,
) -> Comm:
    """Returns this process's place on the mesh.

    Under torchrun (or any launcher that sets its variables), Slurm's ``srun``, Ray Train, SkyPilot or Modal it joins
    the other processes; without them it is a world of one rank, so the same script runs alone.

    Args:
        mesh: the axes and their sizes; None puts all ranks on ``shard``.
        device: where this rank computes and holds its tensors; ``"cuda"`` is the GPU of its number on its host,
            ``"auto"`` the same if this host has one for each of its ranks, and otherwise the CPU.
        deadline: seconds after which a wait for another rank raises and names it.
        deterministic: add in rank order, so that runs are reproducible to the bit.
        check_collectives: compare every collective across its ranks before it runs, to find a mistake; all ranks must
            give the same value.
        shared_memory: ranks of a Linux host move CPU tensors through memory that they share, and ranks of several hosts
            over sockets; all ranks must give the same value.
        sanitize: engines on this world look for mistakes of the program in steps 0, 1, 2, 100, 200, ...

    Raises:
        ValueError: a mesh that does not multiply to the number of ranks, impossible variables, ranks that differ.
        ConnectionError, TimeoutError: the others were not found within the deadline; the message says who and where.
    """
    several = launched(fix="start one torchrun on each host, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
    if mesh is None:
        mesh = Mesh(shard=WorldVariables.read().size if several else 1)
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    if shared_memory and device == "auto":
        device = "cpu"
    if several or shape.size > 1:  # a larger mesh alone: the error says how to start its ranks
        from plait.comm.process import ProcessComm

        how: dict[str, Any] = {"device": device, "deadline": deadline, "deterministic": deterministic}
        how["shared_memory"] = shared_memory
        comm = ProcessComm.from_env(shape, **how, facts={"check_collectives": str(check_collectives)})
        watch_joined(comm)
        return _sanitized(checked(comm) if check_collectives else comm, sanitize)
    return _sanitized(ThreadWorld(shape, deadline, deterministic, own_device(device)).comm(0), sanitize)


def _sanitized(comm: Comm, on: bool) -> Comm:
    from plait.referee.sanitize import sanitized

    return sanitized(comm) if on else comm


def run_threads(
    mesh: str | Mesh,
    body: Callable[[Comm], Result],
    *,
    device: str | torch.device = "cpu",
    deadline: float = 60.0,
    deterministic: bool = True,
    check_collectives: bool = False,
    sanitize: bool = True,
) -> list[Result]:
    """Runs ``body(comm)`` on every rank of a mesh, each a thread of this process.

    For notebooks, lessons and tests: the same engine and collectives, without starting processes.

    Args:
        mesh: the axes and their sizes, as in ``"replica=2 shard=2"``.
        body: the function that each rank runs.
        deadline: seconds after which a wait for another rank raises and names it.
        deterministic, check_collectives, sanitize: as for ``join``.

    Returns:
        The results of the bodies, by rank.

    Raises:
        Exception: the first exception that a body raised, with its own traceback; the other ranks are stopped.
    """
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    if not isinstance(shape, Mesh) or not callable(body):
        raise TypeError(
            f"plait.run_threads takes a mesh, as in 'shard=2', then a function of a rank's comm; it was given "
            f"{mesh!r:.80}, then {body!r:.80}"
        )

    def ranks(comm: Comm) -> Result:
        return body(_sanitized(checked(comm) if check_collectives else comm, sanitize))

    return run(shape, ranks, device=device, deadline=deadline, deterministic=deterministic)


def distributed_sampler(
    dataset: Sized, comm: Comm, *, shuffle: bool = True, seed: int = 0, drop_last: bool | None = None
) -> DistributedSampler[Any]:
    """torch's DistributedSampler over the data ranks, the same in one pipeline or tensor group; all ranks call it.

    Args:
        drop_last: if the samples do not divide among the data ranks, leave out the last ones (True), or repeat the
            first ones, which then count twice (False). ``RankBatches`` does neither.

    Raises:
        ValueError: the samples do not divide, and ``drop_last`` is not given; ranks that differ, as in the seed.
    """
    size, ranks = len(dataset), comm.mesh.data_size
    if drop_last is None and size % ranks:
        raise ValueError(
            f"{size} samples do not divide among {ranks} data ranks: drop_last=True leaves out {size % ranks} in each "
            f"epoch, drop_last=False lets {-size % ranks} count twice, and plait.rank_batches has each of them once"
        )
    check_alike(comm, samples=size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    where = {"num_replicas": ranks, "rank": comm.data_rank}
    return DistributedSampler(dataset, **where, shuffle=shuffle, seed=seed, drop_last=bool(drop_last))  # type: ignore


def rank_batches(
    dataset: Sized, batch_size: int, comm: Comm, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> RankBatches:
    """A data rank's part of each batch, each sample once: ``DataLoader(dataset, batch_sampler=...)``; all call it.

    Args:
        batch_size: the number of samples in a batch, over all data ranks.
        drop_last: leave out the samples that do not fill a batch.

    Raises:
        ValueError: fewer samples in a batch than data ranks, the last included; ranks that differ, as in the seed.
    """
    how: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    check_alike(comm, samples=len(dataset), batch_size=batch_size, **how)
    return RankBatches(len(dataset), batch_size, comm.mesh, comm.rank, **how)


def sum_of_mean(
    mean_loss: Callable[[nn.Module, Any], Tensor], count: Callable[[Any], int]
) -> Callable[[nn.Module, Any], Tensor]:
    """Makes the ``loss_fn`` that ``Engine`` takes, a sum, from a function whose loss is a mean.

    ``Engine(..., loss_fn=plait.sum_of_mean(mean_loss, count), count_fn=count)``.  A mean of microbatch means is wrong
    as soon as their counts differ; a sum divided once is not.

    Args:
        mean_loss: ``(model, batch) -> scalar``, the mean of the losses of the batch's terms, as in ``F.cross_entropy``
            or ``model(input_ids=x, labels=x).loss`` of Hugging Face, which has a term for each label but the first of a
            sample: ``int((x[:, 1:] != -100).sum())``.
        count: ``batch -> int``, the number of terms of that mean. Without terms, sum and gradients are 0, not NaN.

    Raises:
        TypeError: a loss instead of the function that computes it.
    """
    if not callable(mean_loss) or not callable(count):
        raise TypeError(
            "plait.sum_of_mean takes two functions, (model, batch) -> mean loss and batch -> count, for "
            'Engine(loss_fn=...); in your own loop call engine.backward(loss, count, reduction="mean")'
        )
    looks = itertools.count()

    def loss_sum(model: nn.Module, batch: Any) -> Tensor:
        return as_sum(mean_loss(model, batch), count(batch), "mean", next(looks))

    return loss_sum
