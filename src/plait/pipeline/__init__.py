"""A model over the pipe axis: stages, what goes from one to the next, and the runtime that obeys a schedule.

stage.py           one stage: its part of the model, its units, its passes                  start here
chain.py           which links a model has, and before which of them all else runs
stage_model.py     the part of a model that one stage runs
build_stages.py    from a model and a pipeline to the stages of this rank
copies.py          what programs set on the user's modules and forwards write to them, on every stage
explained.py       what a backward is told that fails, or reaches parameters of nobody
boundary.py        where a forward enters a stage and leaves it
crossing.py        one microbatch's way over these boundaries
not_here.py        what stands for values that another stage has
handover.py        what a stage hands to the next: tensors, and what they are
p2p.py             how activations and their gradients travel
runtime.py         carries out a rank's line of a schedule, and logs it
tied_weights.py    a weight of several stages: one copy on each, one gradient
profile.py         what each link of a model costs, measured
"""
