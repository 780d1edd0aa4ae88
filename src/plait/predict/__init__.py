"""What a run will send and hold, said before it runs; tests hold the engine to it, byte for byte.

cost.py         every message of a step, from the row and the schedule
tensor.py       the messages of tensor parallelism
memory.py       bytes of parameters, gradients and optimizer states between steps
activations.py  bytes that a forward keeps for its backward
"""
