"""``plait checkpoint``: shows, verifies, compares and converts checkpoints.  Nothing is trained.

plait checkpoint show RUN                           prints the newest: step, files, tensors
plait checkpoint verify RUN --all                   checks each file's size, hash and header
plait checkpoint diff RUN OTHER                     compares tensor by tensor, value by value
plait checkpoint export RUN NEW --source FOLDER     writes a folder for transformers
plait checkpoint import-dcp FOLDER RUN              reads torch.distributed.checkpoint; export-dcp writes it

Names in a checkpoint are text from a file of unknown origin, so their control characters are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console

from plait.checkpoint.files.writing import told
from plait.checkpoint.folder import all_of, find
from plait.checkpoint.stored import Checkpoint
from plait.messages.escape import one_line
from plait.messages.wording import human
from plait.run.formats.dcp import export_dcp, import_dcp
from plait.run.formats.differences import differences
from plait.run.formats.huggingface import export
from plait.run.job.families import FOLDER
from plait.run.models.hf import check_installed
from plait.run.models.pretrained import Pretrained
from plait.run.report.screen import empty_table, screen, working
from plait.step import empty_parameters

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def console_of() -> Console:
    """The console for people, which is wide if it is not a terminal."""
    console = screen(soft_wrap=True)
    console.width = console.width if console.is_terminal else 200
    return console


def say(text: str, longest: int | None = None) -> None:
    console_of().print(one_line(text, longest))


@dataclass(frozen=True)
class ShowCheckpoint:
    """Show a checkpoint: its step, files and tensors."""

    path: tyro.conf.Positional[str]
    """A checkpoint, or a folder of them, whose newest is shown."""

    def run(self) -> int:
        saved = Checkpoint.find(self.path)
        manifest, values = saved.manifest, saved.values()
        say(f"{saved.folder}: step {manifest.step}, {len(manifest.files)} files, {human(_bytes_of(saved))}")
        table = empty_table("tensors", "name", "dtype", "shape", "pieces", left=("name", "dtype"))
        for name, one in sorted(saved.tensors.items()):
            shape = " x ".join(map(str, one.shape)) or "-"
            pieces = len(manifest.tensors[name].pieces)
            table.add_row(one_line(name), str(one.dtype).removeprefix("torch."), shape, str(pieces))
        console_of().print(table)
        say(f"seed: {values['run']['seed']}; extra: {', '.join(map(repr, values['extra'] or ())) or 'none'}")
        return 0


@dataclass(frozen=True)
class VerifyCheckpoint:
    """Read every byte: size, hash, header. Exit code 0: whole, 1: damaged, 2: no checkpoint."""

    path: tyro.conf.Positional[str]
    """A checkpoint, or a folder of them, whose newest is verified."""
    all: bool = False
    """Verify every checkpoint of the folder."""

    def run(self) -> int:
        newest, damaged = find(self.path), False
        for folder in all_of(self.path) if self.all and newest != Path(self.path) else [newest]:
            try:
                saved = Checkpoint.find(folder)
                with working():
                    problems = list(saved.damages().values())
            except ValueError as error:
                problems = [str(error)]
            state = f"damaged, {len(problems)} files" if problems else f"whole, {_bytes_of(saved):,} bytes"
            for line in (f"{folder}: {state}", *(f"  {text}" for text in problems)):
                say(line)
            damaged = damaged or bool(problems)
        return int(damaged)


@dataclass(frozen=True)
class DiffCheckpoints:
    """Compare two checkpoints to the bit, however each is cut. Exit code 0: the same, 1: different."""

    one: tyro.conf.Positional[str]
    """A checkpoint, or a folder of them, whose newest is compared."""
    other: tyro.conf.Positional[str]
    """The checkpoint, or folder of checkpoints, to compare with."""

    def run(self) -> int:
        pair = [Checkpoint.find(path) for path in (self.one, self.other)]
        with working():
            found = list(differences(*pair))
        for name, text in found:
            say(f"{name}: {text}", 400)
        how = f"{len(found)} differences" if found else f"the same, {len(pair[0].tensors)} tensors"
        say(f"{how}: {pair[0].folder} and {pair[1].folder}")
        return 1 if found else 0


@dataclass(frozen=True)
class ExportCheckpoint:
    """Write a folder that transformers reads with from_pretrained."""

    path: tyro.conf.Positional[str]
    """A checkpoint, or a folder of them, of which the newest is exported."""
    out: tyro.conf.Positional[str]
    """The folder to write; it must not exist."""
    source: str | None = None
    """A Hugging Face folder with this model's config and tokenizer; the run's unless given."""
    ema: bool = False
    """Export the average of the weights."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    """Type of the exported weights; as saved unless given."""

    def run(self) -> int:
        check_installed()
        saved = Checkpoint.find(self.path)
        source = source_of(saved) if self.source is None else self.source
        with empty_parameters():
            model = Pretrained(source).build()
        with working():
            export(saved, self.out, model, source, ema=self.ema, dtype=DTYPES[self.dtype] if self.dtype else None)
        return written(Path(self.out))


def source_of(saved: Checkpoint) -> str:
    """The Hugging Face folder that a run of ``plait train`` started from.  Raises ValueError if there was none."""
    match saved.values():
        case {"extra": {"config": {"model": str(model)}}} if model.startswith(FOLDER):
            return model.removeprefix(FOLDER)
    raise ValueError(f"{str(saved.folder)!r} names no Hugging Face folder as its model: give one of it with --source")


@dataclass(frozen=True)
class ImportDCP:
    """Make a checkpoint from a folder of torch.distributed.checkpoint; none of its code runs."""

    folder: tyro.conf.Positional[str]
    """The folder that torch.distributed.checkpoint.save wrote: .metadata and .distcp files."""
    out: tyro.conf.Positional[str]
    """A folder for checkpoints without one of its step."""
    step: int | None = None
    """Number of completed steps; the optimizer's count unless given."""
    seed: int = 0
    """The seed of the engine that will load it."""
    without: tuple[str, ...] = ()
    """Keys to leave out, with all below them."""

    def run(self) -> int:
        need = sum(file.stat().st_size for file in Path(self.folder).glob("*.distcp"))
        with told(self.out, need), working():
            new = import_dcp(self.folder, self.out, step=self.step, seed=self.seed, without=self.without)
        return written(new)


