"""Times DeepSpeed's ZeRO against plait and torch, each contestant in separate processes, in turns.

    python -m venv ~/deepspeed
    ~/deepspeed/bin/pip install torch==2.13.0 numpy
    DS_BUILD_OPS=0 ~/deepspeed/bin/pip install deepspeed
    python benchmarks/deepspeed_peer/main.py --python ~/deepspeed/bin/python --json results.json

Exit code 1 if contestants that train the same model on the same data disagree about the loss, or one does not answer.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness.groups import MEMORY
from harness.report import Match, chosen, loss_disagreements, machine, print_times
from harness.rows import as_json, step_rows
from harness.turns import rotated

HERE = Path(__file__).parent
THEIRS = ("deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3")
OURS = ("ddp", "fsdp2", "plait-zero1", "plait-zero3", "plait/shm-zero1", "plait/shm-zero3")
PAIRS = {
    **{f"{who}-{row}": f"deepspeed-{row}" for who in ("plait", "plait/shm") for row in ("zero1", "zero3")},
    "fsdp2": "deepspeed-zero3",
    "ddp": "deepspeed-zero1",
}
MATCHES = tuple(Match(row, (peer,), {}) for row, peer in PAIRS.items())
ANSWER = 300.0
"""Seconds that a rank may take for an answer."""


@dataclass(frozen=True)
class Arguments:
    """Compare plait and torch with DeepSpeed on this machine."""

    python: str
    """The interpreter of an environment that has torch and deepspeed."""
    model: Literal["mlp4", "mlp16", "gpt256"] = "mlp4"
    rounds: int = 5
    """Turns that every contestant gets; a ratio is formed inside each."""
    ranks: int = 2
    only: tuple[str, ...] = ()
    """Names of the contestants to run; empty: all."""
    json: Path | None = None


@dataclass(frozen=True)
class World:
    """The ranks of one contestant."""

    name: str
    processes: Sequence[subprocess.Popen[str]]
    answers: Sequence[int]
    log: Path

    def ask(self, what: str) -> Any:
        """Asks every rank; returns rank 0's answer. RuntimeError, with the end of their output, if one gives none."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{what}\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise RuntimeError(self._gone()) from None
        answer, *_ = [self._line(descriptor) for descriptor in self.answers]
        return answer

    def _line(self, descriptor: int) -> Any:
        text = b""
        while not text.endswith(b"\n"):
            if not select.select([descriptor], [], [], ANSWER)[0]:
                raise RuntimeError(f"{self.name} gave no answer in {ANSWER:.0f} s\n{self._gone()}")
            if not (part := os.read(descriptor, 1 << 16)):
                raise RuntimeError(self._gone())
            text += part
        return json.loads(text)

    def _gone(self) -> str:
        end = self.log.read_text(errors="replace").splitlines()[-12:]
        return "\n".join([f"{self.name} ended; the end of what it said:", *end])


@contextmanager
def world(name: str, python: str, model: str, ranks: int, folder: Path) -> Iterator[World]:
    """Starts the ranks of a contestant, ends them."""
    # This process has the store, so that no other can take the port while ranks import their engines.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, answers = [], []
    log = folder / f"{name.replace('/', '-')}.log"
    shared = {
        **os.environ,
        **MEMORY,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # DeepSpeed compiles into a folder of this run: a stale lock in the common one is never released.
    shared.setdefault("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    with log.open("w") as output:
        for rank in range(ranks):
            ours, its = os.pipe()
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [python, str(HERE / "worker.py"), name, model, str(its)]
            processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    pass_fds=(its,),
                    text=True,
                )
            )
            os.close(its)
            answers.append(ours)
    try:
        yield World(name, processes, answers, log)
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for descriptor in answers:
            os.close(descriptor)


def main(arguments: Arguments) -> int:
    names = chosen([*THEIRS, *OURS], arguments.only)
    print(f"{machine()}\n\n## {arguments.model}, {arguments.ranks} ranks, {version(arguments.python)}", flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            worlds, losses = {}, {}
            for name in names:
                python = arguments.python if name in THEIRS else sys.executable
                worlds[name] = stack.enter_context(world(name, python, arguments.model, arguments.ranks, folder))
                losses[name] = worlds[name].ask("losses")
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(arguments.rounds):
                for name in rotated(names, turn):
                    seconds[name].append(worlds[name].ask("turn"))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    print_times(arguments.model, seconds, MATCHES)
    problems = loss_disagreements(losses, [])
    print("\n".join(problems) if problems else "losses: all contestants agree")
    if arguments.json is not None:
        rows = as_json(step_rows("deepspeed", arguments.model, arguments.ranks, seconds, MATCHES))
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": rows, "seconds": seconds}, indent=1) + "\n")
    return 1 if problems else 0


def version(python: str) -> str:
    """The peers; leaves the program if the interpreter has no DeepSpeed."""
    words = "from importlib.metadata import version as v; print(f\"DeepSpeed {v('deepspeed')}, torch {v('torch')}\")"
    try:
        done = subprocess.run([python, "-c", words], capture_output=True, text=True, timeout=60)
        said = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    if not said:
        print(f"{python} has no deepspeed: give the python of an environment with torch and deepspeed", file=sys.stderr)
        raise SystemExit(2)
    return said


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
