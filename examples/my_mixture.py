"""A mixture of experts of your own: plait verify --job examples/my_mixture.py:job --mesh "shard=4 expert=2"."""

import torch
from torch import nn

import plait
from plait.tensor.expert_axis import run_experts, within_capacity


class Experts(nn.Module):
    """Two matrices for each expert; the module owns them, [experts, ...] each."""

    expert_axis = None  # the engine puts the axis here

    def __init__(self, number, width, hidden):
        super().__init__()
        self.number = number
        self.up = nn.Parameter(torch.randn(number, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(number, hidden, width) / hidden**0.5)

    def forward(self, x, chosen, weight):
        if self.expert_axis is None:
            return run_experts(self.run, x, chosen, weight, 0, self.number)
        return self.expert_axis.experts(self.run, self.number, x, chosen, weight)

    def run(self, rows, number):
        """Rows, and for each the number of its expert among those on this rank."""
        out = torch.zeros_like(rows)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine = number == expert
            out[mine] = (rows[mine] @ up).relu() @ down
        return out


class Mixture(nn.Module):
    """x + the weighted sum of what each token's experts return; an expert takes 1.25 times an even share."""

    def __init__(self, number, width, chosen=2):
        super().__init__()
        self.router, self.experts = nn.Linear(width, number), Experts(number, width, 4 * width)
        self.chosen = chosen

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).topk(self.chosen)
        chosen = within_capacity(chosen, self.experts.number, 1.25, self.experts.expert_axis)
        return x + self.experts(x.flatten(0, 1), chosen.flatten(0, 1), weight.flatten(0, 1)).view_as(x)


def batch(step):
    x = torch.randn(16, 12, 8, generator=torch.Generator().manual_seed(step))  # samples, time, width
    return x, x.sin()


def loss_sum(model, batch):
    x, y = batch
    return (model(x) - y).square().sum()


job = plait.UserJob(
    build=lambda: nn.Sequential(nn.Linear(8, 16), Mixture(4, 16), Mixture(4, 16), nn.Linear(16, 8)),
    loss_fn=loss_sum,
    batches=batch,
    count_fn=lambda batch: batch[1].numel(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
)
