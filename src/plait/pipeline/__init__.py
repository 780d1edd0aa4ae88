"""A model over the pipe axis: stages, the messages between them, and the runtime that obeys a schedule.

stage.py             one stage: its part of the model, its units, its passes                  start here
program.py           the seam: how a part of a model runs, whatever it is
blocks.py            a model as blocks that run in turn: the library's program
not_here.py          tensors that replace what another stage has
cutting.py           takes the part of a stage out of a model
build_stages.py      from a model and a pipeline to the stages of this rank
message.py           tensors on their way from stage to stage, and their form
p2p.py               how activations and their gradients travel
runtime.py           carries out a rank's line of a schedule, and logs it
tied_weights.py      a weight of several stages: one copy on each, one gradient
backward_errors.py   explains a backward that fails, or that reaches parameters outside of the model
"""
