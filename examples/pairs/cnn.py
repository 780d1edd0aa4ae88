"""A convolutional network with BatchNorm, clipping and accumulation."""

import sys

import plait
import torch
import torch.nn.functional as F
from torch import nn

comm = plait.join(device="cpu")
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(6, 10, 3, padding=1), nn.GroupNorm(2, 10), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
    *(nn.Flatten(), nn.Linear(10, 4)),
).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
engine = plait.Engine(model, comm, strategy=sys.argv[2], optimizer=optimizer)

generator = torch.Generator().manual_seed(1)
images = torch.randn(96, 1, 9, 9, dtype=torch.float64, generator=generator)
labels = images.mean((1, 2, 3)).argsort().argsort() // 24
losses = []
for epoch in range(3):
    for batch in torch.randperm(96, generator=generator).split(24):
        for part in batch.split(4)[comm.rank :: comm.world_size]:  # BatchNorm sees 4 images at a time
            loss = F.cross_entropy(model(images[part]), labels[part])
            engine.backward(loss, len(part), reduction="mean")
        engine.reduce(clip=1.0)
        optimizer.step()
        losses.append(engine.last.loss)

state = engine.full_state_dict()
if comm.rank == 0:
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    torch.save({"losses": losses, "model": state}, sys.argv[1])
comm.close()
