"""``plait train``: a job under a layout, what it costs, and on request the proof that it is the one-process run.

run.py         the run of a rank, from the config to the summary
resume.py      what a checkpoint of it has, and what must be the same when it goes on
as_saved.py    after a load: the run compared with the files once more
course.py      what is shown at its end, in little memory
timeline.py    what the last steps looked like, beside the step that their costs predict
"""
