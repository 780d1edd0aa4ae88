"""What a run looks like to a person: tables, lines and pictures made from plain data.

training.py   a training run as it goes on, and at its end: its curve, bytes predicted and measured
schedule.py   a schedule over time: characters, a table, an SVG drawing
measured.py   the log of a step as a timeline, and as costs
idle.py       the causes of the time in which a rank does not compute
timeline.py   a step as it happened under the step that was predicted
trace.py      the same as a trace file for Perfetto
screen.py     the console, on which nothing that is printed is obeyed
drawing.py    colours and boxes that the drawings share
"""
