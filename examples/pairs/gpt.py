"""A small GPT with ragged lines, accumulation, two groups of parameters and a scheduler."""

import math
import sys

import plait
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LENGTH, STEPS, IGNORED = 20, 2, 11, 12, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step):
    """12 lines of text of different lengths, and what comes next in each; 0 and IGNORED behind their ends."""
    lines = [f"{n} * {n} = {n * n}"[: LENGTH + 1].encode() for n in range(12 * step, 12 * step + 12)]
    x = torch.tensor([list(line[:-1].ljust(LENGTH, b"\0")) for line in lines])
    y = torch.tensor([list(line[1:]) + [IGNORED] * (LENGTH + 1 - len(line)) for line in lines])
    return x, y


comm = plait.join(device="cpu")
torch.manual_seed(0)
model = GPT().double()
decays = [p for p in model.parameters() if p.dim() > 1]
rest = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)
engine = plait.Engine(model, comm, strategy=sys.argv[2], optimizer=optimizer, clip=1.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1, (step + 1) / 3) * (1 + math.cos(math.pi * step / STEPS)) / 2
)

losses, norms = [], []
for step in range(STEPS):
    x, y = batch(step)
    for xs, ys in list(zip(x.split(2), y.split(2)))[comm.rank :: comm.world_size]:  # of six microbatches
        loss = F.cross_entropy(model(xs).flatten(0, 1), ys.flatten(), ignore_index=IGNORED, reduction="sum")
        engine.backward(loss, (ys != IGNORED).sum())
    optimizer.step()
    scheduler.step()
    losses.append(engine.last.loss)
    norms.append(engine.last.grad_norm)

state = engine.full_state_dict()
if comm.rank == 0:
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    torch.save({"losses": losses, "norms": norms, "model": state}, sys.argv[1])
comm.close()
