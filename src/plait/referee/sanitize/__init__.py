"""Sanitizers: watchers of an engine that detect a program's mistakes for which the engine itself does not look.

changed.py          modules and parameters that were added or replaced
collectives.py      ranks that mean different operations, before any of them runs
drift.py            replicated state that is no longer the same on all ranks
probe.py            optimizers that depend on more than an element, or than a tensor
process_state.py    forwards that use the generators of Python and numpy, or torch's cache of parametrizations
unreduced.py        gradients that are read before they are summed
whole_gradients.py  gradients that tensor ranks should have in common
written.py          writes to parameters and pieces that would be lost, and gradients that are kept

They work in steps 0, 1, 2, 100, 200, ...: at most 1 % of a run's time.  ``WrittenPieces`` works in every step, and
``WholeGradients`` until it has seen each gradient, which may be zero for long.  ``plait.join``, ``plait.run_threads``,
``plait train`` and ``plait verify`` turn them on; ``sanitize=False`` turns them off.
"""

from collections.abc import Callable

from plait.comm import Comm
from plait.forward.interceptor import looks
from plait.referee.sanitize.changed import ChangedModel
from plait.referee.sanitize.probe import check_optimizers
from plait.referee.sanitize.process_state import HostRandomness, refuse_cached
from plait.referee.sanitize.unreduced import UnreducedGradients
from plait.referee.sanitize.whole_gradients import WholeGradients
from plait.referee.sanitize.written import OptimizerWrites, WrittenParameters, WrittenPieces
from plait.step.engine import Engine


def sanitized(comm: Comm) -> Comm:
    """Returns the same world, on which engines look for mistakes of the program."""
    if Sanitizers not in comm.engine_watchers:
        comm.engine_watchers += (Sanitizers,)
    return comm


class Sanitizers:
    """All sanitizers of one engine, on their schedule; a factory of watchers for ``Comm.engine_watchers``."""

    def __init__(self, engine: Engine) -> None:
        self._seen, self._on = 0, False
        self._optimizers = engine.optimizers
        check_optimizers(engine.placed)
        refuse_cached(engine)
        self._all: list[Callable[[str, Engine], None]] = [  # each gets "off" when it stops working
            ChangedModel(engine),
            HostRandomness(engine),
            UnreducedGradients(),
            WrittenParameters(engine),
            OptimizerWrites(engine),
        ]
        self._always = WholeGradients(engine), WrittenPieces(engine)

    def __call__(self, event: str, engine: Engine) -> None:
        """Passes an event to all sanitizers in the steps in which they work."""
        for check in self._always:
            check(event, engine)
        if event == "begun":
            before, self._on = self._on, looks(self._seen)
            self._seen += 1
            if before and not self._on:
                for one in self._all:
                    one("off", engine)
            if self._optimizers is not engine.optimizers:  # given by ``engine.use``
                self._optimizers = engine.optimizers
                check_optimizers(engine.placed)
        if self._on:
            for one in self._all:
                one(event, engine)
