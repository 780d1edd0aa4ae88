"""Measures the links of a mesh, and one machine.

comm.py         times every collective, and ping-pong between two ranks         start here
operations.py   sets up each collective, calls it, and checks it once
machine.py      memory bandwidth, matrix products, the memory that a rank has used
"""
