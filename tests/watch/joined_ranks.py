"""A user's script under torchrun: three ranks train, and one behaves as the first word says; run by test_joined.py."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import plait

HOW, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = int(sys.argv[3]) if len(sys.argv) > 3 else 10_000

torch.set_num_threads(1)
comm = plait.join(deadline=40)
(FOLDER / f"rank{comm.rank}.pid").write_text(str(os.getpid()))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
engine = plait.Engine(model, comm, strategy="zero3", optimizer=optimizer)
for step in range(STEPS):
    if step == 5 and comm.rank == 1:
        if HOW == "leave":
            sys.exit(0)
        if HOW == "still":
            time.sleep(60)
    if HOW == "wait":
        time.sleep(0.02)
    x = torch.ones(4, 16)
    loss = model(x).square().sum()
    engine.backward(loss, 4)
    optimizer.step()
    if step == 3 and comm.rank == 0:
        (FOLDER / "trains").touch()
    if engine.last is not None and engine.last.stop is not None:
        line = f"rank {comm.rank} stops behind step {engine.last.step}: {engine.last.stop}\n"
        os.write(1, line.encode())  # one write, because the ranks share the pipe
        break
if HOW != "careless":
    comm.close()
