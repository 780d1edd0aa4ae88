"""The few calls that a script needs besides ``Engine``.

A loop of your own changes by a few lines (``torchrun --nproc-per-node 4 script.py``):

    comm = plait.join()                                             # was: init_process_group()
    engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)   # was: DDP(model)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        engine.backward(loss, y.numel(), reduction="mean")          # was: loss.backward()
        optimizer.step()                                            # the same optimizer object
"""

import os
from collections.abc import Callable, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from plait.comm import Comm, ThreadWorld
from plait.comm.thread import run
from plait.core.mesh import Mesh
from plait.data.rank_batches import RankBatches
from plait.engine.reduction import as_sum

Result = TypeVar("Result")


def join(
    mesh: str | Mesh | None = None,
    *,
    device: str | torch.device = "cpu",
    deadline: float = 60.0,
    deterministic: bool = True,
) -> Comm:
    """This process's place on the mesh.

    Under torchrun (or whatever sets its variables) it joins the other processes; without it, it is a world of one
    rank, so the same script runs alone.

    Args:
        mesh: the axes and their sizes; None puts all ranks on ``shard``.
        deadline: seconds after which a wait for another rank raises and says which one.
        deterministic: add in rank order, so that runs are reproducible to the bit.

    Raises:
        ValueError: a mesh that does not multiply to the number of ranks.
    """
    launched = "RANK" in os.environ
    if mesh is None:
        mesh = Mesh(shard=int(os.environ.get("WORLD_SIZE", "1")) if launched else 1)
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    if launched or shape.size > 1:  # a larger mesh alone: the error says how to start its ranks
        from plait.comm.process import ProcessComm

        return ProcessComm.from_env(shape, device=device, deadline=deadline, deterministic=deterministic)
    return ThreadWorld(shape, deadline, deterministic, device).comm(0)


def run_threads(
    mesh: str | Mesh,
    body: Callable[[Comm], Result],
    *,
    device: str | torch.device = "cpu",
    deadline: float = 60.0,
    deterministic: bool = True,
) -> list[Result]:
    """Run ``body(comm)`` on every rank of a mesh, each a thread of this process; the results by rank.

    For notebooks, lessons and tests: the same engine and collectives, without starting processes.
    """
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    return run(shape, body, device=device, deadline=deadline, deterministic=deterministic)


def distributed_sampler(
    dataset: Sized, comm: Comm, *, shuffle: bool = True, seed: int = 0, drop_last: bool | None = None
) -> DistributedSampler[Any]:
    """torch's DistributedSampler over the data ranks; ranks of one pipeline or tensor group read the same samples.

    Args:
        drop_last: where the samples do not divide among the data ranks, leave out the last ones (True), or repeat the
            first ones, which then count twice (False). ``RankBatches`` does neither.

    Raises:
        ValueError: they do not divide, and nothing is said.
    """
    size, ranks = len(dataset), comm.mesh.data_size
    if drop_last is None and size % ranks:
        raise ValueError(
            f"{size} samples do not divide among {ranks} data ranks: drop_last=True leaves out {size % ranks} in each "
            f"epoch, drop_last=False lets {-size % ranks} count twice, and plait.rank_batches has each of them once"
        )
    where = {"num_replicas": ranks, "rank": comm.mesh.data_rank(comm.rank)}
    return DistributedSampler(dataset, **where, shuffle=shuffle, seed=seed, drop_last=bool(drop_last))  # type: ignore


def rank_batches(
    dataset: Sized, batch_size: int, comm: Comm, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> RankBatches:
    """This data rank's part of each batch, with every sample once: ``DataLoader(dataset, batch_sampler=...)``.

    Args:
        batch_size: samples of a batch of all data ranks together.
        drop_last: leave out the samples that do not fill a batch.

    Raises:
        ValueError: fewer samples in a batch, or in the data set, than data ranks.
    """
    mesh, rank = comm.mesh, comm.rank
    return RankBatches(len(dataset), batch_size, mesh, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)


def sum_of_mean(
    mean_loss: Callable[[nn.Module, Any], Tensor], count: Callable[[Any], int]
) -> Callable[[nn.Module, Any], Tensor]:
    """A loss that is a mean over ``count(batch)`` terms, as the sum that ``Engine`` requires.

    A mean of microbatch means is wrong as soon as their counts differ; a sum divided once is not.  A batch without
    terms has a sum of 0 and gradients of 0, though its mean is NaN.  The mean is that of ``F.cross_entropy``, which
    Hugging Face models use (``model(input_ids=x, labels=x).loss`` has a term for each label but the first of a sample:
    ``count`` is ``int((x[:, 1:] != -100).sum())``).
    """

    def loss_sum(model: nn.Module, batch: Any) -> Tensor:
        return as_sum(mean_loss(model, batch), count(batch), "mean")

    return loss_sum
