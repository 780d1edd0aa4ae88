"""From one command to many ranks: processes that plait starts, threads of this one, or one rank under torchrun.

local.py         launch(config, body, command): the choice                  start here
agent.py         ranks are started, looked after, and started again: torch's elastic agent on one host
rank_monitor.py  diagnoses ranks from the status page, exit codes and the kernel
limits.py        how often, and how long they may take to end
fork_server.py   ranks are copies of a process that has imported everything
signals.py       signals that ask for the end
failure.py       what is printed, and the exit code, when a rank fails
"""
