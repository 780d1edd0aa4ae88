"""The pure core, about tensors and ranks: data in, data out, no torch.  In reading order:

mesh.py         ranks on named axes
cells.py        the table that explains ZeRO: where state lives decides what is sent
flat.py         a unit's parameters end to end in one flat buffer, and how the data axes cut it
collectives.py  what a collective moves, in bytes
additions.py    the tree in which a layout adds its gradients
agreement.py    the two small messages of a step on which all ranks agree
precision.py    numbers of different widths
region.py       boxes of a tensor, and the parts of a dim that is cut
tensor_cut.py   how tensor parallelism cuts a parameter
tensor_plan.py  a tensor plan as data: which module is cut how, and what it sends
parallelism.py  all settings of a layout as one value
"""
