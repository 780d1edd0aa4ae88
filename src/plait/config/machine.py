"""Where ranks live: the settings that every command that starts ranks has, and what this machine allows of them."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from plait.core.mesh import Mesh

World = Literal["process", "thread"]
Device = Literal["auto", "cpu", "cuda"]


class Machine(Protocol):
    """The settings that say where ranks live; every command that starts ranks has them."""

    @property
    def mesh(self) -> str: ...
    @property
    def world(self) -> World: ...
    @property
    def device(self) -> Device: ...
    @property
    def threads(self) -> int: ...
    @property
    def deadline(self) -> float: ...
    @property
    def port(self) -> int: ...


def check_machine(config: Machine) -> None:
    """Refuses ports and devices that this machine does not have."""
    if not 0 <= config.port <= 65535:
        raise ValueError(f"port {config.port} is no port: give 0 (any free one) or 1 to 65535")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch sees no CUDA device here; use --device cpu, or see plait doctor")
    ranks, gpus = Mesh.parse(config.mesh).size, torch.cuda.device_count()
    if resolve_device(config.device) == "cuda" and config.world == "process" and ranks > gpus:
        raise ValueError(
            f"{ranks} ranks on {gpus} CUDA devices: NCCL needs one each; "
            f"use a mesh of {gpus} or fewer, --world thread, or --device cpu"
        )


def resolve_device(device: Device) -> Literal["cpu", "cuda"]:
    """What ``auto`` means on this machine."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device
