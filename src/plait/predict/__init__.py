"""Predicts, before a run, what it will send and hold.  Tests hold the engine to the prediction, byte for byte.

cost.py         every message of a step, from the row and the schedule
tensor.py       the messages of tensor parallelism
memory.py       bytes of parameters, gradients and optimizer states between steps
activations.py  bytes that a forward keeps for its backward
"""
