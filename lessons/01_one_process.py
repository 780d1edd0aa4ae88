"""Lesson 1: one process.

The idea.  Every way to spread a training run over many machines must compute what one process would have computed.  So
the course begins with that process: sixteen linear layers, one CPU, one loop.  A training step makes four kinds of
numbers: *parameters*, *gradients*, *optimizer state*, and the *activations* that the backward reads again.  The first
three stay until the next step.  Nearly all of this course is about where to put them.

Predict before you run it:
  1. Adam has not made a step yet.  How many numbers does its state hold?
  2. A training step keeps P parameters.  How many numbers does it keep in all, after the first step of Adam?
  3. We write the backward by hand, with the loop ``for i in range(15, 0, -1)``.  What is wrong?

    plait lesson run 1
"""

import copy
import time

import torch
from torch import Tensor, nn

import plait

LAYERS, WIDTH, SAMPLES, STEPS = 16, 24, 32, 3
RANKS, WHY = (1,), "it is about one process"

torch.manual_seed(0)  # once: sixteen different layers.  Seeding before each layer would make them all the same.
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
with torch.no_grad():
    for block in MODEL:
        block[0].weight.mul_(2.4)  # keeps the signal alive through sixteen layers
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()


# 1. The step, with autograd and a stock optimizer.  Every other lesson is compared with it.


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(X) - Y).square().sum() / len(X)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# 2. The same gradients from nothing: forward keeps the tensors for backward, which walks the layers in reverse.
#    For one layer  z = h W^T + b,  h' = max(z, 0):
#        dz = dh' where z > 0        dW = dz^T h        db = sum of dz over samples        dh = dz W


def gradients_by_hand(model: nn.Sequential, stop: int = -1) -> dict[str, Tensor]:
    layers = [block[0] for block in model]
    kept, h = [], X  # the activations
    with torch.no_grad():
        for layer in layers:
            z = h @ layer.weight.T + layer.bias
            kept.append((h, z))
            h = z.clamp(min=0)
        dh = 2 * (h - Y) / len(X)
        found = {}
        for i in range(len(layers) - 1, stop, -1):
            h, z = kept.pop()
            dz = dh * (z > 0)
            found[f"{i}.0.weight"], found[f"{i}.0.bias"] = dz.T @ h, dz.sum(0)
            dh = dz @ layers[i].weight
    return found


def main(ranks: int = 1) -> None:
    torch.set_num_threads(1)
    model = copy.deepcopy(MODEL)
    weights = [block[0].weight for block in model]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i]), "all layers are different"

    # Prediction 1: none.  Optimizer state is lazy: it appears with a parameter's first update.  Lesson 10 needs this.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    size = sum(p.numel() for p in model.parameters())
    print(f"{LAYERS} layers, P = {size:,} parameters; numbers in Adam's state before a step: {len(optimizer.state)}")
    assert not optimizer.state

    # Prediction 2: 4 P.  Parameters, gradients, and two running means for each parameter.
    losses = train(model, optimizer)
    state = sum(s[name].numel() for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    grads = sum(p.grad.numel() for p in model.parameters())
    print(f"after {STEPS} steps: P parameters, {grads / size:g} P gradients, {state / size:g} P of optimizer state")
    print("losses", [round(loss, 4) for loss in losses])
    assert grads == size and state == 2 * size and losses == sorted(losses, reverse=True)

    # Prediction 3: layer 0 never trains.  We compare whole tensors: one printed element would not have shown it.
    autograd = copy.deepcopy(MODEL)
    ((autograd(X) - Y).square().sum() / len(X)).backward()
    expected = {name: p.grad for name, p in autograd.named_parameters()}
    found, short = gradients_by_hand(MODEL), gradients_by_hand(MODEL, stop=0)
    worst = max(((found[n] - g).abs().max() / g.abs().max()).item() for n, g in expected.items())
    print(f"backward by hand against autograd: largest difference {worst:.0e} of each gradient's largest element")
    print("range(15, 0, -1) leaves out", sorted(expected.keys() - short.keys()))
    assert found.keys() == expected.keys() and worst < 1e-5
    assert expected.keys() - short.keys() == {"0.0.weight", "0.0.bias"}

    # The same in plait: one rank is the plain loop, to the bit.
    ours, comm = copy.deepcopy(MODEL), plait.join()
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-3)
    engine = plait.Engine(ours, comm, strategy="zero3", optimizer=optimizer)
    for _ in range(STEPS):
        engine.backward((ours(X) - Y).square().sum(), count=len(X))
        optimizer.step()
    state, plain = engine.full_state_dict(), model.state_dict()
    assert state.keys() == plain.keys() and all(torch.equal(state[name], plain[name]) for name in plain)
    print("plait.Engine on one rank: after the same steps every parameter equals the plain loop's, to the bit")

    # The measurement: where one step spends its time.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = time.perf_counter()
    loss = (model(X) - Y).square().sum() / len(X)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    update = time.perf_counter()
    spent = {"forward": forward - start, "backward": backward - forward, "update": update - backward}
    print("measured here:", ", ".join(f"{part} {1e3 * seconds:.2f} ms" for part, seconds in spent.items()))


if __name__ == "__main__":
    main()
