"""Proves a layout before any machine runs it, from the table, the plan and the schedule alone.

    sizes of a model ──► decoder ──► units, flat buffers ─┐
    row of the table ──► moves ──────────────────────────┼──► program of each rank ──► machine ──► proved, or
    order ──► schedule, completed and checked ───────────┘         │                               a counterexample
                                                           symmetry: ranks with the same program

Programs work on sets instead of numbers: which samples are in which sum, and after which step a copy was published.

decoder.py     a run on paper: a decoder by its sizes, its units and flat buffers, its layout
program.py     a rank's step on a flat buffer, as small operations
sums.py        the values of buffers: which samples are in a sum, in which order; collectives, owners
scenes.py      the claims about a layout, the counterexample, and the ranks that take part
machine.py     carries out programs on sets
symmetry.py    checks, rank by rank, which ranks behave the same
proof.py       proves all claims together                                  start here
"""

from plait.referee.prove.decoder import Decoder, PaperRun
from plait.referee.prove.proof import Proved, prove
from plait.referee.prove.scenes import Counterexample, Refuted

__all__ = ["Counterexample", "Decoder", "PaperRun", "Proved", "Refuted", "prove"]
