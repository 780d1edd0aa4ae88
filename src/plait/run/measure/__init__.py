"""Measures the links of a mesh, and one machine.

comm.py         times every collective, and ping-pong between two ranks         start here
operations.py   sets up each collective, calls it, and checks it once
calibrate.py    describes this machine for the planner
layouts.py      trains layouts for a few steps, and compares them with the planner's predictions
machine.py      memory bandwidth, matrix products, the memory that a rank has used
"""
