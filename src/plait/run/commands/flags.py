"""Gives hints for flags that are nearly right."""

from collections.abc import Sequence
from typing import Any

from plait.messages.escape import one_line
from plait.messages.wording import did_you_mean
from plait.run.job.sections import flag_hints

_OTHERS = """
batch        batch-size global-batch-size train-batch-size
width        hidden hidden-size d-model n-embd dim
layers       num-layers n-layers n-layer depth
heads        num-heads n-heads n-head num-attention-heads
ffn          intermediate-size ffn-hidden-size mlp-width
vocab        vocabulary vocab-size
length       seq-len seq-length sequence-length context block-size max-length
lr           learning-rate
steps        max-steps iters train-iters num-steps
microbatches accumulation gradient-accumulation-steps micro-batches
mesh         gpus ranks nproc-per-node world-size
strategy     zero zero-stage stage sharding-strategy
dtype        precision mixed mixed-precision bf16 fp16
recompute    gradient-checkpointing activation-checkpointing checkpointing
clip         max-grad-norm grad-clip clip-grad gradient-clipping
out          output output-dir out-dir save-dir
data         dataset data-path train-data
"""
ELSEWHERE = {other: ours for ours, *others in map(str.split, _OTHERS.strip().splitlines()) for other in others}
"""Maps flags of other programs to the plait flag with the same meaning."""


def check_flags(command: str, kind: Any, words: Sequence[str]) -> None:
    """Raises ValueError, with the nearest names, for a flag that a command does not have.

    tyro checks the commands with subcommands (``schedule``, ``checkpoint``).
    """
    hints = flag_hints(kind)
    known = [f"--{name.replace('_', '-')}" for name in hints]
    known += [f"--no-{name.replace('_', '-')}" for name, hint in hints.items() if hint is bool]
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and flag not in ("--", "--help", *known) and not flag.startswith("--tyro-"):
            hint = did_you_mean(ELSEWHERE.get(flag[2:].lower(), flag), known)
            help_text = f"plait {command} --help lists all flags"
            raise ValueError(f"plait {command} has no flag {one_line(flag, 60)}: {hint and f'{hint} '}{help_text}")
