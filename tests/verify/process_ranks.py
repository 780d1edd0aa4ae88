"""Four processes of ``test_processes.py``: cells of the matrix over gloo, one world after the other."""

import math

import torch
from engine_ranks import become

from plait.comm.process import ProcessComm
from plait.referee.verify import judge
from plait.referee.verify.cases import DIMENSIONS, RULES, command, config_of, due
from plait.referee.verify.covering import Rule, covering
from plait.referee.verify.record import collect_records, record_run
from plait.referee.verify.run import references
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig, with_job
from plait.run.job.job import make_job
from plait.table.mesh import AXES

RANKS = 4


def of_four() -> list[VerifyConfig]:
    """A fourth of the cells in which every two values of the matrix's dimensions meet on four ranks."""
    on_four = Rule(AXES, lambda *counts: math.prod(counts) == RANKS)
    return [with_job(config) for config in map(config_of, covering(DIMENSIONS, (*RULES, on_four))[::4])]


def rank_main(rank: int, port: int, path: str) -> None:
    """Runs the cells; rank 0 saves what is not as due, by the command that shows it."""
    become(rank, RANKS, port)
    found = {}
    for config in of_four():
        validate(config)
        comm = ProcessComm.from_env(config.machine.parsed_mesh)
        job = make_job(config.task, config.dtypes)
        records = collect_records(comm, record_run(job, config, comm))
        if records is not None:
            verdict = judge(job, config, records, *references(job, config, records))
            found[command(config)] = "" if verdict.word in ("bitwise", due(config)) else str(verdict)
        comm.close()
    if rank == 0:
        torch.save(found, path)
