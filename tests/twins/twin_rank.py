"""One rank of a cell: it builds engines, takes steps, and notes all that two twins compare.

tensors    name -> bits: parameters, optimizer state by name and region, whatever a program keeps
values     name -> JSON: losses, norms, bytes held
ledger     section -> lines, in the order in which they were asked for
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import adapter
import twin_models as models
from torch import Tensor, nn


class Rank:
    """This rank's part of a cell, and its notes."""

    def __init__(self, cell: dict[str, Any], comm: Any, folder: str) -> None:
        self.cell, self.comm, self.folder = cell, comm, folder
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Any] = {}
        self.ledger: dict[str, list[list[Any]]] = {}
        self._made: nn.Module | None = None
        self.last_optimizer: Any = None

    def note(self, name: str, value: Any) -> None:
        self.values[self._free(name, self.values)] = value

    def keep(self, name: str, tensors: dict[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            full = self._free(f"{name} {key}".strip(), self.tensors)
            self.tensors[full] = tensor.detach().cpu().contiguous().clone()

    @staticmethod
    def _free(name: str, taken: dict[str, Any]) -> str:
        """The name, with a number where there is one of that name."""
        number = next(n for n in range(len(taken) + 1) if (f"{name} {n}" if n else name) not in taken)
        return f"{name} {number}" if number else name

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """The messages sent inside are a section of the ledger."""
        mark = adapter.mark_of(self.comm)
        try:
            yield
        finally:
            self.ledger[self._free(name, self.ledger)] = adapter.lines_since(self.comm, mark)

    def model(self, **settings: Any) -> nn.Module:
        self._made = models.build({**self.cell, **settings})
        return self._made

    def optimizer(self, name: str) -> Any:
        """An optimizer of the last model."""
        assert self._made is not None
        self.last_optimizer = models.optimizer_of(name, self._made)
        return self.last_optimizer

    def batches(self, steps: int, **settings: Any) -> list[models.Batch]:
        return models.batches({**self.cell, **settings}, steps)

    def local(self, steps: int, **settings: Any) -> list[models.Batch]:
        """This rank's part of each batch."""
        return [models.deal(batch, self.comm, 1)[0] for batch in self.batches(steps, **settings)]

    def engine(self, model: nn.Module, optimizer: Any, **settings: Any) -> Any:
        row, dtype = settings.pop("row", None) or self.cell["row"], settings.pop("dtype", "fp32")
        usual = {"strategy": adapter.row_of(row, dtype, settings.pop("offload", False)), "optimizer": optimizer}
        usual |= {"loss_fn": models.loss_sum, "count_fn": models.count, **settings}
        with self.section("build"):
            return adapter.Engine(model, self.comm, **usual)

    def step(self, engine: Any, batch: models.Batch, num_microbatches: int) -> None:
        """A step on this rank's microbatches, noted."""
        with self.section("step"):
            result = engine.step(models.deal(batch, self.comm, num_microbatches))
        self.note("step", adapter.result_of(result))

    def finish(self, engine: Any, name: str = "") -> None:
        """Notes parameters, optimizer state and bytes held."""
        self.note(f"{name}bytes held", adapter.held_of(engine))
        self.keep(f"{name}rest", adapter.pieces_of(engine))
        with self.section(f"{name}whole state"):
            self.keep(f"{name}whole", adapter.whole_state_of(engine))
        with self.section(f"{name}optimizer numbers"):
            self.note(f"{name}optimizer numbers", adapter.numbers_of_optimizer(engine))


def train(rank: Rank, steps: int = 2) -> None:
    """A cell of settings: some steps, handed over whole or in a loop."""
    cell = rank.cell
    model = rank.model()
    optimizer = rank.optimizer(cell["optimizer"])
    settings = adapter.settings_of(cell) | {"clip": cell["clip"], "dtype": cell["dtype"], "offload": cell["offload"]}
    if cell["dtype"] == "fp16-mixed":
        settings["loss_scale"] = adapter.loss_scale(256.0)
    engine = rank.engine(model, optimizer, **settings)
    for batch in rank.batches(steps):
        if cell["loop"] == "step":
            rank.step(engine, batch, cell["microbatches"])
            continue
        with rank.section("step"):
            for part in models.deal(batch, rank.comm, cell["microbatches"]):
                engine.backward(models.loss_sum(model, part), count=models.count(part))
            optimizer.step()
        rank.note("step", adapter.last_result_of(engine))
    rank.finish(engine)
