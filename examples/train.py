import sys

import plait
import torch

comm = plait.join()                                     # was: init_process_group()
torch.manual_seed(0)                                    # every rank builds the same model
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
x, y = torch.randn(48, 32), torch.randn(48, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
row = sys.argv[1] if sys.argv[1:] else "zero3"
engine = plait.Engine(model, comm, strategy=row, optimizer=optimizer)     # was: DDP(model)
x, y = (w.chunk(comm.mesh.data_size)[comm.data_rank].to(comm.device) for w in (x, y))
for step in range(20):
    loss = (model(x) - y).square().sum()                # a sum, not a mean
    engine.backward(loss, count=len(y))                 # was: loss.backward()
    optimizer.step()                                    # no zero_grad: a step's sums start anew
print(f"rank {comm.rank}: loss {engine.last.loss:.5f}, held {engine.placed.bytes_held()['params']} bytes of parameters")
comm.close()
