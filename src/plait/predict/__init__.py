"""Predicts, before a run, the bytes that it will send and hold.  Tests compare the engine with it, byte for byte.

cost.py         every message of a step, from the row and the schedule
tensor.py       the messages of tensor parallelism
context.py      the messages of a context axis
experts.py      the messages of ranks that share experts
memory.py       bytes of parameters, gradients and optimizer states between steps
activations.py  bytes that a forward keeps for its backward
model.py        a decoder by its sizes, from a config.json
chain.py        any model by its links, as counted by a job's own forward
cluster.py      accelerators, links and hosts, from a table or a TOML file
plan.py         a layout of a model on a cluster
footprint.py    bytes of each rank of a plan during a step, by kind
sent.py         messages of a planned step, and their seconds
duration.py     seconds of a plan's step, by the bound of each part, and the waits of its ranks
search.py       candidates for a cluster, judged and ranked
"""
