"""Turns one command into many ranks: processes that plait starts, threads of this one, or one rank under torchrun.

local.py         launch(config, body, command): chooses among them          start here
agent.py         starts ranks, monitors them, and starts them again within limits
rank_monitor.py  diagnoses ranks from the status page, exit codes and the kernel
fork_server.py   forks ranks from a process that has imported everything
signals.py       signals that ask a run to end
spec.py          a launch on other machines, as one value
render.py        writes it for Slurm, Kubernetes, SkyPilot, Modal, Ray and TorchX
failure.py       the text and the exit code of a rank that fails
"""
