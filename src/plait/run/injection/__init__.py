"""Injects faults: kills, stops or slows a rank, feeds it NaN, ... at a step of a real run.

faults.py     the faults as one table; parses "kill@rank=2,step=20"    start here
injected.py   the observer that injects them, and ``inject(engine, ...)``
"""

from plait.run.injection.faults import FAULTS, Fault, parse_fault
from plait.run.injection.injected import inject

__all__ = ["FAULTS", "Fault", "inject", "parse_fault"]
