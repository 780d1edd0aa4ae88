"""Lesson 18: remote calls.

The idea.  Messages and collectives need both sides to expect them.  A *remote procedure call* needs one: a worker
has a name, another calls a function on it, with tensors as arguments, and gets the result.  That suits uneven
work: a parameter server, an evaluator, a coordinator that drives stages whose code it does not know.  torch has
it as torch.distributed.rpc.  Three ways to call: ``rpc_sync`` waits, ``rpc_async`` returns a future, ``remote`` leaves
the result where it is and returns a reference to it.

A tensor in a call should travel as a tensor, not as text.  Between GPUs a *device map* says which device of the caller
is which device of the callee, so that it goes straight across instead of being staged through both hosts' memory.

    reported: "up to 34x" for direct copies between GPUs, in PyTorch's notes on its RPC.  We have not reproduced it: it
    needs two GPUs.  What any machine can measure is a tensor sent as a tensor, against the same numbers as a list.

Predict before you run it, with a driver and two workers, each of which keeps half of a model:
  1. The driver calls forward on worker 1, then on worker 2.  Who sends the activation to worker 2?
  2. A device map names cuda:0 on a machine without a GPU.  Does the call fall back to the CPU?
  3. A million floats as a list of Python numbers: how much slower than as a tensor?

    plait lesson run 18
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn

import plait
import plait.remote

WIDTH, SAMPLES = 16, 8
RANKS, WHY = (3,), "a driver and two workers"
torch.manual_seed(0)  # every process builds the same layers, and keeps those of its stage
LAYERS = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
X = torch.randn(SAMPLES, WIDTH)
HERE: dict[str, "Stage"] = {}
"""The stages that this process keeps."""


class Stage:
    """Half of the model, on a worker.  It keeps the graph of its forward until the gradient comes (lesson 3)."""

    def __init__(self, first: int, last: int) -> None:
        self.part = LAYERS[first:last]

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.requires_grad_()
        self.y = self.part(self.x)
        return self.y.detach()

    def backward(self, gradient: Tensor) -> Tensor:
        self.y.backward(gradient)
        return self.x.grad


# 1. The functions that a worker runs.  They are found by name, so both sides have the same file.


def make(first: int, last: int) -> None:
    HERE["stage"] = Stage(first, last)


def forward(x: Tensor) -> Tensor:
    return HERE["stage"].forward(x)


def backward(gradient: Tensor) -> Tensor:
    return HERE["stage"].backward(gradient)


def gradients() -> list[Tensor]:
    return [p.grad for p in HERE["stage"].part.parameters()]


def as_tensor(x: Tensor) -> int:
    return x.numel()


def as_list(x: list[float]) -> int:
    return len(x)


# 2. The driver: an ordinary program that happens to call functions elsewhere.


def drive() -> None:
    whole = nn.Sequential(*LAYERS)
    loss = whole(X).square().sum()
    loss.backward()
    expected = [p.grad.clone() for p in whole.parameters()]
    whole.zero_grad()

    rpc.rpc_sync("worker1", make, (0, 2))
    rpc.rpc_sync("worker2", make, (2, 4))
    h = rpc.rpc_sync("worker1", forward, (X,))  # prediction 1: the driver does; both halves of the way pass through it
    y = rpc.rpc_sync("worker2", forward, (h,))
    back = rpc.rpc_sync("worker2", backward, (2 * y,))
    rpc.rpc_sync("worker1", backward, (back,))
    both = [rpc.rpc_async(worker, gradients) for worker in ("worker1", "worker2")]  # at the same time
    found = [gradient for future in both for gradient in future.wait()]
    assert torch.equal(y.square().sum(), loss.detach()) and len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    print(f"loss {loss.item():.4f}: two stages by remote calls, all {len(found)} gradients equal to the bit")

    there = rpc.remote("worker1", forward, (X,))  # a reference: the tensor stays on worker1
    assert torch.equal(there.to_here(), h)
    print("a reference to a result on worker1, fetched when it is needed:", tuple(h.shape))

    x = torch.randn(1_000_000)
    seconds = {}
    for name, call, argument in (("tensor", as_tensor, x), ("list", as_list, x.tolist())):
        rpc.rpc_sync("worker1", call, (argument,))
        start = time.perf_counter()
        assert rpc.rpc_sync("worker1", call, (argument,)) == len(x)
        seconds[name] = time.perf_counter() - start
    ratio = seconds["list"] / seconds["tensor"]
    print(f"measured here, a million floats: as a tensor {1e3 * seconds['tensor']:.1f} ms,", end=" ")
    print(f"as a list {1e3 * seconds['list']:.1f} ms, {ratio:.0f} times as long")


# 3. The same in plait: each rank offers the functions that others may call, and no others.


def by_plait(comm: plait.Comm) -> Tensor | None:
    stage = Stage(2 * (comm.rank - 1), 2 * comm.rank) if comm.rank else None
    remote = plait.remote.connect(comm, {"forward": stage.forward} if stage else {})
    loss = None
    if comm.rank == 0:
        h = remote.call(1, "forward", X).result()
        loss = remote.call(2, "forward", h).result().square().sum()
    remote.close()
    return loss


# 4. Joining: each process has a rank and a name.


def device_map_is_checked() -> str:
    """Prediction 2: no.  The map is honoured or refused; where there is no such device, it is refused."""
    try:
        rpc.TensorPipeRpcBackendOptions(device_maps={"worker2": {"cuda:0": "cuda:0"}})
        options = rpc.TensorPipeRpcBackendOptions(devices=["cuda:0"])
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        rpc.shutdown()
        return "honoured"
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"refused: {str(error).splitlines()[0]}"


def one_of_three() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=60)
    rpc.init_rpc("driver" if rank == 0 else f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        drive()
    rpc.shutdown()  # waits until all are done
    comm = plait.join()
    loss = by_plait(comm)
    if loss is not None:
        assert torch.equal(loss, LAYERS(X).square().sum().detach())
        print(f"the same by plait.remote: loss {loss.item():.4f}, to the bit")
    comm.close()
    if rank == 0 and not torch.cuda.is_available():
        print("a device map without such a device is", device_map_is_checked())


def main(ranks: int = 3) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    print(done.stdout, end="")
    assert done.returncode == 0, done.stderr
    loss = LAYERS(X).square().sum().item()
    assert done.stdout.count(f"loss {loss:.4f}") == 2 == done.stdout.count("to the bit")
    assert f"all {len(list(LAYERS.parameters()))} gradients" in done.stdout and f"{(SAMPLES, WIDTH)}" in done.stdout


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        one_of_three()
    else:
        main()
