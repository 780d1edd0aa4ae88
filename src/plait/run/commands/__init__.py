"""The ``plait`` command: takes words and flags, returns an exit code.  The other packages do the work.

main.py        ``plait WORD ...``: parses, and runs the command of that name    start here
train.py       ``plait train``: starts a run, or continues one
verify.py      ``plait verify``: verifies a layout, a matrix of layouts, or another engine
schedule.py    ``plait schedule``: prints, proves and draws schedules
checkpoint.py  ``plait checkpoint``: shows, verifies, compares and converts checkpoints
prove.py       ``plait prove``: proves a layout without running it
plan.py        ``plait plan``: ranks layouts of a model on a cluster, without running them
doctor.py      ``plait doctor``: examines this machine, its torch and its links
explain.py     ``plait explain``: shows how a tensor axis distributes a model over its ranks
judge.py       ``plait judge``: compares a witnessed run of any engine with the single process
submit.py      ``plait submit``: writes a job for a scheduler, and hands it to its client
lesson.py      ``plait lesson``: lists, runs and opens the lessons of the course
report.py      ``plait report``: puts two reports on one page
trace.py       ``plait trace``: writes a page that steps through a file on every rank
bench.py       ``plait bench comm``: shows the measurements as a table and as JSON
"""
