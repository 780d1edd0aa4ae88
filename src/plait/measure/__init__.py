"""Measuring: what a mesh's links carry (``comm.py``) and what one machine does (``machine.py``).

comm.py         plait bench comm: times every collective                 start here
operations.py   each collective set up, called, and checked once
show.py         the results as a table, JSON and a plot
plot.py         log-log curves as SVG
gpu.py          how busy a GPU is during a run
machine.py      memory bandwidth, matrix products, overlap on a GPU
"""
