"""torch's FSDP2 on the same model and batches: two gloo ranks, each block and the root a unit.

The ranks are forked from the model's own process, which has everything in memory; rank 0's file is the answer.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from catalogue import SIZES, Batches, count
from torch import nn
from torch.distributed.fsdp import fully_shard
from trial import OPTIMIZER, STEPS, Order, Run, loss_sum

RANKS = 2
ORDER: Order = ((0, 2, 4), (1, 3, 5))
DEADLINE = 60.0


def fsdp2(model: nn.Module, batches: Batches) -> Run:
    """Raises RuntimeError with the first rank's error."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(RANKS):
            if not (pid := os.fork()):
                _rank_main(rank, model, batches, Path(folder))
            pids.append(pid)
        end = time.monotonic() + DEADLINE
        waiting = set(pids)
        while waiting and time.monotonic() < end:
            waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
            if any(Path(folder).glob("error-*")):
                break
            time.sleep(0.02)
        for pid in waiting:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        errors = sorted(Path(folder).glob("error-*"))
        if errors:
            raise RuntimeError(errors[0].read_text())
        if waiting:
            raise RuntimeError(f"no answer in {DEADLINE:.0f} s")
        answer = Path(folder) / "run"
        if not answer.exists():
            raise RuntimeError("a rank died without a word")
        run: Run = pickle.loads(answer.read_bytes())
        return run


def _rank_main(rank: int, model: nn.Module, batches: Batches, folder: Path) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
        run = _train(rank, copy.deepcopy(model), batches)
        if rank == 0:
            (folder / "run").write_bytes(pickle.dumps(run))
        dist.barrier()
    except BaseException as error:
        last = str(error).strip().splitlines() or [""]
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {last[0]}")
        traceback.print_exc()
    finally:
        os._exit(0)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The children of the outermost lists."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    modules = dict(model.named_modules())
    return [child for name in found for child in modules[name] if any(True for _ in child.parameters())]


def _train(rank: int, model: nn.Module, batches: Batches) -> Run:
    for block in blocks_of(model):
        if type(block).forward is not nn.Module.forward and not isinstance(block, nn.ModuleList):
            fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
    losses = []
    for step in range(STEPS):
        made = [batches.microbatch(step, index) for index in range(len(SIZES))]
        total = sum(map(count, made))
        sum_of_losses = torch.zeros((), dtype=torch.float64)
        for group in range(len(SIZES) // RANKS):
            loss = loss_sum(model, made[RANKS * group + rank])
            (loss * RANKS / total).backward()  # gradients are averaged over the ranks
            sum_of_losses += loss.detach().double()
        dist.all_reduce(sum_of_losses)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum_of_losses.item() / total)
    whole = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    return Run(losses, whole)
