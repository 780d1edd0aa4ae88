"""Merges the records of all ranks into frames: one step index per rank.  A process writes its record to a file.

Ranks are aligned at collectives, by the number that each has called.  Between two collectives all ranks advance
together, or by time if they send messages to each other; ranks of one host share a clock.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path

from plait.checkpoint.files.writing import write_text
from plait.run.course.tracer import RankTrace

MESSAGES = ("send", "recv")


def align(ranks: Sequence[RankTrace]) -> list[list[int]]:
    """One step index per rank for each frame of the page."""
    at = [0] * len(ranks)
    frames: list[list[int]] = []
    sections = [_sections(rank) for rank in ranks]
    for section in range(max((max(s, default=0) for s in sections), default=0) + 1):
        spans = [[i for i, s in enumerate(of_rank) if s == section] for of_rank in sections]
        if any(_sends(rank, span) for rank, span in zip(ranks, spans, strict=True)):
            at = [span[0] if span else at[r] for r, span in enumerate(spans)]  # all leave the collective together
            frames.append(list(at))
            moves = sorted((ranks[r].steps[i]["time"], r, i) for r, span in enumerate(spans) for i in span[1:])
            for _, r, i in moves:
                at[r] = i
                frames.append(list(at))
            continue
        for k in range(max(map(len, spans), default=0)):
            at = [span[min(k, len(span) - 1)] if span else at[r] for r, span in enumerate(spans)]
            frames.append(list(at))
    return frames


def _sections(rank: RankTrace) -> list[int]:
    """The number of collectives before each step."""
    before = [0, *accumulate(operation["kind"] not in MESSAGES for operation in rank.operations)]
    return [before[step["operations"]] for step in rank.steps]


def _sends(rank: RankTrace, span: Sequence[int]) -> bool:
    """True if the rank sends or receives a message in these steps."""
    first, last = (rank.steps[i]["operations"] for i in (span[0], span[-1])) if span else (0, -1)
    return any(operation["kind"] in MESSAGES for operation in rank.operations[first : last + 1])


def record_of(place: str, rank: int) -> Path:
    return Path(f"{place}.rank{rank}.json")


def write_record(place: str, rank: int, record: RankTrace) -> None:
    write_text(str(record_of(place, rank)), json.dumps(asdict(record)))


def take_records(place: str, ranks: int) -> list[RankTrace]:
    """Reads the records of all ranks, and removes their files."""
    files = [record_of(place, rank) for rank in range(ranks)]
    found = [RankTrace(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    for file in files:
        file.unlink()
    return found
