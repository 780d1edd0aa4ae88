"""A model over the pipe axis: stages, what goes from one to the next, and the runtime that obeys a schedule.

stage.py           one stage: its part of the model, its units, its passes                  start here
stage_model.py     a model as a chain of links, and the part of it that one stage runs
build_stages.py    from a model and a pipeline to the stages of this rank
boundary.py        where a forward enters a stage and leaves it
p2p.py             how activations and their gradients travel
runtime.py         carries out a rank's line of a schedule, and logs it
tied_weights.py    a weight of several stages: one copy on each, one gradient
profile.py         what each link of a model costs, measured
"""
