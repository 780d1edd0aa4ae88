"""Faults as text and as values: ``KIND[=VALUE]@rank=R,step=N[,operation=K][,always]``.

    kill@rank=2,step=20                  kill -9 of rank 2 at its second operation in step 20
    stop@rank=1,step=7,operation=5       SIGSTOP at its fifth operation
    slow=2x@rank=0,step=5                from step 5 on, rank 0 takes twice as long for everything
    exception@rank=2,step=4,always       also in the attempts after a restart

Steps are counted from 1, as in ``metrics.jsonl``.  A restarted run is hit again only if the fault says ``always``.
"""

import re
import signal
from dataclasses import dataclass

FAULTS = {
    "kill": "SIGKILL, as from the kernel when memory runs out",
    "stop": "SIGSTOP: the process stands still until it is continued",
    "signal": "a signal, as from a scheduler (signal=SIGUSR1)",
    "slow": "from this step on, everything takes the rank that many times as long (slow=2x)",
    "nan": "the loss of a microbatch becomes NaN",
    "exception": "the rank raises RuntimeError",
    "skip-collective": "the rank leaves out a collective, with no other sign",
    "flip": "one bit of a parameter that the rank keeps is flipped",
    "disk-full": "no file of the rank may grow beyond 4 kB (RLIMIT_FSIZE)",
    "exit": "the rank's process ends, with exit code 0",
}
"""The faults, and their meanings."""

OF_A_PROCESS = ("kill", "stop", "signal", "exit", "disk-full")
"""Faults of a whole process: with threads as ranks they would hit all ranks."""

FORM = "KIND[=VALUE]@rank=R,step=N[,operation=K][,always], as in kill@rank=2,step=20"
NUMBER, FACTOR = re.compile("[0-9]{1,9}"), re.compile(r"([1-9][0-9]{0,2}(\.[0-9]{1,3})?)x?")


@dataclass(frozen=True)
class Fault:
    """One fault.  All ranks read it, but only the rank that it names acts."""

    kind: str
    rank: int
    step: int
    """Number of the step, from 1."""
    value: float = 2.0
    """The factor of ``slow``, the number of a ``signal``."""
    operation: int = 2
    """Number of the operation in the step, from 1 (for ``skip-collective``, among those that may be left out).  If the
    step has fewer operations, the fault happens at its end, when the next step begins."""
    always: bool = False

    def __str__(self) -> str:
        value = f"={self.value:g}x" if self.kind == "slow" else ""
        value = f"={signal.Signals(int(self.value)).name}" if self.kind == "signal" else value
        return f"{self.kind}{value} on rank {self.rank} in step {self.step}"


def parse_fault(text: str, ranks: int, *, threads: bool = False) -> Fault:
    """Parses the fault that a text describes, for a run of so many ranks, which may be threads of one process.
    ValueError for another form, an unknown kind or key, an impossible rank or step."""
    head, _, place = text.strip().partition("@")
    kind, equals, value = head.partition("=")
    given = {name.strip(): what.strip() for name, _, what in (word.partition("=") for word in place.split(","))}
    always = given.pop("always", None)
    numbers = {name: int(what) for name, what in given.items() if NUMBER.fullmatch(what)}
    read = numbers.keys() == given.keys() and {"rank", "step"} <= numbers.keys() <= {"rank", "step", "operation"}
    if kind not in FAULTS or always or not read or 0 in (numbers["step"], numbers.get("operation")):
        raise ValueError(f"cannot read the fault {text!r}: give {FORM}; the kinds are {', '.join(FAULTS)}")
    if numbers["rank"] >= ranks:
        raise ValueError(f"rank {numbers['rank']} in the fault {text!r}: the run has ranks 0 to {ranks - 1}")
    if threads and kind in OF_A_PROCESS:
        raise ValueError(f"the fault {kind!r} is one of a process, and these ranks are threads: give --world process")
    number = 2.0
    if kind == "signal":
        name = f"SIG{value.upper().removeprefix('SIG')}"
        if name not in signal.Signals.__members__:
            raise ValueError(f"{value!r} in the fault {text!r} is not a signal: give its name, as in signal=SIGUSR1")
        number = signal.Signals[name].value
    elif equals:
        factor = FACTOR.fullmatch(value)
        if kind != "slow" or factor is None:
            raise ValueError(f"{value!r} in the fault {text!r}: only slow has a value, a factor from 1, as in slow=2x")
        number = float(factor[1])
    return Fault(kind, **numbers, value=number, always=always is not None)
