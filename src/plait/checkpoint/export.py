"""A checkpoint as a folder for transformers: its weights, or the average of them, under a config from elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from plait.checkpoint.huggingface import write_model
from plait.checkpoint.saved import Saved
from plait.messages.progress import counted


def export(
    saved: Saved,
    folder: str | Path,
    model: nn.Module,
    source: str | Path,
    *,
    ema: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights as a folder that ``transformers`` loads with ``from_pretrained``.

    A whole tensor is in memory at a time.

    Args:
        model: of transformers, for its config and its names; its parameters may be on meta.
        source: tokenizer and generation config are copied from this folder.
        ema: the average, and what is not averaged as it is.
        dtype: of floating-point tensors; as they were saved unless given.

    Raises:
        ValueError: the checkpoint is damaged, of another model, or has no average; the folder exists.
    """
    saved.check()
    found = saved.kind("model")
    if ema:
        averaged = saved.kind("ema")
        if not averaged:
            raise ValueError(f"{str(saved.folder)!r} has no average of the weights: leave --ema out")
        found |= averaged
    state = model.state_dict(keep_vars=True)
    own = {name: value for name, value in (*model.named_parameters(), *model.named_buffers()) if name in state}
    others = {name for name, _ in model.named_buffers()} - own.keys()  # what transformers does not write
    missing, surplus = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys() - others)
    wrong = [name for name in own if name in found and found[name].shape != tuple(own[name].shape)]
    if missing or surplus or wrong:
        raise ValueError(
            f"the checkpoint is not of the model in {str(source)!r}: missing {missing[:3]}, surplus {surplus[:3]}, of "
            f"another shape {wrong[:3]}"
        )
    kinds = {name: dtype if dtype and found[name].dtype.is_floating_point else found[name].dtype for name in own}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in counted("tensors", list(own)):
            yield name, found[name].read(found[name].region).to(kinds[name])

    write_model(Path(folder), model, {name: (found[name].shape, kinds[name]) for name in own}, tensors(), source)
