"""Proves a layout before there are machines to run it: from the table, the plan and the schedule alone.

    sizes of a model ──► decoder ──► units, flat buffers ─┐
    row of the table ──► moves ──────────────────────────┼──► program of each rank ──► machine ──► proved, or
    order ──► schedule, completed and checked ───────────┘         │                               a counterexample
                                                           symmetry: ranks with the same program

Programs work on sets instead of numbers: which samples are in which sum, and after which step a copy was published.

decoder.py     a decoder by its sizes: parameters, units, flat buffers
paper.py       a run on paper
program.py     a rank's step, as small operations
pieces.py      values of a flat buffer by intervals
sums.py        sums without numbers: which samples, in which order
claims.py      the claims about a layout, and the counterexample
collective.py  the buffers after a collective, and the owners of elements
machine.py     programs carried out on sets
scenes.py      which ranks take part in which claim
symmetry.py    ranks that behave the same, checked rank by rank
room.py        the memory of the fullest rank
proof.py       all claims together                                         start here
"""

from plait.referee.prove.claims import Counterexample, Refuted
from plait.referee.prove.decoder import Decoder, from_config
from plait.referee.prove.paper import PaperRun
from plait.referee.prove.proof import Proved, prove

__all__ = ["Counterexample", "Decoder", "PaperRun", "Proved", "Refuted", "from_config", "prove"]
