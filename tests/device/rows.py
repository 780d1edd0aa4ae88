"""The process of ``test_stand_in.py``: it trains on the CPU and on the stand-in, and prints how far apart they are.

``python rows.py <the compiled device>`` prints one JSON object a case, and how often a step waits for the device.
"""

import copy
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import stand_in
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.referee.sanitize.drift import DriftCheck

WIDTH, WORDS, LENGTH, MICROBATCHES = 12, 31, 7, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (-1, 4)).transpose(1, 2) for h in self.qkv(self.norm(x)).chunk(3, dim=-1))
        later = torch.full((LENGTH, LENGTH), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        weights = (q @ k.mT + later).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(x))))
        return out


class Decoder(nn.Module):
    """Parameters and a buffer of its own beside the blocks, noise, a tied head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.places = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head.weight = self.embed.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.places)

    def forward(self, words: Tensor, shift: Tensor | None = None) -> Tensor:
        x = (self.embed(words) + self.places) * self.scale
        x = x if shift is None else x + shift
        if self.training:
            x = x + 0.01 * torch.randn(len(x), 1, 1, dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def penalised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss, and the size of a gradient that the program itself asks for."""
    words, targets = batch
    shift = torch.zeros(LENGTH, WIDTH, dtype=torch.float64, device=words.device, requires_grad=True)
    loss = F.cross_entropy(model(words, shift).flatten(0, 1), targets.flatten(), reduction="sum")
    if torch.is_grad_enabled():
        (slope,) = torch.autograd.grad(loss, shift, create_graph=True)
        loss = loss + slope.square().sum()
    return loss


def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")


def model_on(device: torch.device, template: Decoder) -> Decoder:
    model = copy.deepcopy(template).to(device)
    model.head.weight = model.embed.weight  # torch unties weights that move to a device of this kind
    return model


def drawn_on(device: torch.device) -> Decoder:
    """A model whose parameters the engine draws; its buffer is on the device."""
    with plait.empty_parameters():
        model = Decoder(4).double()
    model.scale = model.scale.to(device)
    return model


def train(comm: plait.Comm, template: Decoder, waits: Any, settings: dict[str, Any]) -> dict[str, Any]:
    settings = {**settings}
    own = settings.pop("own_loop", False)
    loss_fn = penalised if settings.pop("penalised", False) else plain
    model = drawn_on(comm.device) if settings.pop("drawn", False) else model_on(comm.device, template)
    rank = comm.data_rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    comm.engine_watchers += (partial(DriftCheck, every=settings.pop("check_drift", 1)),)
    common: dict[str, Any] = {"optimizer": optimizer}
    if not own:
        common |= {"loss_fn": loss_fn, "count_fn": lambda batch: batch[1].numel(), "clip": 0.5}
    engine = plait.Engine(model, comm, **common, **settings)
    losses, waited = [], 0
    for step in range(3):
        numbers = torch.Generator().manual_seed(10 * step + rank)
        sizes = [2 + (m + rank) % 2 for m in range(MICROBATCHES)]
        batches = [
            (torch.randint(WORDS, (n, LENGTH), generator=numbers), torch.randint(WORDS, (n, LENGTH), generator=numbers))
            for n in sizes
        ]
        batches = [(x.to(comm.device), y.to(comm.device)) for x, y in batches]
        waits()
        if own:
            for x, y in batches:
                losses.append(plain(model, (x, y)).detach())
                engine.backward(plain(model, (x, y)), y.numel())
            losses.append(engine.reduce(clip=0.5).grad_norm)
            optimizer.step()
        else:
            losses.append(engine.step(batches).loss)
        waited = waits()
    if not own:
        losses.append(engine.evaluate(batches).loss if "schedule" not in settings else 0.0)
    state = engine.full_state_dict()
    values = {} if state is None else {name: value.cpu() for name, value in state.items()}
    return {"losses": [float(loss) for loss in losses], "state": values, "waited": waited}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("shard=2", {"strategy": "ddp"}),
    "zero1": ("shard=3", {"strategy": "zero1"}),
    "zero2": ("shard=2", {"strategy": "zero2", "recompute": "full"}),
    "zero3": ("shard=3", {"strategy": "zero3"}),
    "zero3 with an own loop": ("shard=2", {"strategy": "zero3", "own_loop": True}),
    "zero3 with a gradient inside": ("shard=2", {"strategy": "zero3", "penalised": True}),
    "zero3, drawn by the engine": ("shard=3", {"strategy": "zero3", "drawn": True}),
    "hybrid": ("replica=2 shard=2", {"strategy": "psdp"}),
    "offload": ("shard=2", {"strategy": plait.TABLE["zero2"].offloaded()}),
    "1f1b": ("pipe=2", {"schedule": "1f1b"}),
    "interleaved": ("pipe=2", {"schedule": "interleaved"}),
    "zb_h1 with zero3": ("pipe=2 shard=2", {"schedule": "zb_h1", "strategy": "zero3"}),
    "dualpipe_v": ("pipe=2", {"schedule": "dualpipe_v"}),
    "tensor": ("tensor=2", {"strategy": "zero3", "tensor_plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}),
}


def main() -> None:
    device = stand_in.load(Path(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    template = Decoder(4).double()

    def first_rank(mesh: str, place: str, template: Decoder, settings: dict[str, Any]) -> dict[str, Any]:
        waits = device.host_waits
        return plait.run_threads(
            mesh, lambda c: train(c, template, waits, {**settings}), device=place, deadline=20, sanitize=False
        )[0]

    for name, (mesh, settings) in CASES.items():
        ours, right = (first_rank(mesh, place, template, settings) for place in (stand_in.NAME, "cpu"))
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], right["losses"], strict=True) if b)
        state = max(float((ours["state"][k] - value).abs().max()) for k, value in right["state"].items())
        print(json.dumps({"case": name, "losses": apart, "state": state}), flush=True)
    for layers in (2, 5):
        deep = first_rank("shard=2", stand_in.NAME, Decoder(layers).double(), {"strategy": "zero3", "check_drift": 0})
        print(json.dumps({"case": f"{layers} layers", "waited": deep["waited"]}), flush=True)
    os._exit(0)  # torch's threads of the device would outlive it


if __name__ == "__main__":
    main()
