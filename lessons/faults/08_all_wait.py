"""Fault 8: a ring in which every rank waits first.

Each rank receives from the one before, then sends to the next.  It works as a line.  Why does a ring never end?

    plait lesson find 8
"""

import torch

import plait


def body(comm: plait.Comm, fixed: bool) -> float:
    n, me = comm.world_size, comm.rank
    mine, arrived = torch.tensor([float(me)]), torch.empty(1)
    handle = comm.recv(arrived, (me - 1) % n)
    if not fixed:
        handle.wait()  # all wait here, and none has sent
    sent = comm.send(mine, (me + 1) % n)  # keep the handle: with other libraries a dropped isend may be lost
    handle.wait()
    sent.wait()
    return arrived.item()


def main() -> None:
    try:
        plait.run_threads("shard=4", lambda comm: body(comm, fixed=False), deadline=1.0)
        raise AssertionError("the ring went round although all ranks waited first")
    except TimeoutError as error:
        print("verdict, plait's own:", str(error).splitlines()[0][:160])
    found = plait.run_threads("shard=4", lambda comm: body(comm, fixed=True))
    print("fixed, each rank has its neighbour's number:", found)
    assert found == [3.0, 0.0, 1.0, 2.0]
    print("the fix: ask for the receive, send, and only then wait; no wait in plait is without a deadline")
