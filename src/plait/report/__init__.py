"""What a run looks like to a person: tables, lines and pictures made from plain data.

training.py   the end of a training run as text: its curve, bytes predicted and measured
progress.py   a bar on a terminal, lines elsewhere
schedule.py   a schedule over time: characters, a table, an SVG drawing
timeline.py   a step as it happened under the step that was predicted
trace.py      the same as a trace file for Perfetto
drawing.py    colours and boxes that the drawings share
"""
