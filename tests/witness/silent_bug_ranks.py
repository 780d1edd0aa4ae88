"""What processes do for ``test_silent_bugs.py``: every bug of the list, one after the other, in one world."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from engine_ranks import become
from silent_bugs import BUGS, RIGHT

from plait.comm.process import ProcessComm
from plait.referee.witness.run import run_engine, with_engine
from plait.run.config.check import validate


def rank_main(rank: int, ranks: int, port: int, path: str) -> None:
    """Runs them all, under a witness; rank 0 writes what was said of each."""
    become(rank, ranks, port)
    found = {}
    for bug in (*RIGHT, *BUGS):
        validate(bug.config)
        config = with_engine(bug.config)
        comm = ProcessComm.from_env(config.machine.parsed_mesh)
        judgement = run_engine(config, comm)
        if judgement is not None:
            found[bug.adapter.__name__] = asdict(judgement)
        comm.close()
    if rank == 0:
        Path(path).write_text(json.dumps(found))
