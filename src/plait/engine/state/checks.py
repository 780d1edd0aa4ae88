"""What is refused before a model is cut: what no engine can train, and ranks that do not bring the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.comm import Comm
from plait.comm.agree import gather_ints, same_everywhere
from plait.core.collectives import Note
from plait.core.mesh import AXES
from plait.sharded.masks import stream_key


def check_model(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError for what no engine can train, and for replicas that differ."""
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise ValueError(
            f"{len(lazy)} parameters have no shape yet ({', '.join(lazy[:3])}): call the model once on a sample before "
            f"its optimizer and Engine are built"
        )
    compiled = [name for name, m in model.named_modules() if m._compiled_call_impl or "_orig_mod" in m._modules]
    if compiled:
        raise ValueError(
            f"{compiled[0] or 'the model'!r} is compiled, and the compiler would trace into the engine's gathers and "
            f"dropout streams: compile functions inside of its modules (as of activations) instead"
        )
    tables = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    bounded = [name for name, table in tables if table.max_norm]
    if bounded and comm.mesh.size > 1:
        raise ValueError(
            f"{bounded[0]!r} has max_norm: each rank's forward would rewrite the rows that its own samples use, and "
            f"replicas would part; leave max_norm out, and normalise what the table returns"
        )
    check_buffers(model)
    if not any(True for _ in model.parameters()):
        raise ValueError("the model has no parameters: there is nothing to train")
    check_replicas(model, comm)


def check_buffers(model: nn.Module) -> None:
    """Raises ValueError where a buffer has no values."""
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"{len(empty)} buffers are on the meta device and have no values ({', '.join(empty[:3])}): build the model "
            f"inside plait.empty_parameters(), which computes buffers for real, instead of torch.device('meta')"
        )


def check_settings(comm: Comm, settings: Mapping[str, object]) -> None:
    """Raises ValueError, on every rank, where ranks were given different settings, and names them."""
    digests = [stream_key(repr(value)) >> 1 for value in settings.values()]
    same = same_everywhere(comm, digests, AXES, Note("setup"))
    if differing := [name for name, alike in zip(settings, same, strict=True) if not alike]:
        texts = [getattr(settings[name], "name", None) or repr(settings[name]) for name in differing]
        shown = [text if len(text) < 40 else f"{text[:40]}..." for text in texts]
        values = ", ".join(f"{name}={text}" for name, text in zip(differing, shown, strict=True))
        raise ValueError(f"the ranks were given different settings: rank {comm.rank} has {values}; give all the same")


def check_replicas(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError, on every rank, when a parameter that came with values differs between ranks."""
    parameters = list(model.named_parameters())
    sizes = [size for (size,) in gather_ints(comm, [len(parameters)], AXES, Note("setup"))]
    if min(sizes) < max(sizes):
        raise ValueError(
            f"ranks brought models of {min(sizes)} to {max(sizes)} parameters: build the same model everywhere"
        )
    same = same_everywhere(comm, [_fingerprint(n, p) for n, p in parameters], AXES, Note("setup"))
    if differing := [n for (n, _), alike in zip(parameters, same, strict=True) if not alike]:
        raise ValueError(
            f"{len(differing)} parameters differ between ranks ({', '.join(differing[:3])}): give every rank the same "
            f"weights (one seed, or one file; threads share torch's generator, so draw before they start), or build "
            f"the model inside plait.empty_parameters()"
        )


def _fingerprint(name: str, parameter: Tensor) -> int:
    """63 bits of a parameter's name, shape, dtype and values (on meta: without the values)."""
    text = f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    if not parameter.is_meta:
        digest.update(bytes(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data))
    return int.from_bytes(digest.digest(), "little") >> 1
