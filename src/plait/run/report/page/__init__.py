"""The report: one HTML file about a run or a plan, which opens without a network.

document.py   one HTML file with its scripts, styles and data, under a policy that names them by hash
layout.py     the ranks of a mesh, and the part of each kind of state that each of them holds
lanes.py      a step over time, measured or planned, as boxes on lanes
planned.py    the report of a plan
explorer.py   tables of a plan's neighbours, among which the page's sliders choose
trained.py    the report of a training run
saved.py      reads the data of reports back, and puts two on one page
"""
