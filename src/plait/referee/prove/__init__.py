"""A layout is proved before anybody has the machines to run it: from the table, the plan and the schedule alone.

    sizes of a model ──► decoder ──► units, flat buffers ─┐
    row of the table ──► moves ──────────────────────────┼──► program of each rank ──► machine ──► proved, or
    order ──► schedule, completed and checked ───────────┘         │                               a counterexample
                                                           symmetry: whose program is whose

Programs work on sets instead of numbers: which samples are in which sum, and after which step a copy was published.

decoder.py     a decoder by its sizes: parameters, units, flat buffers
paper.py       a run on paper
program.py     what a rank does in a step, as small operations
pieces.py      values of a flat buffer by intervals
sums.py        sums without numbers: which samples, in which order
claims.py      what is claimed, and the counterexample
collective.py  what a group leaves behind, and who owns what
machine.py     programs carried out on sets
scenes.py      who takes part in which claim
symmetry.py    ranks that are alike, looked up rank by rank
room.py        what the fullest rank holds
proof.py       all claims together                                         start here
"""

from plait.referee.prove.claims import Counterexample, Refuted
from plait.referee.prove.decoder import Decoder, from_config
from plait.referee.prove.paper import PaperRun
from plait.referee.prove.proof import Proved, prove

__all__ = ["Counterexample", "Decoder", "PaperRun", "Proved", "Refuted", "from_config", "prove"]
