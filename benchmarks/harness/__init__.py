"""Shared by the benchmarks: starting ranks, taking turns, judging ratios and losses.

    arguments.py    the options of every benchmark of a step
    groups.py       process groups on demand
    contestants.py  one engine that trains one model, for comparison; one process alone
    models.py       workloads: recipes for models and batches; the decoder that all benchmarks train
    turns.py        contestants take turns; times, ratios inside a round, losses, a profile
    memory.py       the memory of a process, and its peak
    report.py       the tables, the verdicts, the machine
    rows.py         measurements as rows of a results file

Every benchmark is a script next to its own modules, whose first line of code puts this folder's parent on the path.
"""