@dataclass(frozen=True)
class ExportDCP:
    """Write a folder that torch.distributed.checkpoint.load reads."""

    path: tyro.conf.Positional[str]
    """A checkpoint, or a folder of them, of which the newest is exported."""
    out: tyro.conf.Positional[str]
    """The folder to write; it must not exist."""
    tie: tuple[str, ...] = ()
    """Other names of shared weights, as in head.weight=embed.weight: the second one was saved."""

    def run(self) -> int:
        ties = dict(pair.partition("=")[::2] for pair in self.tie)
        saved = Checkpoint.find(self.path)
        with told(self.out, _bytes_of(saved)), working():
            export_dcp(saved, self.out, ties=ties)
        return written(Path(self.out))


def _bytes_of(saved: Checkpoint) -> int:
    return sum(file.bytes for file in saved.manifest.files.values())


def written(path: Path) -> int:
    say(f"written: {path}")
    return 0


Operation = (
    Annotated[ShowCheckpoint, tyro.conf.subcommand("show")]
    | Annotated[VerifyCheckpoint, tyro.conf.subcommand("verify")]
    | Annotated[DiffCheckpoints, tyro.conf.subcommand("diff")]
    | Annotated[ExportCheckpoint, tyro.conf.subcommand("export")]
    | Annotated[ImportDCP, tyro.conf.subcommand("import-dcp")]
    | Annotated[ExportDCP, tyro.conf.subcommand("export-dcp")]
)


def run(config: Operation, argv: Sequence[str]) -> int:
    try:
        return config.run()
    except OSError as error:
        raise ValueError(f"{str(error.filename or '')!r}: {error.strerror or error}") from error
