"""The proof that a layout is the run of a single process.

observed.py    the steps of a rank and of the single process, in one form
record.py      every rank of the layout trains and records what it owns
reference.py   one process trains, adding in the order that the layout implies
kernels.py     kernels of a GPU that give the same bits each time
plain.py       one process trains in plain PyTorch, one full batch a step
compare.py     the two are compared
run.py         the command: both comparisons, the ledger, a table, an exit code

locate.py      the first wrong tensor: the layout and its replay run once more, traced, and are searched
traces.py      what is compared in a search
causes.py      why the first wrong tensor is wrong

spread.py      benign or not: a layout beside honest runs
probe_token.py  one token is changed, and the positions whose outputs move are listed

covering.py    a small set of cases in which every two values meet
cases.py       the layouts of a matrix
matrix.py      the command with --matrix: many layouts, a grid of verdicts

resume.py      a program that is stopped and goes on against one that is not, by anybody's save and load
program.py     what such a program goes on with, found among its attributes
"""

from plait.referee.verify.run import Verdict, judge, run_verify, verify

__all__ = ["Verdict", "judge", "run_verify", "verify"]
