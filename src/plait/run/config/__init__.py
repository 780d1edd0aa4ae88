"""A run as one frozen value, checked before any process starts.

settings.py    ``TrainConfig`` and ``VerifyConfig``: the sections together, and what follows from them
layout.py      the section of how the model lies on the ranks
machine.py     the section of the ranks, and what this machine allows of it
bounds.py      the least and the most that each setting may be
room.py        whether a run fits into this machine
check.py       ``validate``: what is known to be impossible, with the numbers and the fix
file.py        a config as TOML, and back
sinks.py       where the numbers of each step go

The sections of what is trained are in ``job``, with what they make.
"""

from typing import TYPE_CHECKING

from plait.later import later

if TYPE_CHECKING:
    from plait.run.config.check import validate
    from plait.run.config.file import from_toml, to_toml
    from plait.run.config.layout import names_a_file, read_schedule
    from plait.run.config.machine import Device, MachineConfig, World, check_machine, resolve_device
    from plait.run.config.settings import RunConfig, TrainConfig, VerifyConfig, section, with_job
else:
    __getattr__ = later(
        __name__,
        {
            "check": "validate",
            "file": "from_toml to_toml",
            "layout": "names_a_file read_schedule",
            "machine": "Device MachineConfig World check_machine resolve_device",
            "settings": "RunConfig TrainConfig VerifyConfig section with_job",
        },
    )

__all__ = ["Device", "MachineConfig", "RunConfig", "TrainConfig", "VerifyConfig", "World", "check_machine", "from_toml"]
__all__ += ["names_a_file", "read_schedule", "resolve_device", "section", "to_toml", "validate", "with_job"]
