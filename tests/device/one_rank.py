"""A process of ``test_stand_in.py``: one rank on the stand-in.  Peak memory, and every wait of the host in a step.

``python one_rank.py <the compiled device>`` prints one JSON object a case.  A wait is the file and line of plait that
made it.
"""

import gc
import json
import os
import sys
import weakref
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


FUSED: dict[str, Any] = {"lr": 1e-3, "fused": True}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, foreach=False),
    "fused AdamW": partial(torch.optim.AdamW, **FUSED),
    "fused Adam": partial(torch.optim.Adam, **FUSED),
    "fused SGD": partial(torch.optim.SGD, **FUSED, momentum=0.9),
}


def engine_on(device: str, optimizer: str, strategy: str = "zero3", **settings: Any) -> plait.Engine:
    net = model().to(device)
    common: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer](net.parameters()), "loss_fn": loss_sum}
    return plait.Engine(net, plait.join(device=device), strategy=strategy, count_fn=len, **common, **settings)


def plait_step(strategy: str, microbatches: int = 1, optimizer: str = "AdamW", **settings: Any) -> Step:
    engine, batch = engine_on(stand_in.NAME, optimizer, strategy, **settings), torch.randn(SAMPLES, WIDTH)
    return partial(engine.step, [batch.to(stand_in.NAME)] * microbatches)


BAD = 3
"""The number of the batch whose loss is not finite."""


def batches() -> list[Tensor]:
    made = [torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    made[BAD][2, 5] = torch.inf
    return made


def late(optimizer: str) -> dict[str, Any]:
    """Runs on the device with a bad batch: where it was reported; how far the end is from the CPU's without it and the
    one after it, which is discarded where the error comes."""
    ours, right, told = (*(engine_on(place, optimizer, clip=0.5) for place in (stand_in.NAME, "cpu")), [])
    for number, batch in enumerate(batches()):
        try:
            result = ours.step([batch.to(stand_in.NAME)])
        except FloatingPointError as error:
            told.append((number, str(error)))
        if number not in (BAD, BAD + 1):
            wanted = right.step([batch])
    apart = [
        (ours.full_state_dict()[name] - value).abs().max().item() for name, value in right.full_state_dict().items()
    ]
    states = [
        [value.cpu() for state in one.optimizer_state_dict()["state"].values() for value in state.values()]
        for one in (ours, right)
    ]
    apart += [(a - b).abs().max().item() for a, b in zip(*states, strict=True)]
    numbers = ("loss", "grad_norm", "local_losses", "count", "made")
    same = [getattr(result, name) == getattr(wanted, name) for name in numbers]
    return {"told": told, "apart": max(apart), "same": all(same) and not hasattr(result, "other")}


def looks(look: Callable[[plait.Engine], Any]) -> list[str]:
    """The errors of two looks after a bad step."""
    engine, told = engine_on(stand_in.NAME, "fused AdamW"), []
    engine.step([batches()[BAD].to(stand_in.NAME)])
    for _ in range(2):
        try:
            look(engine)
        except FloatingPointError as error:
            told.append(str(error))
    return told


def reduced_by_the_loop() -> tuple[list[int], bool]:
    """The steps that raise where a loop looks before its update; True if a result keeps the engine."""
    engine, told = engine_on(stand_in.NAME, "fused AdamW"), []
    for number, batch in enumerate(batches()):
        try:
            engine.backward(loss_sum(engine.model, batch.to(stand_in.NAME)), count=len(batch))
            engine.reduce().loss.hex()
            engine.optimizers[0].step()
        except FloatingPointError:
            told.append(number)
    result, there = engine.step([batches()[0].to(stand_in.NAME)]), weakref.ref(engine)
    assert result.loss > 0
    del engine
    gc.collect()
    return told, there() is not None


def on_two_devices() -> str:
    """The refusal of a collective between a tensor of the device and one of the CPU."""
    out, piece = torch.zeros(4, device=stand_in.NAME), torch.zeros(4)
    try:
        plait.join(device=stand_in.NAME).all_gather(out, piece, ("shard",))
    except ValueError as error:
        return str(error)
    return "taken"


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
    cases |= {name: {"clip": 1.0, "optimizer": name} for name in OPTIMIZERS if name.startswith("fused")}
    for name, settings in cases.items():
        found = waits(device, plait_step("zero3", **settings))
        print(json.dumps({"case": f"waits, {name}", "waits": found}), flush=True)
    for name in OPTIMIZERS:
        if name.startswith("fused"):
            print(json.dumps({"case": f"late, {name}"} | late(name)), flush=True)
    every: dict[str, Callable[[plait.Engine], Any]] = {"loss": lambda e: e.last.loss, "made": lambda e: e.last.made}
    for name, look in {**every, "save": lambda e: e.check_between_steps("a save")}.items():
        print(json.dumps({"case": f"looks, {name}", "told": looks(look)}), flush=True)
    print(json.dumps({"case": "a loop's reduction", "found": reduced_by_the_loop()}), flush=True)
    print(json.dumps({"case": "two devices", "told": on_two_devices()}), flush=True)
    os._exit(0)  # torch's threads of the device would outlive it


if __name__ == "__main__":
    main()
