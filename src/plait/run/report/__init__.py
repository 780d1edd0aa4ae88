"""Shows a run to a person: makes tables, lines and pictures from plain data.

training.py   a training run in progress, and at its end: bytes predicted and measured
schedule.py   a schedule over time: characters, and a table
measured.py   turns the log of a step into a timeline, and into costs
idle.py       the causes of the time in which a rank does not compute
trace.py      writes both steps as a trace file for Perfetto
plans.py      layouts ranked by the planner, and one of them in detail
screen.py     the console, which escapes control characters in all text
drawing.py    draws steps as an SVG file
page/         the report: one HTML file about a run or a plan
"""
