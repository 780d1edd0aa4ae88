"""Reports of ranks whose operation failed, shown in the error of each of them.

Sockets show that a peer is silent or gone, never its operation.  So a rank whose operation failed posts one line in the
store where the ranks met, waits a moment for the lines of the others, and puts them all in its error:

    rank 0 waited 5 s in all_gather of unit 'blocks.3' over shard (...)
      rank 1: waited 5 s in all_gather of unit 'blocks.4' over shard (...)
      rank 2: reported nothing: it is gone, or still computing

Nothing is posted while all goes well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from plait.comm.deadline import within
from plait.comm.process_identity import Peer
from plait.messages.escape import one_line

if TYPE_CHECKING:
    from plait.torch_private import Store

PATIENCE_SECONDS = 2.0
"""Seconds that a failed rank waits for the others' reports."""
LONGEST_REPORT = 1000


class FailureReports:
    """One line per failed rank, in a store that all ranks reach."""

    def __init__(self, store: Store, rank: int, peers: Sequence[Peer] = ()) -> None:
        self._store, self._rank = store, rank
        self._names = {peer.rank: str(peer) for peer in peers}

    def error(self, operation: str, cause: BaseException, deadline: float, others: Sequence[int]) -> OSError:
        """Returns the error of this rank, whose ``operation`` ended with ``cause``, with the reports of the others: a
        TimeoutError if the deadline passed, a ConnectionError if the connection broke."""
        late = isinstance(cause, TimeoutError) or "timed out" in str(cause).lower()
        report = f"waited {deadline:g} s in {operation}" if late else f"lost its connections in {operation}"
        try:
            posted = within(PATIENCE_SECONDS + 1, lambda: self._exchange(report, others))
            reports = dict.fromkeys(others, "reported nothing: it is gone, or still computing") | posted
        except (RuntimeError, TimeoutError):  # the store's own host or process may be gone, stopped or cut off
            reports = dict.fromkeys(others, "could not be asked: the store where the ranks met does not answer")
        lines = [f"rank {self._rank} {report}"]
        lines += [f"  {self._names.get(r, f'rank {r}')}: {text}" for r, text in reports.items()]
        if not late:
            lines.append(f"  (the transport says: {str(cause).splitlines()[0] if str(cause) else cause!r})")
        return (TimeoutError if late else ConnectionError)("\n".join(lines))

    def post(self, report: str) -> None:
        """Posts this rank's line for the others."""
        with contextlib.suppress(RuntimeError):  # the store's own rank may be gone
            self._store.set(_key(self._rank), report)

    def _exchange(self, report: str, others: Sequence[int]) -> dict[int, str]:
        """Posts a report; returns the reports that other ranks have posted within ``PATIENCE_SECONDS``."""
        reports: dict[int, str] = {}
        end = time.monotonic() + PATIENCE_SECONDS
        self._store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
        self._store.set(_key(self._rank), report)
        while True:
            for rank in others:
                if rank not in reports and self._store.check([_key(rank)]):
                    reports[rank] = one_line(self._store.get(_key(rank)).decode(errors="replace"), LONGEST_REPORT)
            if len(reports) == len(others) or time.monotonic() > end:
                break
            time.sleep(0.02)
        return reports


def _key(rank: int) -> str:
    return f"plait/failure of rank/{rank}"
