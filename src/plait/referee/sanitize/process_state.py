"""Refuses forwards that use state of the process: generators of Python and numpy, torch's cache of parametrizations.

The generators' values depend on everything drawn before, on the rank, in the thread.  plait sees torch's random
functions, but not theirs, so it compares the generators' states (a few kilobytes) before and after the first training
forward of a step; in a pipeline, around all its passes.  Another thread of the program, such as a loader's or another
rank's, may draw in the meantime.  If there is one, nothing is reported.

The cache is emptied when the last thread leaves its block.  So a rank may find the tensors that it made before its last
update, while another rank is late.
"""

import random
import threading

import numpy as np
from torch import nn
from torch.nn.utils import parametrize

from plait.comm.thread import ThreadComm
from plait.step.engine import Engine


class HostRandomness:
    """Compares the generators of the process around the passes of a step."""

    def __init__(self, engine: Engine) -> None:
        self._before: dict[str, object] = {}
        if engine.placed.num_stages == 1:  # else a program calls no forward
            engine.model.register_forward_hook(lambda *_: self._check())

    def __call__(self, event: str, engine: Engine) -> None:
        """Follows a step."""
        if event in ("begun", "off"):
            self._before = _states() if event == "begun" else {}
        elif event == "backward":
            self._check()

    def _check(self) -> None:
        """Raises ValueError if the first forward of the step has drawn."""
        before, self._before = self._before, {}
        if not before or _others():
            return
        after = _states()
        for name in (name for name, state in before.items() if after[name] != state):
            raise ValueError(
                f"the model draws from the generator of {name} in a training forward, which belongs to the process: "
                f"its values would depend on the rank and on how the batch is cut. Use torch's (torch.rand of "
                f"[samples, ...], or of [] for one number a step), which plait serves by position, or draw in the data "
                f"pipeline"
            )


def _states() -> dict[str, object]:
    kind, keys, *rest = tuple(np.random.get_state())
    return {"random": random.getstate(), "numpy": (kind, keys.tobytes(), *rest)}  # type: ignore[attr-defined]


def _others() -> list[threading.Thread]:
    """The program's other threads; the main thread waits for ranks that are threads."""
    known = threading.current_thread(), threading.main_thread()
    return [one for one in threading.enumerate() if one not in known and not one.name.startswith("plait")]


def refuse_cached(engine: Engine) -> None:
    """Makes each parametrization of the model raise ValueError inside of ``cached()``, if ranks are threads."""
    if not isinstance(engine.comm, ThreadComm) or engine.comm.world_size == 1:
        return
    probe = parametrize.register_parametrization(nn.LayerNorm(1), "weight", nn.Softplus()).requires_grad_(False)

    def check(*_: object) -> None:
        if probe.weight is probe.weight:
            raise ValueError(
                "torch.nn.utils.parametrize.cached() has one cache for the process, and ranks are threads here: each "
                "may read what it has cached before its last update. Leave it out, or train with ranks as processes"
            )

    for module in (module for stage in engine.placed.stages.values() for module in stage.model.modules()):
        if isinstance(module, parametrize.ParametrizationList):
            module.register_forward_pre_hook(check)
