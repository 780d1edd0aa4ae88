"""Units of parameters: what is gathered, reduced and updated together.

wrap.py               which parameters travel together
build.py              from a model to units
unit.py               the states of a unit, and what is in memory in each              start here
storage.py            one flat buffer of a unit, and the pieces of it that stay here
transfers.py          the moves of a row as messages on a flat buffer
unshard.py            when units are unsharded and resharded, and which is prefetched
gather_order.py       which unit is expected next
pins.py               units that stay whole, because someone reads them beside the passes
activation_hooks.py   what tells that a unit's backward begins, or is over
gradients.py          how gradients reach their owners
gradient_watch.py     gradients that are not finite, seen before they are reduced
flat_gradient.py      where the gradient of a flat buffer lies
place.py              where a run lies in the whole parameter, as regions
elementwise.py        which optimizers may be given pieces of parameters
optim.py              a stock optimizer, pointed at the pieces that this rank owns

state/                initial values, weights read from files, whole tensors in and out
"""
