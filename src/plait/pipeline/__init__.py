"""A model over the pipe axis: stages, the messages between them, and the runtime that obeys a schedule.

stage.py             the stage of a run without a pipeline: the model, its units, its passes   start here
pipeline_stage.py    a stage between others: what comes in, what goes out, split backwards
handlers.py          what a stage's forwards do beside the model's own code
program.py           the seam: the code that runs a part of any model
blocks.py            a model as blocks that run in turn: the library's program
not_here.py          tensors that replace those of another stage
cutting.py           takes a stage's part out of a model
build_stages.py      builds this rank's stages from a model and a pipeline
message.py           tensors on their way from stage to stage, and their form
p2p.py               sends activations and their gradients
runtime.py           carries out a rank's line of a schedule, without a pipeline
pipeline_runtime.py  the same with messages between the passes
tied_weights.py      a weight of several stages: one copy on each, one gradient
"""
