"""Values in and out of a model of which each rank has pieces.

checks.py           what is refused before a model is cut
identity.py         what decides a run, as texts that ranks can compare
init.py             initial weights that no layout changes
weights.py          values that are read from files, row by row
full.py             whole tensors in and out, by the model's own names
optimizer_state.py  the optimizers' state in and out, whole and by name
pieces.py           all of it region by region, as this rank has it
"""
