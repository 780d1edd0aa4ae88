"""A run on paper: a model by its sizes, and the settings that decide which rank has, sends and sums what."""

from dataclasses import dataclass

from plait.referee.prove.decoder import Decoder, lay_stage
from plait.schedule.partition import by_sizes, even
from plait.schedule.pipeline import Pipeline
from plait.table.cells import Strategy
from plait.table.flat import BUCKET_BYTES, Cut, UnitLayout
from plait.table.mesh import Mesh


@dataclass(frozen=True)
class PaperRun:
    """One run; ``links`` and ``laid`` raise ValueError for settings that do not fit together."""

    decoder: Decoder
    mesh: Mesh
    strategy: Strategy
    pipeline: Pipeline
    microbatches: int = 8
    split: tuple[int, ...] | None = None
    """Number of links of each stage; None: equally many."""
    cut: Cut = "element"
    bucket: int = BUCKET_BYTES
    dtype: str = "fp32"
    """The dtype of parameters and activations, where the row's cells name no other."""
    batch: int = 1
    """Samples of a microbatch on one data rank."""
    length: int = 1024
    """Tokens of a sample."""
    states: int = 2
    """Numbers that the optimizer keeps for each element that it updates."""
    recompute: str | None = None
    memory: int | None = None
    """Bytes of memory of a rank; None: not checked."""

    def links(self) -> tuple[tuple[str, ...], ...]:
        """The links of each stage."""
        names, count = self.decoder.links, self.pipeline.num_stages
        if self.split is not None and len(self.split) != count:
            raise ValueError(f"a split for {len(self.split)} stages, but the pipeline has {count}: give as many sizes")
        ranges = even(len(names), count) if self.split is None else by_sizes(self.split, len(names))
        return tuple(tuple(names[i] for i in links) for links in ranges)

    def laid(self) -> dict[tuple[int, int], tuple[UnitLayout, ...]]:
        """The units of every stage on every tensor rank."""
        return {
            (s, t): lay_stage(self.decoder, links, self.mesh, self.strategy, t, self.cut, self.bucket, self.dtype)
            for s, links in enumerate(self.links())
            for t in range(self.mesh.tensor)
        }
