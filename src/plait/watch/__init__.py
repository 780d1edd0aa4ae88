"""What the ranks of a run are doing, told outside of the collectives, and what is wrong when they stand still.

page.py        the status page: one record per rank, in a mapped file          start here
"""
