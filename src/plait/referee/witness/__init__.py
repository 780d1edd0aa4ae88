"""Any engine, judged: what a training loop does is written down on every rank, and replayed by a single process.

record.py    ``witness(model, optimizer, folder)``: inputs, gradients, parameters and options, step by step   start here
pieces.py    the sources: a model, or plait's own engine; its samples, and where a rank's tensors are in the whole
stored.py    a witnessed folder, read back and checked
replay.py    the job in plain PyTorch, at the parameters that were witnessed
judge.py     the two are compared in the order of cause and effect; the first thing that is wrong is named
inputs.py    which samples of a step each rank saw
declared.py  roundings that a loop declares, and the factor that is none
drift.py     what rounding alone may make of a difference
gradient.py  which samples a gradient holds, and how often
some_ranks.py  what parameters that some ranks alone have, as experts, explain of it
batch_norm.py  over whose samples BatchNorm normalised
one_sided.py  gradients that only one side has, or that are not finite
update.py    what the optimizer made of it
unseen.py    what could not be judged, in words
judgement.py  the words of a judgement, and tolerances
engines.py   engines of others on a job of ours, a screenful each
run.py       ``plait verify --engine``
"""

from plait.referee.witness.record import Witness, witness

__all__ = ["Witness", "witness"]
