"""``plait chaos``: real runs, real faults, and what became of each, beside the goal.

campaign.py    the rows: a fault, its goal, one trial of it    start here
trials.py      the trials of what ends, stops and slows ranks, and of signals
refusals.py    the trials of what must be refused or told: places, settings, collectives, strangers
between_hosts.py  the trials of another host's ranks, and of the link
two_hosts.py   two hosts on one machine, from the kernel's namespaces
ground.py      where a campaign works: the run that is disturbed, and the one that was not
observed.py    a command that is run and watched, line by line
"""

from plait.chaos.campaign import ROWS, CampaignRow, Result, run_campaign

__all__ = ["ROWS", "CampaignRow", "Result", "run_campaign"]
