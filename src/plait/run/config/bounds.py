"""Bounds of the settings, as data: a row for each number, one rule for every text.  They are checked before any loop,
allocation or process uses a setting.

    microbatches    1 .. 65,536        deadline    above 0 .. 1e6        any text    not empty, printable, 4,096 bytes

A test refuses a number without a row.  Checks that depend on several settings are in ``check.py``.
"""

import math
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from plait.messages.escape import one_line

MANY = 1_000_000_000_000
"""More steps than any run makes."""
SEEDS = (1 << 63) - 1
LONGEST = 4096
"""Largest number of bytes in a text, such as a path, and of texts in a setting."""


class Bounds(NamedTuple):
    """The smallest and the largest value of a number, if it is given."""

    least: float
    most: float
    above: bool = False
    """True if the number must be greater than ``least``."""

    def refuses(self, value: float) -> bool:
        return not self.least <= value <= self.most or (self.above and value == self.least)


_COUNT = Bounds(1, MANY)

BOUNDS: dict[str, Bounds] = {
    "layers": Bounds(1, 1_000),
    "width": Bounds(1, 1 << 17),
    **dict.fromkeys(("ffn", "vocab"), Bounds(1, 1 << 22)),
    **dict.fromkeys(("heads", "kv_heads", "experts", "chosen"), Bounds(1, 1 << 12)),
    "capacity": Bounds(0, 1 << 12, above=True),
    "rope_base": Bounds(0, 1e30, above=True),
    "length": Bounds(1, 1 << 22),
    "dropout": Bounds(0, 1),
    "batch": Bounds(1, 1 << 24),
    "microbatches": Bounds(1, 1 << 16),
    "stages": Bounds(1, 1 << 16),
    "chunks": Bounds(1, 1 << 10),
    "hold": Bounds(0, 1 << 16),
    "prefetch": Bounds(0, 1 << 16),
    "bucket": Bounds(0, 1 << 40),
    **dict.fromkeys(("steps", "epochs", "log_every", "save_every", "keep", "eval_steps"), _COUNT),
    **dict.fromkeys(("warmup", "eval_every", "check_drift"), Bounds(0, MANY)),
    "spread": Bounds(0, 1 << 10),
    "hosts": Bounds(1, 1 << 16),
    "top": Bounds(1, 1_000),
    "measure": Bounds(0, 100),
    "step": Bounds(0, SEEDS),
    "seed": Bounds(-SEEDS, SEEDS),
    "lr": Bounds(0, 1e30, above=True),
    "min_lr": Bounds(0, 1),
    "weight_decay": Bounds(0, 1e30),
    "clip": Bounds(0, math.inf, above=True),
    "loss_scale": Bounds(0, 2.0**126, above=True),
    "threads": Bounds(1, 1 << 10),
    "workers": Bounds(0, 1 << 8),
    "ranks": Bounds(1, 1 << 12),
    "number": Bounds(1, 99),
    "deadline": Bounds(0, 1e6, above=True),
    "grace": Bounds(0, 1e6),
    "restarts": Bounds(0, 1_000),
    "repeat": Bounds(1, 1_000_000),
    "ranks_per_host": Bounds(1, 1 << 16),
    **dict.fromkeys(("minutes", "memory", "cpus"), Bounds(1, 1 << 20)),
}
"""Bounds by the setting's name, which is the same in every command."""


def check_values(settings: Any) -> None:
    """Raises ValueError, with the setting's name, for numbers out of bounds and for implausible texts in a dataclass of
    settings, which may contain others."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value) and not isinstance(value, type) and field.name != "job":
            check_values(value)
        elif isinstance(value, tuple):
            if len(value) > LONGEST:
                raise ValueError(f"{field.name} has {len(value):,} values: give at most {LONGEST:,}")
            for one in value:
                _check_text(field.name, one)
        elif isinstance(value, str):
            _check_text(field.name, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(field.name, value)


def _check_number(name: str, value: float) -> None:
    least, most, above = bounds = BOUNDS[name]
    if not bounds.refuses(value):
        return
    whole = isinstance(value, int)
    shown = f"of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 10**30 else f"{value}"
    begin = f"above {least:g}" if above else f"from {least:,}" if whole else f"from {least:g}"
    end = f" to {most:,}" if isinstance(most, int) else f" to {most:g}" if most < math.inf else ""
    raise ValueError(f"{name} is {shown}: give a {'whole ' * whole}number {begin}{end}")


def _check_text(name: str, text: str) -> None:
    if not text:
        raise ValueError(f"{name} is empty: give a value, or leave it out")
    if one_line(text) != text:
        raise ValueError(f"{name} is {text[:80]!r}, which a terminal would obey: give plain text")
    if len(text.encode()) > LONGEST:
        raise ValueError(f"{name} has {len(text.encode()):,} bytes: give at most {LONGEST:,}")
