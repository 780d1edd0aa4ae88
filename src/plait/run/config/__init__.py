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
