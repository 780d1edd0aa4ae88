"""Checks before a model is cut: refuses models that no engine can train, and ranks that differ.

Ranks compare the smallest and the largest of their digests.  If the two differ, some rank has another value, and then
all ranks show all values to each other.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from plait.comm import Comm
from plait.comm.texts import differences, same_everywhere
from plait.forward.parameter import AtRest
from plait.table.collectives import Note
from plait.table.mesh import AXES
from plait.torch_private import DisableTorchFunctionSubclass
from plait.zero.gradients import GradientHook
from plait.zero.state.identity import fingerprint, model_fields, of_the_model, text_of


def check_model(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError for models that no engine can train, and for replicas that differ."""
    if lazy := [name for name, p in model.named_parameters() if is_lazy(p)]:
        raise ValueError(
            f"{len(lazy)} parameters have no shape yet ({', '.join(lazy[:3])}): call the model once on a sample before "
            f"its optimizer and Engine are built"
        )
    if compiled := [n for n, m in model.named_modules() if m._compiled_call_impl or "_orig_mod" in m._modules]:
        raise ValueError(
            f"{compiled[0] or 'the model'!r} is compiled, and the compiler would trace into the engine's gathers and "
            f"dropout streams: build the model uncompiled and give Engine(compile=True), which compiles between them, "
            f"or compile functions inside of its modules (as of activations)"
        )
    if scripted := [name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
        raise ValueError(
            f"{scripted[0] or 'the model'!r} is a torch.jit.ScriptModule, which runs outside of Python, where the "
            f"engine's hooks are: build the model of plain modules, and script functions inside of them instead"
        )
    if extra := [n for n, m in model.named_modules() if type(m).get_extra_state is not nn.Module.get_extra_state]:
        raise ValueError(
            f"{extra[0] or 'the model'!r} has get_extra_state(), which plait neither gathers nor saves: keep its value "
            f"in a buffer, or remove the method and give its value to plait.save(extra=...)"
        )
    bounded = [n for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm]
    if bounded and comm.mesh.size > 1:
        raise ValueError(
            f"{bounded[0]!r} has max_norm: each rank's forward would rewrite the rows that its own samples use, and "
            f"replicas would diverge; leave max_norm out, and normalise the table's output"
        )
    check_buffers(model)
    check_driven(model, comm)
    check_memory(model)
    if not any(True for _ in model.parameters()):
        raise ValueError("the model has no parameters: there is nothing to train")
    check_replicas(model, comm)


def check_buffers(model: nn.Module) -> None:
    """Raises ValueError if a buffer has no values."""
    if empty := [name for name, buffer in model.named_buffers() if buffer.is_meta]:
        raise ValueError(
            f"{len(empty)} buffers are on the meta device and have no values ({', '.join(empty[:3])}): build the model "
            f"inside plait.empty_parameters(), which computes buffers for real, instead of torch.device('meta')"
        )


def check_driven(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError if another engine has a parameter of the model, or had it and left no values in it."""
    with DisableTorchFunctionSubclass():
        for name, parameter in model.named_parameters():
            parameter.rank_of_engine = comm.rank  # type: ignore[attr-defined]  # other threads see it
            hooks = cast(Any, parameter)._post_accumulate_grad_hooks or {}
            if any(isinstance(hook, GradientHook) and hook.alive for hook in hooks.values()):
                raise ValueError(
                    f"{name!r} is a parameter that another Engine drives, and each would lay it in its own memory: "
                    f"put the modules that share it into one model with one Engine; or, if that one is not used any "
                    f"more, build the model anew"
                )
            if isinstance(parameter, AtRest):
                raise ValueError(
                    f"the values of {name!r} went with the Engine that had it at rest: build the model anew, and load "
                    f"the state that the engine's full_state_dict() returned"
                )


def check_memory(model: nn.Module) -> None:
    """Raises ValueError if a parameter that trains shares memory with another one, a buffer, or an attribute of a
    module, also in its containers and as a numpy array: in the engine's memory they would diverge.  (The tensors that
    ``nn.utils.spectral_norm`` leaves are recomputed by each forward.)"""
    owners: dict[object, list[tuple[int, int, str, Any]]] = {}
    named: list[tuple[str, Any]] = [*model.named_parameters(), *model.named_buffers()]
    for place, module in model.named_modules():
        kept = {key: value for key, value in vars(module).items() if f"{key}_orig" not in module._parameters}
        named += _memory_in(kept, place)
    for name, value in named:
        if isinstance(value, np.ndarray):
            start = value.__array_interface__["data"][0]
            owners.setdefault("cpu", []).append((start, start + value.nbytes, name, value))
        elif type(value) in (Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided and value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            size, meta = value.element_size(), value.untyped_storage()._cdata if value.is_meta else None
            start = int(value.storage_offset()) * size if meta else value.data_ptr()
            owners.setdefault(meta or str(value.device), []).append(
                (start, start + (int(last) + 1) * size, name, value)
            )
    for sharing in owners.values():
        end, first, one = 0, "", None
        for start, stop, second, other in sorted(sharing, key=lambda owner: owner[:2]):
            trained = any(isinstance(t, nn.Parameter) and t.requires_grad for t in (one, other))
            if one is not other and start < end and trained:
                raise ValueError(
                    f"{first!r} and {second!r} are two tensors in one memory. The engine lays parameters in its own "
                    f"memory, where an update of one would not reach the other: share the parameter itself "
                    f"(head.weight = embed.weight), or make the other from it in the forward"
                )
            if stop > end:
                end, first, one = stop, second, other


def _memory_in(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields the tensors and numpy arrays in containers."""
    if isinstance(value, Tensor | np.ndarray):
        yield name, value
    elif isinstance(value, Mapping | list | tuple | set | deque) and depth < 4:
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            if type(one) not in (str, int, float):  # skips the entries of a long vocabulary
                yield from _memory_in(one, f"{name}.{key}".removeprefix("."), depth + 1)


NAMED = 6
"""The most differences that are shown."""


def check_same(comm: Comm, fields: Mapping[str, str], what: str, fix: str) -> None:
    """Raises ValueError, on every rank, if the ranks' fields differ, and shows them with all their values."""
    if lines := differences(comm, fields, Note("setup")):
        more = f"; and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        raise ValueError(f"{what}: {'; '.join(lines[:NAMED])}{more}. {fix}")


def check_settings(comm: Comm, settings: Mapping[str, object], texts: Mapping[str, str] | None = None) -> None:
    """Raises ValueError, on every rank, if ranks were given different settings or ``texts``, and shows them."""
    fields = {name: str(getattr(value, "name", None) or text_of(value)) for name, value in settings.items()}
    fields |= texts or {}
    check_same(comm, fields, "the ranks were given different settings", "Give all the same")


def check_replicas(model: nn.Module, comm: Comm) -> None:
    """Raises ValueError, on every rank, when models, or the values of parameters or buffers, differ between ranks."""
    parameters = list(model.named_parameters())
    structure = {
        f"parameter {name!r}": f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in parameters
    }
    check_same(
        comm,
        structure | model_fields(model),
        "the ranks brought different models",
        "Build the same model everywhere; values that belong to a rank go into an attribute with a leading underscore, "
        "or with rank in its name",
    )
    buffers = [(n, b) for n, b in model.named_buffers() if of_the_model(n.rpartition(".")[-1])]
    for kind, tensors in (("parameters", parameters), ("buffers", buffers)):
        digests = {name: fingerprint(tensor, name, tensor.requires_grad) for name, tensor in tensors}
        same = same_everywhere(comm, list(digests.values()), AXES, Note("setup"))
        if differing := [name for name, alike in zip(digests, same, strict=True) if not alike]:
            shown = differences(comm, {name: f"{digests[name]:016x}" for name in differing[:NAMED]}, Note("setup"))
            raise ValueError(
                f"{len(differing)} of the {kind} differ between ranks ({', '.join(differing[:3])}): give every rank "
                f"the same values (one seed, or one file; threads share torch's generator, so draw before they start), "
                f"or build the model inside plait.empty_parameters(). By digest of their values {'; '.join(shown)}"
            )
    if shared := [name for name, p in parameters if p.rank_of_engine != comm.rank]:  # type: ignore[attr-defined]
        raise ValueError(
            f"{shared[0]!r} is one parameter on several ranks, which are threads here: give each rank its own model, "
            f"built in the function that it runs, or a copy.deepcopy of one"
        )
