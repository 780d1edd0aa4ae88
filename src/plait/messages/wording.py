"""Words for people.

did_you_mean("ZeRO-3", TABLE)    did you mean zero3?
human(1572864)                   1.50 MiB
seconds_text(0.0123)             12.3 ms
signal_name(9)                   SIGKILL
"""

import difflib
import re
import signal
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", most: int = 2) -> str:
    """Asks for the names nearest to ``name``, or returns ``otherwise``; case, blanks and punctuation do not count."""
    plain = {_plain(one): one for one in names}
    near = [_plain(name)] if _plain(name) in plain else difflib.get_close_matches(_plain(name), plain, n=most)
    return f"did you mean {' or '.join(plain[one] for one in near)}?" if near else otherwise


def human(size: float) -> str:
    """Bytes with a unit, powers of 1024, three digits: ``1.50 MiB``."""
    units, power = ("B", "KiB", "MiB", "GiB", "TiB"), 0
    while size >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.{2 if power else 0}f} {units[power]}"


def seconds_text(seconds: float) -> str:
    """Formats seconds in three digits with a unit: ``12.3 ms``."""
    if seconds >= 999.5:
        return f"{seconds:.0f} s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def signal_name(number: int) -> str:
    """Names a signal: ``SIGKILL`` for 9."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
