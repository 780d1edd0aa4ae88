"""Watches the ranks of a run outside the collectives, and diagnoses them when they stop making progress.

page.py        the status page: one record per rank, in a mapped file          start here
rank.py        the rank's side: its record, its heartbeat, signals to it
stacks.py      the stacks of a rank's threads, requested from outside
processes.py   the kernel's facts about a process
diagnose.py    finds the cause from both; as text for the screen
straggler.py   finds ranks that compute longer than their peers
joined.py      under torchrun: ranks that monitor each other
host_reports.py   ranks of other hosts, and hosts that have gone silent
"""
