"""Describes a run as one frozen value, checked before any process starts.

settings.py    ``TrainConfig`` and ``VerifyConfig``: combine the sections, and derive values from them
layout.py      the section that distributes the model over the ranks
machine.py     the section for the ranks, checked against this machine
bounds.py      the smallest and the largest value of each setting
room.py        checks that a run fits into this machine
check.py       ``validate``: refuses impossible runs, with the numbers and the fix
file.py        writes a config as TOML, and reads it back
sinks.py       writes the numbers of each step

The sections for the training job are in ``job``, next to the code that uses them.
"""

from typing import TYPE_CHECKING

from plait.later import later

if TYPE_CHECKING:
    from plait.run.config.check import validate
    from plait.run.config.file import from_toml, to_toml
    from plait.run.config.layout import names_a_file, read_schedule
    from plait.run.config.machine import Device, MachineConfig, World, check_machine, resolve_device
    from plait.run.config.settings import RunConfig, TrainConfig, VerifyConfig, with_job
else:
    __getattr__ = later(
        __name__,
        {
            "check": "validate",
            "file": "from_toml to_toml",
            "layout": "names_a_file read_schedule",
            "machine": "Device MachineConfig World check_machine resolve_device",
            "settings": "RunConfig TrainConfig VerifyConfig with_job",
        },
    )

__all__ = ["Device", "MachineConfig", "RunConfig", "TrainConfig", "VerifyConfig", "World", "check_machine", "from_toml"]
__all__ += ["names_a_file", "read_schedule", "resolve_device", "to_toml", "validate", "with_job"]
