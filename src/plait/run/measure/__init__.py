"""What the links of a mesh and one machine can do, measured.

comm.py         times every collective, and ping-pong between two ranks         start here
operations.py   each collective set up, called, and checked once
plot.py         log-log curves as SVG
machine.py      memory bandwidth, matrix products, overlap on a GPU, the memory that a rank has used
gpu.py          how busy a GPU is during a run
"""
