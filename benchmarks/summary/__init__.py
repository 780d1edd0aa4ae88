"""All suites in one run: their start, their results files, and the page made of all results.

suites.py    the suites: their commands, in full and quick, and their deadlines
running.py   one suite in its own process, with a deadline
machine.py   this machine, its versions, its load
records.py   a results file: the schema, reading with checks, writing
verdicts.py  a row and its goal
page.py      docs/benchmarks.md and the table of the README
plots.py     its pictures

main.py ── running ── a suite's main.py --json ── rows ── records ── results/*.json ── page, readme, plots
"""
