"""What one process of the tests of torch's back end does: ``python c10d_ranks.py <scene> <backend> <folder>``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import plait.shared_memory.c10d  # noqa: F401  # makes the back end known

BACKEND, FOLDER = sys.argv[2], Path(sys.argv[3])


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(12, 17), nn.GELU(), nn.Linear(17, 12)) for _ in range(3)))


def trained(net: nn.Module, steps: int = 4) -> list[float]:
    """Losses of this rank's own samples."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(5, 12)
        loss = F.mse_loss(net(x), x.sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def collectives() -> Any:
    """All that a group does, with odd sizes, views, lists, and groups within the world."""
    rank, n, out = dist.get_rank(), dist.get_world_size(), []
    x = torch.arange(7.0) * (rank + 1) + 0.1
    for op in ("SUM", "MIN", "MAX", "PRODUCT"):
        dist.all_reduce(y := x.clone(), getattr(dist.ReduceOp, op))
        out.append(y)
    if BACKEND != "gloo":  # which has no mean
        dist.all_reduce(y := x.clone(), dist.ReduceOp.AVG)
        assert torch.equal(y, sum(torch.arange(7.0) * (k + 1) + 0.1 for k in range(n)) / n)  # type: ignore[operator]
    for op in ("BAND", "BOR", "BXOR"):
        dist.all_reduce(y := torch.arange(9) + 3 * rank, getattr(dist.ReduceOp, op))
        out.append(y)
    view = torch.zeros(6, 4)
    view[:, ::2] = rank + 1
    dist.all_reduce(view.t()[::2])
    dist.broadcast(y := x.clone(), 1)
    dist.reduce(z := x.clone(), n - 1)
    assert (
        BACKEND == "gloo" or view.tolist() == [[n * (n + 1) / 2, 0.0] * 2] * 6
    )  # gloo of torch 2.13 adds other places
    out += [y] + [z] * (rank == n - 1)
    dist.all_gather(slots := [torch.empty(7) for _ in range(n)], x)
    dist.all_gather_into_tensor(whole := torch.empty(7 * n), x)
    dist.reduce_scatter_tensor(piece := torch.empty(5), torch.arange(5.0 * n) + rank)
    dist.reduce_scatter(other := torch.empty(2), [torch.full((2,), float(k + rank)) for k in range(n)])
    out += [*slots, whole, piece, other]
    dist.gather(x, slots if rank == 0 else None, dst=0)
    dist.scatter(w := torch.empty(7), [s + 1 for s in slots] if rank == 0 else None, src=0)
    out += [*slots, w]
    dist.all_to_all_single(v := torch.empty(3 * n), torch.arange(3.0 * n) + 10 * rank)
    sizes = [k + 1 for k in range(n)]
    uneven = torch.empty(n * (rank + 1))
    dist.all_to_all_single(uneven, torch.arange(float(sum(sizes))) + rank, [rank + 1] * n, sizes)
    out += [v, uneven]
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    dist.broadcast_object_list(said := [rank, "from"], src=1)
    out.append([objects, said])
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    got = [torch.empty(4), torch.empty(2, 3)]
    ops = [dist.P2POp(dist.irecv, got[0], behind), dist.P2POp(dist.isend, torch.full((4,), float(rank)), ahead)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    got.append(torch.empty(1))
    one, six = torch.tensor([float(rank)]), torch.arange(6.0).view(2, 3) * rank
    works = [dist.irecv(got[1], behind, tag=5), dist.irecv(got[2], behind, tag=4)]
    works += [dist.isend(one, ahead, tag=4), dist.isend(six, ahead, tag=5)]
    for work in works:
        work.wait()
    out += got
    polled = dist.irecv(y := torch.empty(2), behind)
    dist.send(torch.full((2,), float(rank)), ahead)
    while BACKEND != "gloo" and not polled.is_completed():  # gloo's is completed only when it was waited for
        pass
    polled.wait()
    out.append(y)
    groups = [dist.new_group([0, k]) for k in range(1, n)]
    for k, group in enumerate(groups, 1):
        if rank in (0, k):
            dist.all_reduce(y := x.clone(), group=group)
            out.append(y)
    dist.barrier()
    work = dist.all_reduce(y := x.clone(), async_op=True)
    work.wait()
    assert work.is_completed()
    return [*out, y]


def ddp() -> Any:
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.001)
    return [trained(net), [p.detach() for p in net.parameters()]]


def fsdp2() -> Any:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for block in net:
        fully_shard(block)
    fully_shard(net)
    losses = trained(net)
    return [losses, [p.full_tensor().detach() for p in net.parameters()]]


def dtensor() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
    torch.manual_seed(3)
    for p in net.parameters():
        nn.init.normal_(p)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(5)
    x = torch.randn(4, 12)
    net(x).square().sum().backward()
    return [net(x).detach(), [p.grad.full_tensor() for p in net.parameters() if p.grad is not None]]  # type: ignore[attr-defined]


def pipelining() -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(n)]
    stage = PipelineStage(blocks[rank], rank, n, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    torch.manual_seed(9)
    x, target, losses = torch.randn(8, 12), torch.randn(8, 12), []
    for _ in range(2):
        schedule.step(*((x,) if rank == 0 else ()), **({"target": target, "losses": losses} if rank == n - 1 else {}))
    return [[p.grad for p in blocks[rank].parameters()], [loss.detach() for loss in losses]]


def checkpoint() -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model())
    trained(net, 1)
    dcp.save({"model": net.state_dict()}, checkpoint_id=str(FOLDER / f"dcp-{BACKEND}"))
    torch.manual_seed(7)
    other = fully_shard(model())
    state = {"model": other.state_dict()}
    for value in state["model"].values():
        value.to_local().zero_()
    dcp.load(state, checkpoint_id=str(FOLDER / f"dcp-{BACKEND}"))
    return [value.full_tensor() for value in state["model"].values()]


SCENES = {f.__name__: f for f in (collectives, ddp, fsdp2, dtensor, pipelining, checkpoint)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(FOLDER / f"store-{BACKEND}"), size)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
    assert dist.get_backend() == BACKEND
    for name in sys.argv[1].split(","):
        torch.save(SCENES[name](), FOLDER / f"{name}-{BACKEND}-{rank}.pt")
    dist.destroy_process_group()
