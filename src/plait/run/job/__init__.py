"""The training job without its layout: the same on many ranks and in the single process for comparison.

config.py      ``JobConfig``: the flags, in sections, and the values that follow from them
sections.py    ``Sections``: configs made of sections, and set by flags
own.py         ``UserJob``: a user's job, and ``--job FILE.py:NAME``
outline.py     describes a run's model for the planner; counts a user's job on meta
user_code.py   runs the user's files: ``FILE.py:NAME``, ``--plugin FILE.py``
families.py    ``FAMILIES``: the models to choose from, a row each
optimizer.py   ``OPTIMIZERS``, a row each; decay groups, the learning rate of each step
dataset.py     makes the training data and the held-out data
job.py         ``Job``: combines all of it, and builds its engine on a rank
"""
