"""Measures on one rank: steps of each layout, and the constants of the prediction.  ``main.py`` starts it.

For each link rank 0 asks for it by a line, waits for one, and prints the seconds as JSON.  Layouts take turns.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from sizes import EVERY, GPT_SIZES, LENGTH, LINKS, MESH, MICROBATCHES, ROWS
from torch.optim import SGD, AdamW

import plait
from plait.diloco import DiLoCo, Island
from plait.run.models.gpt import GPT, GPTConfig


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def make_engine(comm: plait.Comm, row: str) -> plait.Engine:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**GPT_SIZES, dropout=0.0))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    return plait.Engine(
        model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_of, count_fn=lambda batch: batch[:, 1:].numel()
    )


def batch(step: int, rank: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(256, (1, LENGTH + 1), generator=rng) for _ in range(MICROBATCHES)]


def timed(comm: plait.Comm, step: Callable[[], object]) -> float:
    """Seconds of a step that the ranks begin and end together."""
    comm.barrier(("replica", "shard"))
    begin = time.perf_counter()
    step()
    comm.barrier(("replica", "shard"))
    return time.perf_counter() - begin


def median(comm: plait.Comm, step: Callable[[], object], times: int) -> float:
    return sorted(timed(comm, step) for _ in range(times))[times // 2]


def bandwidth(comm: plait.Comm, axis: str) -> float:
    """Bytes a second that a rank sends while all ranks gather over an axis."""
    piece = torch.ones(1 << 20)
    out = torch.empty(2 << 20)
    return piece.nbytes / median(comm, lambda: comm.all_gather(out, piece, (axis,)).wait(), 7)


def latency(comm: plait.Comm, axis: str) -> float:
    piece, out = torch.ones(1), torch.empty(2)
    return median(comm, lambda: comm.all_gather(out, piece, (axis,)).wait(), 31)


class Alone:
    """A rank's own work: the passes of a step, and the update of all parameters, with no message."""

    def __init__(self, rank: int) -> None:
        self.model = GPT(GPTConfig(**GPT_SIZES, dropout=0.0))
        self.optimizer, self.rank = AdamW(self.model.parameters(), lr=1e-3), rank

    def passes(self, step: int) -> None:
        for tokens in batch(step, self.rank):
            loss_of(self.model, tokens).backward()


class Islands:
    """zero3 inside a host, DiLoCo between them."""

    def __init__(self, comm: plait.Comm) -> None:
        self.engine = make_engine(Island(comm), "zero3")
        outer = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)
        self.diloco, self.rank = DiLoCo(self.engine, outer, every=EVERY), comm.rank

    def step(self, number: int) -> None:
        self.engine.step(batch(number, self.rank))
        self.diloco.step()


def main() -> None:
    torch.set_num_threads(1)
    comm = plait.join(MESH, device="cpu", deadline=200, sanitize=False)
    assert comm.mesh.hosts == 2, comm.mesh
    engines = {row: make_engine(comm, row) for row in ROWS}
    islands, alone = Islands(comm), Alone(comm.rank)
    for mbit, rounds in LINKS:
        if comm.rank == 0:
            print(mbit or 0, flush=True)
            sys.stdin.readline()  # main.py has shaped the link
        comm.barrier(("replica", "shard"))
        found: dict[str, list[float]] = {name: [] for name in (*ROWS, "apart", "meeting", "passes", "update")}
        for number in range(1 + rounds):
            for row, engine in engines.items():
                found[row].append(timed(comm, lambda e=engine, n=number: e.step(batch(n, comm.rank))))
            found["passes"].append(timed(comm, lambda n=number: alone.passes(n)))
            found["update"].append(timed(comm, alone.optimizer.step))
            for one in range(EVERY if number < 3 else 0):
                took = timed(comm, lambda n=EVERY * number + one: islands.step(n))
                found["apart" if one < EVERY - 1 else "meeting"].append(took)
        meet = median(comm, lambda: None, 31)
        links = {"meet": meet, "inside": bandwidth(comm, "shard"), "inside_latency": latency(comm, "shard")}
        links |= {"between": 2 * bandwidth(comm, "replica"), "between_latency": latency(comm, "replica")}
        if comm.rank == 0:
            print(
                json.dumps({"mbit": mbit, "seconds": {k: v[1:] for k, v in found.items()}, "links": links}), flush=True
            )
    comm.close()


if __name__ == "__main__":
    main()
