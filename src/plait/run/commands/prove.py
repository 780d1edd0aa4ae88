"""``plait prove``: proves a layout from the table, the plan and the schedule.  Nothing runs, and no rank is needed.

plait prove --mesh "shard=128 tensor=8 pipe=16" --strategy zero2 --schedule interleaved --microbatches 16 \\
    --layers 126 --width 16384 --ffn 53248 --heads 128 --kv-heads 8 --vocab 128256 --dtype bf16-mixed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import tyro
from rich.table import Table

from plait.checkpoint.files.writing import write_json
from plait.messages.wording import human
from plait.referee.prove import Decoder, PaperRun, Proved, Refuted, prove
from plait.run.commands.plan import SizeFlags, read_model
from plait.run.config.layout import LayoutConfig, names_a_file, read_schedule
from plait.run.report.screen import empty_table, screen, working
from plait.schedule.pipeline import Pipeline
from plait.table.cells import find_strategy
from plait.table.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class ProveConfig(SizeFlags, LayoutConfig):
    """Prove that a layout is the run of a single process, for every rank, without running it.

    Exit code 0: proved, 1: refuted, with a counterexample, 2: bad input.
    """

    mesh: str
    """Sizes of the axes, as in "replica=16 shard=64 tensor=8 pipe=16"."""
    microbatches: int = 8
    """Microbatches of one step on each data rank."""
    dtype: Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"] = "fp32"
    """Type of parameters and activations; mixed: sums of gradients and the optimizer are in fp32."""
    batch: int | None = None
    """Samples of one step, over all ranks and microbatches. None: one for each microbatch of each data rank."""
    length: int = 1024
    """Tokens of a sample."""
    json: str | None = None
    """Write the result here as JSON; "-" is the standard output."""
    prefetch: tyro.conf.Suppress[tyro.conf.Fixed[int]] = 1
    offload: tyro.conf.Suppress[tyro.conf.Fixed[bool]] = False
    """Fields of the layout that do not affect the proof."""

    def paper(self) -> PaperRun:
        """The run that these settings describe.  Raises ValueError for settings that do not fit together."""
        mesh, strategy = Mesh.parse(self.mesh), find_strategy(self.strategy)
        named = self.schedule is not None and names_a_file(self.schedule)
        order = read_schedule(self.schedule) if named and self.schedule else self.schedule
        dtype, _, mixed = self.dtype.partition("-")
        parts = mesh.data_size * self.microbatches
        if self.batch is not None and self.batch < parts:
            raise ValueError(f"a batch of {self.batch} samples cannot fill {parts} parts: give batch >= {parts}")
        return PaperRun(
            decoder=Decoder.of(read_model(self)),
            mesh=mesh,
            strategy=strategy.mixed(dtype) if mixed else strategy,
            pipeline=Pipeline(order, mesh.pipe, self.chunks, self.hold),
            microbatches=self.microbatches,
            split=self.sizes_of_stages,
            cut=self.cut,
            bucket=self.bucket,
            dtype="fp32" if mixed else dtype,
            batch=-(-(self.batch or parts) // parts),
            length=self.length,
            recompute=self.recompute,
            ring=self.ring_attention,
            sequence=self.sequence_parallel,
            all_to_all=self.all_to_all,
        )


def run(config: ProveConfig, argv: Sequence[str] = ()) -> int:
    run = config.paper()
    console = screen(stderr=config.json == "-", soft_wrap=True)
    try:
        with working():
            proved = prove(run)
    except Refuted as refuted:
        console.print(f"refuted: {refuted.example}")
        write_json(config.json, {"proved": False, "counterexample": asdict(refuted.example)})
        return 1
    console.print(table_of(run, proved))
    write_json(config.json, {"proved": True, **asdict(proved)})
    return 0


def table_of(run: PaperRun, proved: Proved) -> Table:
    table = empty_table(f"proved: {run.strategy.name} on {run.mesh}", "", " ", left=("", " "), show_header=False)
    order = "in their order" if proved.in_order else "in the order of the schedule, which is not theirs"
    samples = f"{proved.microbatches} microbatches of {run.mesh.data_size:,} data ranks"
    samples += f" in {run.mesh.context} parts of time" * (run.mesh.context > 1)
    rows = {
        "sums": f"each of {proved.parameters:,} gradients adds {samples} once: {' then '.join(proved.order)}; "
        f"microbatches {order}",
        "owners": "each parameter is on one stage, each element has one owner in each group, and is updated once",
        "reads": "each pass reads the values that were published last, in two steps",
        "messages": f"{proved.traffic.messages:,} in a step ({human(proved.traffic.bytes)} sent): each has its "
        f"counterpart, none can wait forever{'; with as many tokens for every expert' * run.all_to_all}",
        "ranks": f"{proved.ranks:,}, each compared with its model rank ({proved.compared:,} facts)",
        "buffers": f"{proved.buffers:,} on {proved.stages} stages, {proved.kinds} kinds carried out "
        f"({proved.operations:,} operations)",
        "time": f"{proved.seconds:.1f} s",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table
