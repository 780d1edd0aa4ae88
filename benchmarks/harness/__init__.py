"""What the benchmarks share: how ranks are started, how turns are taken, how ratios and losses are judged.

    arguments.py    what every benchmark of a step can be asked
    groups.py       process groups on demand
    contestants.py  one engine that trains one model: what a benchmark compares; one process alone
    models.py       workloads: recipes for models and batches; the decoder that all benchmarks train
    turns.py        contestants take turns; times, ratios inside a round, losses, a profile
    memory.py       what a process holds, and its peak
    report.py       the tables, the verdicts, the machine
    rows.py         measurements as rows of a results file

Every benchmark is a script beside its own modules, whose first line of code puts this folder's parent on the path.
"""
