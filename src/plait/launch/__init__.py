"""From one command to many ranks: own processes, threads of this one, or a place under torchrun.

local.py      launch(config, body, command): the choice, and the start of own processes    start here
failure.py    what is said, and with which exit code, when a rank fails
"""

from plait.launch.failure import guarded
from plait.launch.local import launch

__all__ = ["guarded", "launch"]
