"""What happens inside a forward: its context, and what sees the model's operators.

context.py             which forward runs and where it stands, in one frozen value          start here
interceptor.py         one function mode, and the handlers that it hands functions to

batch.py               the tensors of a batch, whatever it is made of
attributes.py          settings that a program keeps on its modules
recompute.py           handler: activations that are made a second time; blocks that run again
at_rest.py             handlers: a parameter at rest is never read; gradients that the model takes itself
tensor_parallel.py     the tensor axis of a stage, and the slices of dropout masks where activations are cut
products.py            handler: makes the weight gradients of linear layers in a separate pass
sites.py               the names of the places where a forward draws
dropout.py             handler: dropout that belongs to the model, not to the process
compiled.py            units whose forward is compiled, between the engine's hooks
random_streams.py      what else draws: noise, stochastic depth, jitter

parameter.py           what a parameter answers while its values or its gradient are elsewhere
stays.py               what is neither copied nor pickled
masks.py               dropout masks and stream keys, a pure function of keys and element indices
random_ops.py          which operators draw, and a generator for what draws from one
"""
