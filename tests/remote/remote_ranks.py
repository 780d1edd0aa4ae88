"""One rank of scenes with remote calls: ``remote_ranks.py SCENE...``, under torchrun's variables."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from observed import LOOPBACK, listening
from torch import nn
from torch.distributed import rpc

import plait
import plait.remote
from plait.comm import Comm

comm = plait.join(deadline=20)


def say(*words: object) -> None:
    print(*words, flush=True)


def fails(text: str) -> None:
    raise KeyError(text)


class Odd:
    pass


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "tree": lambda tree: {"again": tree, "rank": comm.rank},
    "fails": fails,
    "sleep": lambda seconds: time.sleep(seconds),
    "odd": Odd,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leave": lambda: sys.exit(3),
}


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the text of the one error of a call."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def values() -> None:
    with plait.remote.connect(comm, FUNCTIONS) as remote:
        other = (comm.rank + 1) % comm.mesh.size
        weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        tree = {"w": weight, "l": [1, None, (True, "a\n", b"\0", 1.5, 2j)], 3: weight.detach().t(), "d": torch.bfloat16}
        tree["e"] = torch.empty(0, 4, dtype=torch.int64)
        answer = remote.call(other, "tree", tree).result()
        assert answer["rank"] == other
        again = answer["again"]
        assert torch.equal(again["w"], weight) and not again["w"].requires_grad and type(again["w"]) is torch.Tensor
        assert torch.equal(again[3], weight.t()) and again["l"] == tree["l"] and again["d"] is torch.bfloat16
        assert again["e"].shape == (0, 4) and again["e"].dtype == torch.int64
        calls = [
            remote.call(rank, "add", torch.full((3,), float(n)), n) for n in range(20) for rank in (other, comm.rank)
        ]
        assert [call.result().tolist() for call in calls] == [[2.0 * n] * 3 for n in range(20) for _ in range(2)]
        assert all(call.done() for call in calls)
    again = plait.remote.connect(comm, {"one": lambda: comm.rank})  # a second connection, after the first
    assert again.call(other, "one").result() == other
    again.close()
    say("done")


def errors() -> None:
    """200 faults, each one error within its deadline, and the connection goes on."""
    remote = plait.remote.connect(comm, FUNCTIONS, deadline=10, threads=64)
    if comm.rank == 0:
        x = torch.ones(2)
        faults: list[tuple[Callable[[], Any], str, str]] = [
            (lambda: remote.call(1, "ad", x, x).result(), "ValueError", "rank 1 offers no function 'ad': did you mean"),
            (lambda: remote.call(1, "os.system", "id").result(), "ValueError", "offers no function 'os.system'"),
            (lambda: remote.call(7, "add", x, x), "ValueError", "a call to rank 7: the ranks are 0 to 1"),
            (lambda: remote.call(1, "add", [x, {"k": Odd()}]), "ValueError", "argument 0 of 'add' for rank 1[1]['k']"),
            (lambda: remote.call(1, "add", threading.Lock()), "ValueError", "has type lock: remote calls carry"),
            (lambda: remote.call(1, "add", {(1, 2): x}), "ValueError", "a key of argument 0"),
            (lambda: remote.call(1, "add", x.to_sparse()), "ValueError", "has the layout torch.sparse_coo"),
            (lambda: remote.call(1, "add", x.to("meta")), "ValueError", "is on meta, and the device map has no device"),
            (lambda: remote.call(1, "fails", "y").result(), "RemoteError", "rank 1 failed in 'fails': KeyError: 'y'"),
            (lambda: remote.call(1, "odd").result(), "RemoteError", "the result of 'odd' has type Odd"),
            (lambda: remote.call(1, "add", x).result(), "RemoteError", "TypeError: "),
            (lambda: remote.call(1, "leave").result(), "RemoteError", "SystemExit: 3"),
            (
                lambda: remote.call(1, "sleep", 3, timeout=0.2).result(),
                *("TimeoutError", "rank 1 did not answer 'sleep' within 0.2 s"),
            ),
            (lambda: remote.call(1, "add", x, x, timeout=0), "ValueError", "timeout is 0: give seconds above 0"),
        ]
        for fault, kind, text in faults * 15:
            found = error_of(fault)
            assert found[0] == kind and text in found[1], (found, kind, text)
        assert "in fails\n    raise KeyError(text)" in error_of(lambda: remote.call(1, "fails", "x").result())[1]
        assert remote.call(1, "add", x, x).result().tolist() == [2.0, 2.0]
    remote.close()
    assert "remote is closed" in error_of(lambda: remote.call(0, "add", 1, 2))[1]
    say("done")


def killed() -> None:
    remote = plait.remote.connect(comm, FUNCTIONS, deadline=5)
    if comm.rank == 0:
        waiting = remote.call(1, "sleep", 100)
        for fault in (
            lambda: remote.call(1, "die").result(),
            waiting.result,
            lambda: remote.call(1, "add", 1, 2).result(),
        ):
            found = error_of(fault)
            assert found[0] == "ConnectionError" and "rank 1 is gone" in found[1], found
    else:
        time.sleep(100)  # before it closes
    found = error_of(remote.close)
    assert found[0] == "ConnectionError" and "rank 1 is gone" in found[1], found
    say("done")
    os._exit(0)


def stopped() -> None:
    remote = plait.remote.connect(comm, FUNCTIONS, deadline=2)
    if comm.rank == 0:
        with contextlib.suppress(TimeoutError):  # a thread of it may still answer
            remote.call(1, "stop").result()
        time.sleep(0.5)
        found = error_of(lambda: remote.call(1, "add", 1, 2).result())
        assert found == ("TimeoutError", "rank 1 did not answer 'add' within 2 s"), found
    else:
        time.sleep(100)
    found = error_of(remote.close)
    assert found == ("TimeoutError", "rank 1 did not answer 'are you there, before you close?' within 2 s"), found
    say("done")
    os._exit(0)


def devices() -> None:
    """A map of devices that are not there is one error on all ranks."""
    for wrong, text in (
        ({1: {"cuda:0": "cuda:0"}}, "source devices with invalid indices in its device map for rank-1"),
        ({5: {}}, "invalid target node names"),
        ({1: {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}, ""),
        ({1: {"gpu:0": "cuda:1"}}, ""),
    ):
        found = error_of(lambda wrong=wrong: plait.remote.connect(comm, {}, devices=wrong if comm.rank == 0 else None))
        assert found[0] != "none" and text in found[1], found
    remote = plait.remote.connect(comm, FUNCTIONS)
    assert "connected here already" in error_of(lambda: plait.remote.connect(comm, FUNCTIONS))[1]
    remote.close()
    say("done")


def counted() -> None:
    """A rank that has begun torch's own RPC more often than another: one error within the deadline."""
    if comm.rank == 0:
        where = os.environ["PLAIT_STORE"] + "-alone"
        rpc.init_rpc(
            "alone",
            rank=0,
            world_size=1,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{where}"),
        )
        rpc.shutdown()
    found = error_of(lambda: plait.remote.connect(comm, {}, deadline=2))
    assert found[0] == "ConnectionError" and "could not connect its remote calls within 2 s" in found[1], found
    assert "has begun it more often than another" in found[1], found
    say("done")


def listens() -> None:
    """Asserts that torch's agent listens on loopback alone, where all ranks share a host."""
    before, begin, given = set(listening([os.getpid()])), rpc.init_rpc, []

    def noted(*args: Any, **more: Any) -> None:
        given.append(os.environ.get("TP_SOCKET_IFNAME"))
        begin(*args, **more)

    rpc.init_rpc = noted
    remote = plait.remote.connect(comm, FUNCTIONS)
    assert given == ["lo"], given
    here = set(listening([os.getpid()])) - before
    assert here and all(port.address in LOOPBACK for port in here), here
    assert "TP_SOCKET_IFNAME" not in os.environ
    remote.close()
    rpc.init_rpc = begin
    say("done")


scenes: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (values, errors, killed, stopped, devices, counted, listens)
}
kept: Comm = comm
for scene in sys.argv[1:]:
    scenes[scene]()
kept.close()
