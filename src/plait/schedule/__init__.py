"""Everything pure about schedules: what a rank does, in which order, and how long it takes.

actions.py    what a rank does, as data; what a pass needs and makes, how long an activation lives
orders.py     small functions that write schedules, and the table of them: a new order is a function and a row
orders_v.py   the orders on a V
bubbles.py    waits and activations in closed form
passes.py     schedules that say more: split backwards, sharding, the end of a step, messages
walk.py       a schedule carried out in any order that works
grid.py       a schedule as text with the failing places marked
check.py      the proof that a schedule cannot hang and computes what it should
acks.py       what a received message says of those that were sent
pipeline.py   an order, completed for a row and proved; what one rank has to know of it
simulate.py   what actions cost gives a timeline
partition.py  which links of a model a stage owns
events.py     what happened: the log of a step
measured.py   a log as a timeline, and as costs
idle.py       where the time goes in which a rank does not compute
"""
