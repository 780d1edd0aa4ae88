"""Models and runs on disk.

huggingface.py   Hugging Face folders: each rank reads only the rows that it keeps; rank 0 writes, tensor by tensor

save.py          ``plait.save``, ``plait.Saver``: a checkpoint, of which each rank writes its pieces     start here
snapshot.py      what a rank has of it, and copies, so that weights may change at once
writing.py       a rank's thread: its file, a note of it; the manifest of all notes
retention.py     which old checkpoints go, and when
load.py          ``plait.load``: into any layout, each rank reads its regions
as_saved.py      after a load: every piece compared with what lies in the files
storage.py       what saving and loading ask of a place
same_folder.py   whether all hosts see the same folder
folder.py        a place on a file system: folders that are whole or not there
objects.py       a place under a URL, where nothing can be renamed
hashing.py       what a file is known by, taken by any number of threads
manifest.py      what a checkpoint says of itself, checked field by field
values.py        numbers, strings, lists, dicts as JSON and back
complete.py      what is lost between a save and a load is refused
stored.py        tensors in a checkpoint's files, read region by region
tensor_file.py   a safetensors file, read by ranges of bytes

saved.py         a checkpoint without an engine: read by blocks, verified, written anew in other files
examine.py       where two checkpoints differ
export.py        a checkpoint as a Hugging Face folder
dcp.py           folders of torch.distributed.checkpoint, to plait and back
distcp.py        what such a folder has, read without running anything
pickled.py       a pickle read as data
stateful.py      ``plait.Checkpointed``: a run for torch.distributed.checkpoint

files/           how files from outside are read, and how results are written
"""
