"""An engine for ``plait verify --engine examples/my_engine.py:by_hand``: data parallelism in ten lines."""

import torch
import torch.distributed as dist


def by_hand(job, model, comm):
    optimizer = job.optimizer(model.parameters())

    def step(batches, count, clip):
        optimizer.zero_grad()
        for batch in batches:
            (job.loss_fn(model, batch) / count).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return model, optimizer, step
