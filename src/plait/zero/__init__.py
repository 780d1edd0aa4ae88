"""Units of parameters: each is gathered, reduced and updated as a whole.

wrap.py               groups the parameters that travel together
build.py              cuts a model into units
unit.py               the states of a unit, and the memory that it has in each              start here
storage.py            one flat buffer of a unit, and this rank's pieces of it
transfers.py          the moves of a row as messages on a flat buffer
unshard.py            decides when units are unsharded, resharded and prefetched
program_reads.py      reads of parameters by the program itself, outside of the passes
activation_hooks.py   hooks that see where a unit's backward begins and ends
gradients.py          brings gradients to their owners
gradient_watch.py     finds gradients that are not finite before they are reduced
flat_gradient.py      the memory of a flat buffer's gradient
backward_errors.py    explains a backward that fails, and gradients that the engine cannot take
adopted.py            gradients that need no such memory, as they are neither added to nor reduced
planned.py            the units as the planner sees them
place.py              the regions of the whole parameter that a run covers
elementwise.py        which optimizers may be given pieces of parameters
owned.py              the runs that this rank's optimizer updates
optim.py              a stock optimizer, pointed at the pieces that this rank owns
whole_update.py       updates of whole parameters that an axis cuts

state/                initial values, weights read from files, whole tensors in and out
"""
