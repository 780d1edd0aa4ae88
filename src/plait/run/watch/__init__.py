"""Watches the ranks of a run outside of the collectives, and diagnoses them when they stand still.

page.py        the status page: one record per rank, in a mapped file          start here
rank.py        the rank's side: its record, its heartbeat, signals to it
stacks.py      where a rank's threads stand, asked from outside
processes.py   what the kernel says of a process
diagnose.py    from both, who is the cause; as text for the screen
straggler.py   who computes longer than its peers
folder.py      the private folder in which a host's ranks meet; it goes with the last of them
joined.py      under torchrun: ranks that look after each other
host_reports.py   ranks of other hosts, and hosts that are not heard
"""
