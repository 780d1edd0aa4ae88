"""Formats of other programs, and checkpoints in other files.

huggingface.py     folders of Hugging Face: read by rows, written tensor by tensor; exports checkpoints as one
dcp.py             folders of torch.distributed.checkpoint, to plait and back
torch_folder.py    reads such a folder without running its code
foreign_pickle.py  its pickle, which may name only objects that torch writes
differences.py     the differences between two checkpoints
"""
