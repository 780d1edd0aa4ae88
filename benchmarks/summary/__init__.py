"""All suites in one run: what is started, what is kept of it, and the page that is made of all that was kept.

suites.py    the suites: their commands, in full and quick, and how long they may take
running.py   one suite in its own process, with a deadline
machine.py   this machine, its versions, its load
records.py   a results file: the schema, reading with checks, writing
verdicts.py  a row beside its goal
page.py      docs/benchmarks.md and the table of the README
plots.py     its pictures

main.py ── running ── a suite's main.py --json ── rows ── records ── results/*.json ── page, readme, plots
"""
