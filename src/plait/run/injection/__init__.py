"""Faults on purpose: a rank is killed, stopped, slowed, fed NaN, ... at a step of a real run.

faults.py     what may be injected, as one table; "kill@rank=2,step=20" as a value    start here
injected.py   the observer that does it, and ``inject(engine, ...)``
"""

from plait.run.injection.faults import FAULTS, Fault, parse_fault
from plait.run.injection.injected import inject

__all__ = ["FAULTS", "Fault", "inject", "parse_fault"]
