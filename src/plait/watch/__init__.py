"""What the ranks of a run are doing, told outside of the collectives, and what is wrong when they stand still.

page.py        the status page: one record per rank, in a mapped file          start here
channel.py     messages between hosts, for those who have the key
key.py         the key
hosts.py       what the ranks of other hosts say, and which host is not heard
"""
