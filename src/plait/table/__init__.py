"""The pure core, about tensors and ranks: data in, data out, no torch.  In reading order:

mesh.py         ranks on named axes
cells.py        the table that explains ZeRO: the place of state decides what is sent
flat.py         a unit's parameters end to end in one flat buffer, and how the data axes cut it
collectives.py  the bytes that a collective moves
additions.py    the tree in which a layout adds its gradients
agreement.py    the two small messages of a step on which all ranks agree
precision.py    numbers of different widths
region.py       boxes of a tensor, and the parts of a cut dim
tensor_cut.py   the cut of a parameter by tensor parallelism
tensor_plan.py  a tensor plan as data: the cut of each module, and the messages it sends
parallelism.py  all settings of a layout as one value
"""
