"""Moves values in and out of a model of which each rank has pieces.

checks.py           refuses models and settings before a model is cut
identity.py         everything that decides a run, as texts that ranks can compare
init.py             initial weights that no layout changes
weights.py          reads values from files, row by row
full.py             whole tensors in and out, by the model's own names
optimizer_state.py  the optimizers' state in and out, whole and by name
pieces.py           the parts of both that this rank has, region by region
"""
