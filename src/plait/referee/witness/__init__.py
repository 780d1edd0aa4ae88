"""Judges any engine: every rank writes down what its training loop does, and a single process replays it.

record.py    ``witness(model, optimizer, folder)``: inputs, gradients, parameters and options, step by step   start here
pieces.py    the sources: a model, or plait's own engine; its samples, and the places of a rank's tensors in the whole
stored.py    reads a witnessed folder, and checks it
replay.py    runs the job in plain PyTorch, at the witnessed parameters
judge.py     compares the two in the order of cause and effect, and names the first thing that is wrong
inputs.py    which samples of a step each rank saw
declared.py  roundings that a loop declares, and factors that are no rounding
drift.py     the difference that rounding alone may cause
gradient.py  which samples a gradient holds, and how often
some_ranks.py  wrong gradients explained by parameters that only some ranks have, such as experts
batch_norm.py  over whose samples BatchNorm normalised
one_sided.py  gradients that only one side has, or that are not finite
update.py    the optimizer's updates
unseen.py    says what could not be judged
judgement.py  the words of a judgement, and tolerances
engines.py   other libraries' engines on plait's jobs, a screenful each
run.py       ``plait verify --engine``
"""

from plait.referee.witness.record import Witness, witness

__all__ = ["Witness", "witness"]
