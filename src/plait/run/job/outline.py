"""Describes a model for the planner: a decoder by its sizes, a user's job by one forward and loss of its model and
batch on meta, where nothing is computed or allocated."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from plait.checkpoint.files.reading import read_text
from plait.comm import ThreadWorld
from plait.predict.chain import Chain, ChainLink
from plait.predict.model import Transformer, from_hugging_face
from plait.run.job.config import JobConfig
from plait.run.job.own import UserJob, load_job
from plait.run.models.gpt import GPTConfig
from plait.run.models.hf import HFConfig
from plait.run.models.moe import MoEConfig
from plait.run.models.pretrained import Pretrained
from plait.step.step import num_samples
from plait.table.mesh import Mesh
from plait.tensor.expert_axis import ExpertAxis, Run, experts_of
from plait.torch_private import TorchDispatchMode, tree_leaves, tree_map
from plait.zero.wrap import wrap


class _Counting(TorchDispatchMode):
    """Adds the work of each operator to the link that runs, or ran last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.link = 0
        self.flops, self.moved, self.kept, self.handed, self.operators = (Counter[int]() for _ in range(5))
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in (*tree_leaves(args), *tree_leaves(out)) if isinstance(leaf, Tensor)]
        if func.is_view or not tensors:
            return out
        self.operators[self.link] += 1
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.flops[self.link] += count(*args, **(kwargs or {}), out_val=out)
        else:
            self.moved[self.link] += sum(one.numel() for one in tensors)
        return out

    def keep(self, value: Tensor) -> Tensor:
        """Counts a value that autograd saves, once for each storage, unless it is a parameter's."""
        storage = value.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.kept[self.link] += value.numel()
        return value


class _CountedExperts(ExpertAxis):
    """Counts experts by their matrices: on meta no token can be sorted by its expert."""

    def __init__(self, counting: _Counting, module: nn.Module) -> None:
        super().__init__(ThreadWorld(Mesh()).comm(0))
        self.counting, self.module = counting, module

    def experts(self, run: Run, num_experts: int, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Makes one product with each matrix of the experts for every choice of a token, for the output's shape."""
        counting, rows = self.counting, expert_TK.numel()
        for _, first, second in (p.shape for p in self.module.parameters(recurse=False) if p.dim() == 3):
            counting.flops[counting.link] += 2 * rows * first * second
            counting.moved[counting.link] += 2 * rows * (first + second)
            counting.kept[counting.link] += rows * (first + second)
            counting.operators[counting.link] += num_experts
        return x_TD * weight_TK.sum(-1, keepdim=True)


def outline(job: UserJob) -> tuple[Chain, int]:
    """The job's model as a chain, and the samples of its batch.  ValueError for a job that cannot run on meta."""
    try:
        with torch.device("meta"):
            model = job.model(0)
            batch = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, job.batch(0))
        found, counting = _links(model), _Counting()
        given = [*model.parameters(), *[leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]]
        counting.seen = {one.untyped_storage()._cdata for one in given}
        for module in experts_of(model).values():
            vars(module)["expert_axis"] = _CountedExperts(counting, module)
        for number, (_, module, _) in enumerate(found):
            _count_in(counting, number, module, outermost=module is model)
        with counting, torch.autograd.graph.saved_tensors_hooks(counting.keep, lambda value: value):
            job.loss_fn(model, batch)
    except Exception as error:  # the job's own code may raise anything if tensors have no values
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{job} does not run on meta, where tensors have no values ({reason}): give --params"
        ) from error
    n, counters = num_samples(batch), (counting.flops, counting.moved, counting.kept, counting.handed)
    links = []
    for k, (name, _, parameters) in enumerate(found):
        flops, moved, kept, handed = (counter[k] / n for counter in counters)
        links.append(ChainLink(name, parameters, flops, moved, kept, handed, counting.operators[k]))
    return Chain(tuple(links), _is_sequential(model)), n


def counted(task: JobConfig) -> tuple[Transformer | Chain | None, int, int]:
    """A task's model for the planner, None for one that it does not know; its samples; the tokens of each.

    A user's job is counted on meta, and each of its samples as one token.  ValueError for one that cannot run there.
    """
    if (job := task.network.job) is not None:
        return *outline(job if isinstance(job, UserJob) else load_job(job)), 1
    return transformer_of(task.sizes) if task.family.reads_text else None, task.samples.batch, task.network.length


def transformer_of(sizes: Any) -> Transformer | None:
    """The sizes of a run's decoder; None for another model."""
    if isinstance(sizes, GPTConfig):
        experts: dict[str, Any] = {}
        if isinstance(sizes, MoEConfig):
            shared = sizes.hidden_width if sizes.shared else 0
            experts = {"experts": sizes.num_experts, "chosen": sizes.num_chosen, "shared_ffn": shared}
        return Transformer(
            layers=sizes.num_layers,
            hidden=sizes.width,
            ffn=sizes.hidden_width,
            heads=sizes.num_heads,
            kv_heads=sizes.num_kv_heads,
            vocab=sizes.vocabulary,
            qkv_bias=isinstance(sizes, HFConfig) and sizes.kind == "qwen2",
            tied=sizes.tie if isinstance(sizes, HFConfig) else True,
            dropout=sizes.dropout > 0,
            **experts,
        )
    if not isinstance(sizes, Pretrained):
        return None
    with suppress(ValueError):
        file = Path(sizes.path) / "config.json"
        return from_hugging_face(read_text(file, "the config"), str(file))
    return None


def _is_sequential(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward and len(model) > 1


def _links(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """Each link's name, module and parameters."""
    if _is_sequential(model):
        return [(name, one, sum(p.numel() for p in one.parameters())) for name, one in model.named_children()]
    return [(one.name or "root", one.module, sum(p.numel() for _, p in one.parameters)) for one in wrap(model)]


def _count_in(counting: _Counting, number: int, module: nn.Module, *, outermost: bool) -> None:
    """Counts operators for this link from the start of its module until another link starts."""

    def begins(*_: Any) -> None:
        counting.link = number

    def ends(_module: nn.Module, _args: Any, out: Any) -> None:
        counting.handed[number] += sum(one.numel() for one in tree_leaves(out) if isinstance(one, Tensor))

    if not outermost:
        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends)
