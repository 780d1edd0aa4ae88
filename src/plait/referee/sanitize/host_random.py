"""Notices and refuses numbers from the generators of Python and numpy in a training forward.

The generators belong to the process: their values depend on everything drawn before, on the rank, in the thread.
plait sees calls of torch's random functions, but not of these, so it compares the generators' states (a few kilobytes)
before and after the first forward of a step; in a pipeline, around all its passes.

Another thread of the program, such as a loader's or another rank's, may draw in the meantime.  If there is one,
nothing is reported.
"""

import random
import sys
import threading

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
    states: dict[str, object] = {"random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *rest)
    return states


def _others() -> list[threading.Thread]:
    """The program's other threads; the main thread waits for ranks that are threads."""
    known = threading.current_thread(), threading.main_thread()
    return [one for one in threading.enumerate() if one not in known and not one.name.startswith("plait")]
