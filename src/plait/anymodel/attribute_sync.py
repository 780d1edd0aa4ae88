"""The user's modules, and the copies of them that a stage runs: what a program sets on one, and a forward on the other.

    program     model.alpha = 0.5, model.scale.fill_(2)    ──►  the copies on every stage, before a step's first forward
    a forward   self.calls += 1                            ──►  the user's model, behind its last, if all stages say so

The code of a model's own forward runs on every stage as far as its links, so what it writes before the first of them is
the same on all.  What it writes between links, or behind the last, only some stages see, and so it is with buffers of a
module that several stages run: later forwards would read other numbers than a single process.  That is refused.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any
from zlib import crc32

from torch import Tensor, nn

from plait.comm import Comm
from plait.comm.agree import gather_texts
from plait.forward.attributes import PLAIN, attributes_of
from plait.pipeline.program import Writes
from plait.table.collectives import Note

_MISSING = object()


def translated(value: Any, known: Mapping[int, nn.Module]) -> Any:
    """A value in which modules of the model are those of the part; itself where there are none in it."""
    if isinstance(value, nn.Module):
        return known.get(id(value), value)
    if isinstance(value, MethodType):
        bound = known.get(id(value.__self__), value.__self__)
        return value if bound is value.__self__ else MethodType(value.__func__, bound)
    if type(value) in (list, tuple):
        items = [translated(one, known) for one in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        new = {key: translated(one, known) for key, one in value.items()}
        return new if any(new[key] is not one for key, one in value.items()) else value
    return value


class CopiedModule:
    """A module of the user's, and what a stage runs in its place.

    Args:
        name: where it is in the model, with a point behind.
        known: modules of the part by ``id`` of those of the model, of which a value may be made.
        everywhere: every stage has a copy of it, so that what forwards write to it can be compared.
    """

    def __init__(
        self, name: str, user: nn.Module, copied: nn.Module, known: Mapping[int, nn.Module], *, everywhere: bool = True
    ) -> None:
        self.name, self.user, self.copied, self._known, self._everywhere = name, user, copied, known, everywhere
        self._seen = attributes_of(user)
        self._shared = {key for key, b in user._buffers.items() if copied._buffers.get(key) is b}
        self._buffers = {key: (b, b._version) for key, b in user._buffers.items() if b is not None}
        self._numbers: dict[str, Any] = {}
        self._versions: dict[str, tuple[Tensor, int]] = {}

    def follow(self) -> None:
        """Take over what a program has set since."""
        user = attributes_of(self.user)
        self.copied.training = self.user.training
        for key, value in user.items():
            if value is not self._seen.get(key, _MISSING):
                vars(self.copied)[key] = translated(value, self._known)
        for key in self._seen.keys() - user.keys():
            vars(self.copied).pop(key, None)
        self._seen = user
        for key, buffer in self.user._buffers.items():
            mine = self.copied._buffers.get(key)
            if buffer is None or mine is buffer:
                continue
            known, version = self._buffers.get(key, (None, 0))
            if known is not buffer or version != buffer._version:
                device = buffer.device if mine is None else mine.device  # the engine may have moved the copy's
                self.copied._buffers[key] = buffer.to(device, copy=key not in self._shared)
                self._buffers[key] = buffer, buffer._version

    def begin_step(self) -> None:
        """What is written from here on, a forward writes."""
        self._numbers = {key: value for key, value in attributes_of(self.copied).items() if type(value) in PLAIN}
        self._versions = {key: (b, b._version) for key, b in self.copied._buffers.items() if b is not None}

    def numbers(self) -> dict[str, Any]:
        """Those that forwards have changed."""
        now = vars(self.copied)
        changed = (key for key, before in self._numbers.items() if now.get(key, _MISSING) != before)
        return {key: now[key] for key in changed if type(now.get(key)) in PLAIN}

    def written(self) -> dict[str, str]:
        """What forwards have written, by name."""
        if not self._everywhere:
            return {}
        found = {f"{self.name}{key}": repr(value) for key, value in self.numbers().items()}
        for key, (before, version) in self._versions.items():
            if self.copied._buffers.get(key) is not before:
                found[f"{self.name}{key}"] = "replaced"
            elif before._version != version:
                found[f"{self.name}{key}"] = f"written {before._version - version} times"
        return found

    def give_back(self) -> None:
        """The user's module gets what forwards have written to the copy."""
        for key, value in self.numbers().items():
            self._seen[key] = vars(self.user)[key] = value
        for key in self._shared:
            self.user._buffers[key] = self.copied._buffers.get(key)
        self._buffers = {key: (b, b._version) for key, b in self.user._buffers.items() if b is not None}


class SharedModule(CopiedModule):
    """A module that several stages run, each with buffers of its own: what one writes, no other has."""

    def __init__(self, name: str, module: nn.Module, stage: int) -> None:
        super().__init__(name, module, module, {})
        self._stage = stage

    def written(self) -> dict[str, str]:
        return {key: f"{value} by stage {self._stage}" for key, value in super().written().items()}

    def numbers(self) -> dict[str, Any]:
        """A count of calls is each stage's own."""
        return {}


class ForwardWrites(Writes):
    """What the forwards of a step have written to the copies of modules, on each stage of this rank."""

    def __init__(self, stages: Iterable[Sequence[CopiedModule]]) -> None:
        self._stages = list(stages)
        self._told = [{key: text for one in copies for key, text in one.written().items()} for copies in self._stages]

    def number(self) -> float:
        """For the report: a digest, 0 where nothing was written, -1 where this rank's stages differ."""
        if any(told != self._told[0] for told in self._told):
            return -1.0
        return float(crc32(repr(sorted(self._told[0].items())).encode())) if self._told[0] else 0.0

    def agree(self, comm: Comm, numbers: Sequence[float], in_stage: int) -> None:
        """All ranks have reported: the user's modules get what was written, unless stages have written other things.

        Args:
            numbers: of all ranks, of which those that are ``in_stage`` apart work on the same samples.

        Raises:
            ValueError: on all ranks, the names of what differs.
        """
        if any(numbers) and (-1 in numbers or any(len({*numbers[i::in_stage]}) > 1 for i in range(in_stage))):
            texts = [json.loads(text) for text in gather_texts(comm, json.dumps(self._told), Note("report"))]
            stages = [[told for text in texts[i::in_stage] for told in text] for i in range(in_stage)]
            names = {key for row in stages for told in row for key in told if len({t.get(key) for t in row}) > 1}
            raise ValueError(
                f"forwards write to {', '.join(sorted(names)[:4])}, and not on every stage of the pipeline the same "
                f"(between or behind the links, in a module that several stages run, or a clock), so the next one "
                f"would read another value than in a single process: write to it before the first link or between "
                f"steps, have it in a link of one stage, or train without a pipe axis"
            )
        for one in (one for copies in self._stages for one in copies):
            one.give_back()
