"""One process of the tests against torch's own checkpoints: FSDP2 on gloo, ``python fsdp2_ranks.py save|load ...``.

save FOLDER WHOLE [flat]    two updates of the decoder, saved by torch; the same whole, of rank 0, in a file
load FOLDER WHOLE           another decoder loads the folder by torch's own load, and equals the file
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from run_cases import decoder, differences, optimizers_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def build(change: int = 0) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """As ``run_cases.Training`` builds them."""
    model = decoder()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(change)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizers = list(optimizers_of(model))
    torch.optim.lr_scheduler.StepLR(optimizers[0], 3)  # groups get the keys that a schedule gives them
    return model, optimizers


def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], times: int) -> None:
    for step in range(times):
        for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            whole = torch.linspace(-1, number + step, parameter.numel()).view(parameter.shape)
            local = torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = local.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()


def state_of(model: nn.Module, optimizers: list[torch.optim.Optimizer], **options: bool) -> dict[str, Any]:
    own, state = get_state_dict(model, optimizers, options=StateDictOptions(**options))
    return {"model": own, "optim": state}


def main(what: str, folder: str, whole: str, *flags: str) -> None:
    dist.init_process_group("gloo")
    model, optimizers = build(change=int(what == "load"))
    if what == "save":
        update(model, optimizers, 2)
        extra = {"epoch": 7, "rng": torch.arange(9, dtype=torch.uint8), "words": ["a", ("b", None)]}
        state = state_of(model, optimizers, flatten_optimizer_state_dict="flat" in flags)
        dcp.save({**({"app": state} if "app" in flags else state), **extra}, checkpoint_id=folder)
    else:
        update(model, optimizers, 1)
        state = state_of(model, optimizers)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
    gathered = state_of(model, optimizers, full_state_dict=True, cpu_offload=True)
    if not dist.get_rank():
        if what == "save":
            torch.save(gathered, whole)
        else:
            print("differences:", differences(gathered, torch.load(whole)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # torch's threads may still run, and C++ ends a process that destroys one (seen once, in CI)
