"""A run as one frozen value, checked before any process starts.

settings.py    TrainConfig and VerifyConfig: the flags, and what follows from them
check.py       validate: what is known to be impossible, with the numbers and the fix
machine.py     where ranks live, and what this machine allows of it
file.py        a config as TOML, and back
"""

from plait.config.check import validate
from plait.config.file import from_toml, to_toml
from plait.config.machine import Device, Machine, World, check_machine, resolve_device
from plait.config.settings import RunConfig, TrainConfig, VerifyConfig, names_a_file, read_schedule

__all__ = [
    "Device",
    "Machine",
    "RunConfig",
    "TrainConfig",
    "VerifyConfig",
    "World",
    "check_machine",
    "from_toml",
    "names_a_file",
    "read_schedule",
    "resolve_device",
    "to_toml",
    "validate",
]
