"""What is trained, apart from how: the same for a layout on many ranks and for the single process it is compared with.

config.py      ``JobConfig``: the flags, in sections, and the values that follow from them
own.py         ``UserJob``: a job of the user's, and ``--job FILE.py:NAME``
block_costs.py  measured costs of a model's blocks, which balance stages
user_code.py   files of the user's that are run: ``FILE.py:NAME``, ``--plugin FILE.py``
families.py    ``FAMILIES``: the models that can be chosen, a row each
optimizer.py   ``OPTIMIZERS``, a row each; decay groups, the learning rate of each step
dataset.py     what is trained on, and what is held out
job.py         ``Job``: all of it together, and its engine on a rank
"""
