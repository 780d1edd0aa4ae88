"""Remote calls by size: a tensor that goes directly, and one that is pickled and staged through bytes on the host.

torchrun --nproc-per-node 2 benchmarks/remote/main.py [--device cuda]

A call takes a tensor to the other rank, which returns it.  The two ways take turns.  A time is the least of all
calls, so that a busy machine changes it little; bandwidth counts the tensor once in each direction.
"""

import argparse
import io
import time

import torch

import plait
import plait.remote

SIZES = [1 << power for power in (10, 14, 18, 20, 22, 24)]
REPEAT = 40


def pickled(x: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(x.cpu(), stream)
    return stream.getvalue()


def unpickled(data: bytes, device: str) -> torch.Tensor:
    return torch.load(io.BytesIO(data), weights_only=True).to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device + (":0" if parser.parse_args().device == "cuda" else "")
    comm = plait.join(device="cpu")
    torch.set_num_threads(1)
    there = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    devices = {1: {device: there}} if comm.rank == 0 and device != "cpu" else None
    place = device if device == "cpu" else there
    functions = {"direct": lambda x: x, "staged": lambda data: pickled(unpickled(data, place))}
    with plait.remote.connect(comm, functions, devices=devices) as remote:
        if comm.rank == 0:
            print(f"{torch.__version__}, {device} to {place}: the fastest of {REPEAT} calls\n")
            print("| bytes | direct | staged | direct GB/s | staged / direct |\n|---|---|---|---|---|")
            for size in SIZES:
                x = torch.randn(size // 4, device=device)
                ways = {
                    "direct": lambda x=x: remote.call(1, "direct", x).result(),
                    "staged": lambda x=x: unpickled(remote.call(1, "staged", pickled(x)).result(), device),
                }
                times: dict[str, list[float]] = {way: [] for way in ways}
                for _ in range(REPEAT):
                    for way, call in ways.items():
                        begin = time.perf_counter()
                        y = call()
                        if device != "cpu":
                            torch.cuda.synchronize()
                        times[way].append(time.perf_counter() - begin)
                        assert torch.equal(x, y) and y.device == x.device
                direct, staged = (min(times[way]) for way in ways)
                cells = f"{size} | {direct * 1e6:.0f} us | {staged * 1e6:.0f} us | {2 * size / direct / 1e9:.2f}"
                print(f"| {cells} | {staged / direct:.1f} |", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
