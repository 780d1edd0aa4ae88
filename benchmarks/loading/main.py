"""Measures a rank's memory while it loads a Hugging Face folder: streamed by rows, and in the usual way.

    python benchmarks/loading/main.py                      # a folder of SmolLM2-135M's sizes, 4 ranks, zero3
    python benchmarks/loading/main.py --model runs/smollm2/model --ranks 2 --json results.json

Exit code 1 if a streaming rank ever holds 32 MiB more than its share of the parameters and of the sums of their
gradients, which an engine sets up with them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.contestants import comm_beside
from harness.groups import launch
from harness.memory import KINDS, peak_of
from harness.rows import Row, as_json, ratio_row, value_row

import plait
from plait.run.formats.huggingface import open_folder, write_tensors
from plait.run.models.pretrained import Pretrained
from plait.table.mesh import Mesh

MIB = 2**20
STREAMED, WHOLE = "by rows", "from_pretrained on every rank"
CONSTANT = 32 * MIB
"""The extra memory that loading may take: rows of the mapped file in passing, Python's objects."""


@dataclass(frozen=True)
class Arguments:
    """Measure the memory of loading on this machine."""

    model: Path | None = None
    """A Hugging Face folder; None: random weights in the sizes of SmolLM2-135M."""
    ranks: int = 4
    json: Path | None = None


def write_random(folder: Path) -> Path:
    """SmolLM2-135M's sizes, tied, in fp32; one tensor in memory at a time."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, (shape, dtype) in shapes.items():
            yield name, torch.randn(shape, dtype=dtype)

    write_tensors(folder, shapes, values())
    return folder


def task(folder: str, streamed: bool) -> list[dict[str, Any]]:
    """Runs on every rank: loads under zero3, and returns the measurements of all ranks."""
    import transformers

    comm = comm_beside(Mesh(shard=dist.get_world_size()), "loading")
    with plait.empty_parameters():
        model = Pretrained(folder).build()
    weights = open_folder(folder, model)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())

    def load() -> plait.Engine:
        if streamed:
            return plait.Engine(model, comm, strategy="zero3", weights=weights)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return plait.Engine(theirs, comm, strategy="zero3")

    found = peak_of(load)
    kept = found.pop("returned").placed.bytes_held()
    found |= {"whole": whole, "params": kept["params"], "grads": kept["grads"]}
    every: list[Any] = [None] * comm.mesh.size
    dist.all_gather_object(every, found)
    return every


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Peaks of the rank that needs most, MiB; a single measurement of each.  The goal is on what streaming takes beside
    what it keeps."""
    rows: list[Row] = []
    for kind in KINDS:
        work = f"{kind} peak, {len(results[STREAMED])} ranks"
        peaks = {name: [max(f[f"{kind}_peak"] for f in ranks) / MIB] for name, ranks in results.items()}
        rows += [value_row("loading", work, name, peak, "MiB") for name, peak in peaks.items()]
        rows.append(ratio_row("loading", work, (STREAMED, peaks[STREAMED]), (WHOLE, peaks[WHOLE]), "MiB"))
    beside = [max(f["resident_peak"] - f["params"] - f["grads"] for f in results[STREAMED]) / MIB]
    work = f"resident beside what is kept, {len(results[STREAMED])} ranks"
    return [*rows, value_row("loading", work, STREAMED, beside, "MiB", CONSTANT / MIB)]


def main(arguments: Arguments) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or write_random(Path(scratch))
        results = {
            name: launch(task, arguments.ranks, str(folder), streamed)
            for name, streamed in ((STREAMED, True), (WHOLE, False))
        }
    for name, ranks in results.items():
        print(f"{name}: a model of {ranks[0]['whole'] / MIB:.1f} MiB on {len(ranks)} ranks, MiB more than before")
        print(
            f"  {'rank':>4}{'parameters':>12}{'gradients':>12}{'anonymous peak':>16}{'resident peak':>15}{'seconds':>9}"
        )
        for rank, found in enumerate(ranks):
            kept, peaks = (found["params"] / MIB, found["grads"] / MIB), [found[f"{k}_peak"] / MIB for k in KINDS]
            print(f"  {rank:4}{kept[0]:12.1f}{kept[1]:12.1f}{peaks[0]:16.1f}{peaks[1]:15.1f}{found['seconds']:9.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": as_json(rows_of(results)), **results}, indent=1) + "\n")
    return int(any(f["resident_peak"] > f["params"] + f["grads"] + CONSTANT for f in results[STREAMED]))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
