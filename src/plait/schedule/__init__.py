"""Pure data about schedules: the actions of each rank, their order, and their time.

actions.py    actions, schedules and the log of a step as data; the needs of a pass; a walk through a schedule
orders.py     the table of orders: a new one is a function and a row
bubbles.py    waits and activations in closed form
passes.py     adds detail to schedules: split backwards, sharding, the end of a step, messages
check.py      the proof that a schedule cannot hang and is complete; the grid that shows a failure
pipeline.py   an order, completed for a row and proved; one rank's part of it
simulate.py   a timeline from the costs of actions
partition.py  the links of a model that each stage owns
"""
