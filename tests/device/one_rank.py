"""A process of ``test_stand_in.py``: one rank on the stand-in.  Peak memory, and every wait of the host in a step.

``python one_rank.py <the compiled device>`` prints one JSON object a case.  A wait is the file and line of plait that
made it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import stand_in
import torch
from torch import Tensor, nn

import plait

SOURCE = Path(plait.__file__).parent
WIDTH, SAMPLES = 160, 1024
Step = Callable[[], Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3))
    return nn.Sequential(*blocks).to(stand_in.NAME)


def loss_sum(net: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = net(batch)
    return out.square().sum()


def torch_step() -> Step:
    net, batch = model(), torch.randn(SAMPLES, WIDTH).to(stand_in.NAME)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)

    def step() -> None:
        torch.autograd.backward(loss_sum(net, batch) / SAMPLES)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plait_step(strategy: str, microbatches: int = 1, **settings: Any) -> Step:
    net, batch = model(), torch.randn(SAMPLES, WIDTH).to(stand_in.NAME)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    common: dict[str, Any] = {"optimizer": optimizer, "loss_fn": loss_sum, "count_fn": len}
    engine = plait.Engine(net, plait.join(device=stand_in.NAME), strategy=strategy, **common, **settings)
    return lambda: engine.step([batch] * microbatches)


def peak(device: Any, make: Callable[[], Step]) -> int:
    """Peak bytes on the device of two steps, after two."""
    gc.collect()  # the engine before
    step = make()
    for number in range(4):
        if number == 2:
            device.peak_bytes()
        step()
    return int(device.peak_bytes())


def waits(device: Any, step: Step) -> list[str]:
    """The place of each wait in one step, after two."""
    places: list[str] = []

    def note() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(SOURCE):
            frame = frame.f_back
        if frame is None:
            places.append("outside of plait")
        else:
            places.append(f"{Path(frame.f_code.co_filename).relative_to(SOURCE)}:{frame.f_lineno}")

    step()
    step()
    device.on_wait(note)
    step()
    device.on_wait(None)
    return places


def main() -> None:
    device = stand_in.load(Path(sys.argv[1]))
    torch.set_num_threads(1)
    print(json.dumps({"case": "memory, torch", "peak": peak(device, torch_step)}), flush=True)
    for strategy in ("ddp", "zero3"):
        most = peak(device, partial(plait_step, strategy))
        print(json.dumps({"case": f"memory, {strategy}", "peak": most}), flush=True)
    cases: dict[str, dict[str, Any]] = {"plain": {}, "clipped": {"clip": 1.0}, "3 microbatches": {"microbatches": 3}}
    for name, settings in cases.items():
        print(
            json.dumps({"case": f"waits, {name}", "waits": waits(device, plait_step("zero3", **settings))}), flush=True
        )
    os._exit(0)  # torch's threads of the device would outlive it


if __name__ == "__main__":
    main()
