"""The steps of which the protocol of shared memory is made, and what each of them does to what is shared.

    post, take, wait      a semaphore: up; down, if it can; down, asleep until it can (value: how often it could)
    load, store           a plain access to a slot of a mailbox, a block, a lent tensor or a piece of common memory
    mail, poll, filled    a mailbox as a whole: a record in, or not where it is full; a record out; how many are in it
    doze, sleep, wake     an alarm as a whole: sleeps until it was rung since it began to doze
    ring                  rings another's
    told, heard           the semaphores of common memory, up and down
    nap                   looks once more

and for three ranks, with fewer places:

    drain, await          takes out of all mailboxes as many records as it likes; sleeps until there are some
    tell, hear            the semaphores of common memory of all members at once
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator
from itertools import product
from typing import Any, TypeAlias

Step: TypeAlias = tuple[Any, ...]
Program: TypeAlias = Generator[Step, Any, None]
Memory: TypeAlias = tuple[Any, ...]
"""All that is shared."""

RANKS = 3
"""At most."""


def shown(value: Any) -> str:
    return " ".join(map(shown, value)) if isinstance(value, tuple) else str(value)


class Shared:
    """Gives the steps their meaning; everything shared starts as 0, which is also an empty mailbox.

    Args:
        capacity: records that a mailbox holds.
        weak: posts wait in a rank's store buffer, and a ``take`` that fails orders nothing (ARM with glibc).
        naps: a sleep may end without a bell.
        start: what is in each mailbox.
    """

    def __init__(
        self, *, capacity: int = 4, weak: bool = False, naps: bool = False, bells: bool = True, mail: bool = True
    ) -> None:
        self.capacity, self.weak, self.naps, self.bells, self.mail = capacity, weak, naps, bells, mail
        self._places: dict[Hashable, int] = {}

    def get(self, shared: Memory, key: Hashable) -> Any:
        place = self._places.setdefault(key, len(self._places))
        return shared[place] if place < len(shared) else 0

    def set(self, shared: Memory, key: Hashable, value: Any) -> Memory:
        place = self._places.setdefault(key, len(self._places))
        values = [*shared, *([0] * (place + 1 - len(shared)))]
        values[place] = value
        while values and values[-1] == 0:
            values.pop()
        return tuple(values)

    def add(self, shared: Memory, key: Hashable, value: int) -> Memory:
        return self.set(shared, key, self.get(shared, key) + value)

    def outcomes(self, shared: Memory, rank: int, step: Step) -> list[tuple[Any, Memory]]:
        """What a step may give back, and what is shared then; nothing where it waits."""
        kind, *args = step
        match kind:
            case "load":
                return [(self.get(shared, ("cell", *args)), shared)]
            case "store":
                *cell, value = args
                return [(None, self.set(shared, ("cell", *cell), value))]
            case "mail":
                dst, record = args
                mail = self.get(shared, ("mail", rank, dst)) or ()
                if len(mail) == self.capacity:
                    return [(False, shared)]
                return [(True, self.set(shared, ("mail", rank, dst), (*mail, record)))]
            case "poll":
                (src,) = args
                mail = self.get(shared, ("mail", src, rank)) or ()
                if not mail:
                    return [(None, shared)]
                return [(mail[0], self.set(shared, ("mail", src, rank), mail[1:] or 0))]
            case "drain" | "await":
                mails = [(src, self.get(shared, ("mail", src, rank)) or ()) for src in range(RANKS)]
                told = any(self.get(shared, ("told", src, rank)) for src in (args[0] if args else ()))
                found = []
                for counts in product(*(range(len(mail) + 1) for _, mail in mails)):
                    then, taken = shared, []
                    for (src, mail), count in zip(mails, counts, strict=True):
                        taken += [(src, record) for record in mail[:count]]
                        then = self.set(then, ("mail", src, rank), mail[count:] or 0) if count else then
                    if taken or told or kind == "drain":
                        found.append((tuple(taken), then))
                return found
            case "filled":
                return [(len(self.get(shared, ("mail", rank, args[0])) or ()), shared)]
            case "told":
                return [(None, self.add(shared, ("told", rank, args[0]), 1))]
            case "tell":
                for dst in args[0]:
                    shared = self.add(shared, ("told", rank, dst), args[1])
                return [(None, shared)]
            case "hear":
                taken = tuple(min(most, self.get(shared, ("told", src, rank))) for src, most in args[0])
                for (src, _), count in zip(args[0], taken, strict=True):
                    shared = self.add(shared, ("told", src, rank), -count)
                return [(taken, shared)]
            case "heard":
                key = ("told", args[0], rank)
                if not self.get(shared, key):
                    return [(False, shared)]
                return [(True, self.add(shared, key, -1))]
            case "doze" | "ring" | "wake" if not self.bells:
                return [(None, shared)]
            case "sleep" if not self.bells:
                return [(True, shared)] if self._something(shared, rank) else []
            case "doze":
                return [(None, self.set(shared, ("asleep", rank), 1))]
            case "ring":
                if not self.get(shared, ("asleep", args[0])):
                    return [(None, shared)]
                awake = self.set(shared, ("asleep", args[0]), 0)
                return [(None, self.set(awake, ("rung", args[0]), 1))]
            case "sleep":
                woken = [(True, self.set(shared, ("rung", rank), 0))] if self.get(shared, ("rung", rank)) else []
                return woken + ([(False, shared)] if self.naps else [])
            case "wake":
                awake = self.set(shared, ("asleep", rank), 0)
                return [(None, self.set(awake, ("rung", rank), 0))]
            case "post":
                if self.weak:
                    waiting = self.get(shared, ("buffer", rank)) or ()
                    return [(None, self.set(shared, ("buffer", rank), (*waiting, args[0])))]
                return [(None, self.add(shared, args[0], 1))]
            case "take" | "wait":
                flushed = self.flushed(shared, rank)
                found = [(True, self.add(flushed, args[0], -1))] if self.get(flushed, args[0]) else []
                if kind == "wait":
                    return found + ([(False, flushed)] if self.naps else [])
                return found or [(False, shared)]
            case "value":
                return [(self.get(shared, args[0]), shared)]
            case "nap":
                return [(None, shared)]
        raise ValueError(f"no such step: {step}")

    def _something(self, shared: Memory, rank: int) -> bool:
        """Whether anything is there for a rank."""
        for key, place in self._places.items():
            if key[0] in ("mail", "told") and key[2] == rank and place < len(shared) and shared[place]:
                return True
        return False

    def gives(self, shared: Memory, rank: int, step: Step) -> bool:
        """Whether a step only adds to what others may take."""
        if step[0] == "mail":
            return len(self.get(shared, ("mail", rank, step[1])) or ()) < self.capacity
        return step[0] in ("tell", "told", "nap") or (step[0] in ("ring", "doze", "wake") and not self.bells)

    def commutes(self, shared: Memory, rank: int, step: Step) -> bool:
        """Whether a step can be done now, with the same effect before and after whatever the others do."""
        match step:
            case ("nap",):
                return True
            case ("hear", wanted):
                return all(self.get(shared, ("told", src, rank)) >= most for src, most in wanted)
            case ("doze" | "ring" | "wake", *_):
                return not self.bells
            case ("poll", _) if not self.mail:
                return True
            case ("heard", src):
                return bool(self.get(shared, ("told", src, rank)))
            case ("poll", src):
                return 0 < len(self.get(shared, ("mail", src, rank)) or ()) < self.capacity
        return False

    def flushed(self, shared: Memory, rank: int) -> Memory:
        """What a rank has posted is there for all: the effect of a step that succeeds, or of entering the kernel."""
        for key in (self.get(shared, ("buffer", rank)) or ()) if self.weak else ():
            shared = self.add(shared, key, 1)
        return self.set(shared, ("buffer", rank), 0) if self.weak else shared

    def buffered(self, shared: Memory, rank: int) -> Iterator[tuple[Any, Memory]]:
        """A post that leaves the store buffer, the oldest first."""
        if self.weak and (waiting := self.get(shared, ("buffer", rank))):
            yield waiting[0], self.set(self.add(shared, waiting[0], 1), ("buffer", rank), waiting[1:] or 0)
