"""``plait train``: trains a job under a layout, shows its costs, and on request proves it equal to the one-process run.

run.py         the run of a rank, from the config to the summary
resume.py      the settings in a checkpoint, and those that must not change when a run goes on
report.py      the page of a finished run
timeline.py    the last steps of a run, and the step that their costs predict
"""
