"""One rank of an example with remote calls, and its reference: ``example_ranks.py NAME``."""

import sys
from pathlib import Path

import torch

import plait

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def pipeline() -> None:
    """The stage of each rank has the bits of plait's own pipeline under 1F1B."""
    from remote_pipeline import loss_of, make_data, make_model, train

    comm = plait.join("pipe=2", deadline=20)
    stage = train(comm)
    model = make_model()
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = plait.Engine(
        model,
        comm,
        strategy="ddp",
        optimizer=optimizer,
        loss_fn=lambda model, batch: loss_of(model(batch[0]), batch[1]),
        count_fn=lambda batch: len(batch[1]),
    )
    for step in range(3):
        engine.step(make_data(step))
    wanted = engine.full_state_dict()
    for name, p in stage.named_parameters():  # a slice keeps the names of the whole
        assert torch.equal(p, wanted[name]), (name, (p - wanted[name]).abs().max())
        assert not torch.equal(p, first[name]), name
    comm.close()


def parameter_server() -> None:
    """All ranks have the bits of one process that adds the same parts in the same order."""
    from parameter_server import BATCH, STEPS, make_batch, make_model, train

    comm = plait.join(deadline=20)
    values = train(comm)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = comm.mesh.size - 1
    for step in range(STEPS):
        summed = [torch.zeros_like(p) for p in model.parameters()]
        for x, y in zip(*(whole.tensor_split(parts) for whole in make_batch(step)), strict=True):
            gradients = torch.autograd.grad((model(x) - y).square().sum(), [*model.parameters()])
            summed = [a + b for a, b in zip(summed, gradients, strict=True)]
        for p, gradient in zip(model.parameters(), summed, strict=True):
            p.grad = gradient / BATCH
        optimizer.step()
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    comm.close()


{"pipeline": pipeline, "parameter_server": parameter_server}[sys.argv[1]]()
print("done", flush=True)
