"""Configs made of sections: each section is a frozen dataclass next to the code that reads it.

    TrainConfig(mesh="shard=2", lr=0.1)         .machine.mesh == "shard=2"         .task.update.lr == 0.1

The names of all flags are different, so a config is made, changed and written to a file by them alone.
"""

from dataclasses import Field, fields, is_dataclass, replace
from typing import Any, Self, get_type_hints


class Sections:
    """Base of a frozen dataclass whose fields are sections or flags.  ``dataclasses.replace`` takes flags too."""

    def __init__(self, **values: Any) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = values.pop(field.name, field.default)
            if is_section(field):
                given = {name: values.pop(name) for name in flags(value) if name in values}
                value = replace(value, **given) if given else value
            object.__setattr__(self, field.name, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no setting {', '.join(values)}")

    def with_flags(self, **values: Any) -> Self:
        return replace(self, **values)  # type: ignore[type-var]


def is_section(field: Field[Any]) -> bool:
    return is_dataclass(field.default)


def flags(config: Any) -> dict[str, Any]:
    """All flags of a config, or of a section, with their values."""
    found: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        found |= flags(value) if is_section(field) else {field.name: value}
    return found


def flag_hints(kind: Any) -> dict[str, Any]:
    """The types of all flags of a config's class."""
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        found |= flag_hints(type(field.default)) if is_section(field) else {field.name: hints[field.name]}
    return found
