"""Messages under way in a process, and the work that a wait for them does.

    P2PWork    messages, then something to finish (an ordered reduction, and the second phase of a large all-reduce)
    Sent       the handle of a message that was sent, whether it is kept or dropped

torch's handles and the memory they work on are kept until a wait, even where the user drops the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from plait.comm.operation import Operation
from plait.comm.transport import Started, Transport

NO_GRADIENTS = nullcontext()
"""The context where no gradients are recorded anyway, as in a backward."""


class P2PWork:
    """Messages, and their last step; ``under_way`` keeps them until a wait."""

    def __init__(
        self,
        transport: Transport,
        operation: Operation,
        works: list[Started],
        under_way: dict[int, P2PWork],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._transport, self._operation, self._works, self._finish = transport, operation, works, finish
        self._under_way = under_way
        under_way[id(self)] = self

    @property
    def is_under_way(self) -> bool:
        return self._under_way.get(id(self)) is self

    def wait(self) -> None:
        """Waits for the messages, then finishes; a second call does nothing."""
        if not self.is_under_way:
            return
        with torch.no_grad() if torch.is_grad_enabled() else NO_GRADIENTS:
            try:
                self._transport.wait(self._operation, self._works)
            finally:
                del self._under_way[id(self)]
            if self._finish is not None:
                self._finish()
        self._works, self._finish = [], None


class Sent:
    """The handle of a message to another rank; where it is dropped before a wait, ``dropped`` keeps the message."""

    def __init__(self, message: P2PWork, dropped: dict[int, P2PWork]) -> None:
        self._message, self._dropped = message, dropped

    def wait(self) -> None:
        self._message.wait()

    def __del__(self) -> None:
        if self._message.is_under_way:
            self._dropped[id(self._message)] = self._message
