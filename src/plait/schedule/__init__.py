"""Pure data about schedules: the actions of each rank, their order, and their time.

actions.py    actions, schedules and the log of a step as data; the needs of a pass; a walk in any order that works
orders.py     the table of orders: a new one is a function and a row
bubbles.py    waits and activations in closed form
passes.py     schedules that say more: split backwards, sharding, the end of a step, messages
check.py      the proof that a schedule cannot hang and computes what it should; the grid that shows a failure
pipeline.py   an order, completed for a row and proved; all that one rank has to know of it
simulate.py   a timeline from the costs of actions
partition.py  the links of a model that each stage owns
"""
