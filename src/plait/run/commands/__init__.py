"""The ``plait`` command: words and flags in, an exit code out; the work is done in the other packages.

main.py        ``plait WORD ...``: parses, and runs the command of that name    start here
flags.py       words as a config: groups of flags, hints for a wrong one
train.py       ``plait train``: a run, or what is left of one
verify.py      ``plait verify``: a layout, a matrix, or another engine
schedule.py    ``plait schedule``: schedules on the screen, proved, and as a picture
checkpoint.py  ``plait checkpoint``: checkpoints shown, verified, compared, and in other forms
prove.py       ``plait prove``: a layout proved without running it
doctor.py      ``plait doctor``: this machine, its torch and its links
explain.py     ``plait explain``: how a model lies on the ranks of a tensor axis
judge.py       ``plait judge``: a witnessed run of any engine beside the single process
interrupt.py   Ctrl-C while a command still imports what it needs
bench.py       ``plait bench comm``: what was measured, as a table, JSON and a plot
"""
