"""The command line and everything that one run needs around the engine.

commands/   the ``plait`` command
config/     a run as a frozen value, checked before it starts
job/        a model, its loss, data, an optimizer, and their flags
models/     the models that the command line trains
data/       the data that they train on
train/      the run
formats/    folders of Hugging Face and torch.distributed.checkpoint; checkpoints in other files
launch/     from one command to many ranks
watch/      the state of every rank, reported outside of the collectives
injection/  faults on purpose
measure/    the speed of links and machines
course/     lessons that run
report/     pages, pictures and tables for people
"""
