"""Lesson 2: the memory wall.

The idea.  A model stops fitting long before it is slow.  Ten billion parameters in fp32 are 40 GB; a good consumer card
has 24 GB.  And parameters are the small part: training also keeps a gradient and, with Adam, two running means for each
of them.  So the first question about any way to spread a run is not "how fast?" but "what does each rank hold?".

Predict before you run it:
  1. Ten billion parameters, fp32, Adam.  How many GB does training hold between two steps?
  2. ZeRO cuts optimizer state (stage 1), gradients too (stage 2), parameters too (stage 3).  With as many 24 GB cards
     as you like, which stages can ever fit this model?  How many cards do they need?
  3. One trillion parameters on 256 devices: how many GB of state does each hold under stage 3?

    plait lesson run 2
"""

import math

import torch
from torch import nn

import plait
from plait.predict.memory import formula

GB, CARD = 1e9, 24e9
RANKS, WHY = range(1, 65), "it prints a share for each of them"


# 1. From nothing: bytes of each kind, and the number of ranks that divides it.


def held(parameters: float, stage: int, ranks: int) -> dict[str, float]:
    """Bytes that one rank holds between steps: fp32 everywhere, Adam."""
    return {
        "parameters": parameters * 4 / (ranks if stage >= 3 else 1),
        "gradients": parameters * 4 / (ranks if stage >= 2 else 1),
        "optimizer": parameters * 8 / (ranks if stage >= 1 else 1),
    }


def cards_needed(parameters: float, stage: int, most: int = 4096) -> int | None:
    """The smallest number of cards on which a stage fits, if any does."""
    fitting = (n for n in range(1, most + 1) if sum(held(parameters, stage, n).values()) <= CARD)
    return next(fitting, None)


# 2. A formula is a claim about tensors.  This counts the bytes of real ones.


def held_by_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    def size(tensors: list[torch.Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    states = [t for state in optimizer.state.values() for key, t in state.items() if key != "step"]
    return {
        "parameters": size(list(model.parameters())),
        "gradients": size([p.grad for p in model.parameters() if p.grad is not None]),
        "optimizer": size(states),
    }


# 3. Activations are not in the formula: they come and go within a step.  torch reports those it keeps for backward.


def kept_for_backward(model: nn.Module, x: torch.Tensor) -> int:
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if not isinstance(t, nn.Parameter) and t._base is None:
            kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).sum()
    return sum(kept.values())


def main(ranks: int = 4) -> None:
    # Prediction 1: 160 GB, four times the parameters.
    one = held(10e9, 0, 1)
    print("derived, 10 B parameters:", ", ".join(f"{kind} {size / GB:.0f} GB" for kind, size in one.items()))
    print(f"in all {sum(one.values()) / GB:.0f} GB, on a card of {CARD / GB:.0f} GB")
    assert one["parameters"] == 40 * GB and sum(one.values()) == 160 * GB

    # Prediction 2: only stage 3.  The state that a stage does not cut stays whole on any number of ranks.
    found = {stage: cards_needed(10e9, stage) for stage in range(4)}  # @over
    for stage, cards in found.items():
        floor = held(10e9, stage, 10**9)
        least = f"never fits: {sum(floor.values()) / GB:.0f} GB are not cut" if cards is None else f"{cards} cards"
        print(f"  stage {stage}: {least}")
    assert found == {0: None, 1: None, 2: None, 3: 7} and math.ceil(160 / 24) == 7

    # Prediction 3: 16 bytes times 10^12 / 256.
    trillion = sum(held(1e12, 3, 256).values())
    print(f"1 T parameters on 256 devices, stage 3: {trillion / GB:.1f} GB each")
    assert trillion == 62.5 * GB

    # The formula against real tensors: to the byte.
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    size = sum(p.numel() for p in model.parameters())
    counted = held_by_tensors(model, optimizer)
    total = sum(counted.values())
    assert counted == held(size, 0, 1) and total == 16 * size
    print(f"a small model of {size} parameters holds {total} bytes, as computed")

    # Activations grow with the batch, not with the parameters.
    few, many = (kept_for_backward(model, torch.randn(n, 32)) for n in (8, 80))
    print(f"kept for backward: {few} bytes for 8 samples, {many} for 80")
    assert many == 10 * few

    # The same in plait: a row of the table, a mesh, one call.
    for stage, row in enumerate(("ddp", "zero1", "zero2", "zero3")):
        share = formula(10e9, plait.Mesh.parse(f"shard={ranks}"), plait.TABLE[row])
        by_hand = held(10e9, stage, ranks)
        planned, formulas = (share.params, share.grads, share.optimizer), by_hand.values()
        assert all(abs(a - b) < 8 for a, b in zip(planned, formulas, strict=True))  # whole elements
        assert abs(share.total - sum(formulas)) < 24
        print(f"  {row:6} on {ranks} ranks: {share.total / GB:6.1f} GB each")
    print("plait plan --params 10B --gpus 8xrtx4090 --dtype fp32 asks this of every row; lesson 19 counts bytes sent")


if __name__ == "__main__":
    main()
