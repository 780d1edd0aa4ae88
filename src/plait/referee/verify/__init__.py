"""Shows that a layout is the run of a single process.

observed.py    the steps of a rank and of the single process, in one form
record.py      trains a layout; every rank records the pieces that it owns
reference.py   trains in one process, adding in the order that the layout implies
kernels.py     GPU kernels that give the same bits each time
plain.py       trains in one process in plain PyTorch, one full batch a step
compare.py     compares the runs
run.py         the command: both comparisons, the ledger, a table, an exit code

locate.py      runs the layout and its replay again, traced, and finds the first wrong tensor
traces.py      the traces that such a search compares
causes.py      why the first wrong tensor is wrong

spread.py      decides by honest runs whether a difference is benign
probe_token.py  changes one token, and lists the positions whose outputs move

covering.py    a small set of cases in which every two values meet
cases.py       the layouts of a matrix
matrix.py      the command with --matrix: many layouts, a grid of verdicts

resume.py      compares a stopped and resumed program with one that ran through, by any save and load
program.py     finds the values with which such a program goes on, among its attributes
"""

from plait.referee.verify.run import Verdict, judge, run_verify, verify

__all__ = ["Verdict", "judge", "run_verify", "verify"]
