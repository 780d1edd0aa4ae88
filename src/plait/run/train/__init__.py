"""``plait train``: a job under a layout, what it costs, and on request the proof that it is the one-process run.

run.py         the run of a rank, from the config to the summary
resume.py      the settings in a checkpoint, and those that must not change when a run goes on
report.py      the page of a finished run
timeline.py    the last steps of a run, beside the step that their costs predict
"""
