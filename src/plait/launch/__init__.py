"""From one command to many ranks: processes that plait starts, threads of this one, or one rank under torchrun.

local.py      launch(config, body, command): the choice, and the start of processes    start here
failure.py    what is printed, and the exit code, when a rank fails
"""

from plait.launch.failure import guarded
from plait.launch.local import launch

__all__ = ["guarded", "launch"]
