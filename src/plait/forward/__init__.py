"""The inside of a forward: its context, and the handlers that see the model's operators.

context.py             the running forward and its position, in one frozen value          start here
interceptor.py         one function mode, and the handlers that it hands functions to

batch.py               the tensors of a batch in any container
recompute.py           handler: recomputes activations; blocks that run again
at_rest.py             handlers: parameters at rest are never read; gradients that the model takes itself
tensor_parallel.py     the tensor axis of a stage, and the slices of dropout masks where activations are cut
products.py            handler: makes the weight gradients of linear layers in a separate pass
sites.py               the names of the places where a forward draws
dropout.py             handler: dropout that depends on the model, not on the process
compiled.py            units whose forward is compiled, between the engine's hooks
random_streams.py      other random numbers: noise, stochastic depth, jitter

parameter.py           a parameter whose values or gradient are elsewhere
stays.py               objects that refuse to be copied or pickled
masks.py               dropout masks and stream keys, a pure function of keys and element indices
random_ops.py          which operators draw, and a private generator for them
"""
