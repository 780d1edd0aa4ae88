"""Runs on disk.

save.py          ``plait.save``, ``plait.Saver``: a checkpoint; each rank writes its pieces     start here
snapshot.py      a rank's pieces, and copies of them, so that weights may change at once
writing.py       a rank's thread: its file, a note about it; the manifest of all notes; removal of old checkpoints
load.py          ``plait.load``: into any layout, each rank reads its regions
fits.py          compares a checkpoint with an engine: names, shapes, groups, classes of optimizers
folder.py        checkpoints in a folder, each complete or absent: found, begun, published, removed
same_folder.py   a check that all hosts see the same folder
hashing.py       digests of files, by any number of threads
manifest.py      a checkpoint's description, checked field by field
values.py        numbers, strings, lists, dicts as JSON and back
stored.py        an open checkpoint: its tensors, read region by region; its files, verified
tensor_file.py   a safetensors file, read by ranges of bytes, written in one pass

files/           reads files from outside, and writes results
"""
