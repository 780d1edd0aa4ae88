"""Published silent bugs, each reproduced from its description, in its own engine or in a small one by hand.

An adapter here is right except for the line that its name and text describe; ``docs/silent-bugs.md`` has the threads.

    torch's DDP, FSDP2, pipelining   the bug is put on top of the engine itself
    ``in_time``                      a sequence-parallel engine by hand: whole samples enter, a rank computes its part
                                     of time, and gradients are summed over the ranks: of norms, gates, keys, experts
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from silent_bug_jobs import TIME, Bug, loss_sum, num_targets
from torch import Tensor, nn
from torch.func import functional_call

from plait.comm import Comm
from plait.referee.witness.engines import Driven, ddp, find_adapter, fsdp2, loop
from plait.run.job.job import Job

CLIP = 0.05
torch_pipelining: Any = find_adapter(f"{Path(__file__).parents[2]}/examples/engines.py:torch_pipelining")

# ---- data parallel, in torch's engines --------------------------------------------------------------------------


def with_loss(job: Job, change: Callable[[Tensor, Any], Tensor]) -> Job:
    """The job with another loss for each forward."""
    plain = job.loss_fn
    return replace(job, loss_fn=lambda model, batch: change(plain(model, batch), batch))


def means_are_averaged(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Each forward's loss is its own mean, and the means are averaged."""
    made = ddp(with_loss(job, lambda loss, batch: loss / max(1, num_targets(batch))), model, comm)
    return made._replace(step=lambda batches, count, clip: made.step(batches, comm.mesh.size * len(batches), clip))


def means_are_summed(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """The count is of all forwards, and the mean over forwards is not taken: twice as much with two of them."""
    made = ddp(job, model, comm)
    return made._replace(step=lambda batches, count, clip: made.step(batches, count / len(batches), clip))  # type: ignore[arg-type]


def ranks_count_their_own(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Each rank divides by the targets that it has."""
    made = ddp(job, model, comm)

    def step(batches: Sequence[Any], count: int, clip: float | None) -> None:
        made.step(batches, sum(map(num_targets, batches)) * comm.mesh.size, clip)

    return made._replace(step=step)


def divided_by_the_ranks_again(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """FSDP2 takes a mean over the ranks, which is not undone."""
    made = fsdp2(job, model, comm)
    return made._replace(step=lambda batches, count, clip: made.step(batches, count * comm.mesh.size, clip))


def scaled_after_every_forward(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """The accumulated gradient is divided again after each forward: a moving average."""
    made = ddp(job, model, comm)

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.div_(2)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    return made


def the_last_rank_never_updates(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """A tied weight whose rows the ranks do not share evenly: the last rank's stay as they were."""
    made = fsdp2(job, model, comm)

    def forget(*call: Any) -> None:
        if comm.rank == comm.mesh.size - 1:
            model.embed.weight.grad.to_local().zero_()  # type: ignore[union-attr, operator]

    return _before_update(made, forget)


def kept_over_the_update(job: Job, model: Any, comm: Comm) -> Driven:
    """FSDP2 stays gathered after a backward, also after the last one: the next forward reads old values."""
    made = fsdp2(job, model, comm)
    model.set_reshard_after_backward(False)
    return made


def weights_become_active_late(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """The forward computes with a copy of the weights that is renewed before each update, and not after it."""
    copies: dict[str, Tensor] = {}

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        used = {n: p + (copies.get(n, p) - p).detach() for n, p in model.named_parameters()}
        return loss_sum(lambda tokens: functional_call(model, used, (tokens,)), batch)  # type: ignore[arg-type]

    made = ddp(job, model, comm)
    plain = loop(replace(job, loss_fn=loss), model, made.optimizer, comm.mesh.size)

    def sums(*call: Any) -> None:
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(comm.mesh.size)  # type: ignore[union-attr]
            copies[name] = p.detach().clone()

    made.optimizer.register_step_pre_hook(sums)
    return Driven(model, made.optimizer, plain)


def tied_use_after_the_reduction(job: Job, model: Any, comm: Comm) -> Driven:
    """Gradients are reduce-scattered before the two uses of a tied weight are added.  They are in other partitions, so
    each rank adds the one use's mean to its own share of the other."""
    optimizer = job.optimizer(model.parameters())
    plain = loop(job, model, optimizer, comm.mesh.size)

    def sums(*call: Any) -> None:
        head = torch.stack(model.of_head).sum(0)
        model.of_head.clear()
        uses = (model.embed.weight.grad - head, head)
        means = [use.clone() for use in uses]
        rest = [p.grad for name, p in model.named_parameters() if name != "embed.weight"]
        for gradient in (*means, *rest):
            dist.all_reduce(gradient)
            gradient.div_(comm.mesh.size)
        model.embed.weight.grad.copy_(uses[comm.rank] + means[1 - comm.rank])

    optimizer.register_step_pre_hook(sums)
    return Driven(model, optimizer, plain)


def clipped_by_the_local_norm(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Each rank clips by the norm of the shards that it has."""
    made = fsdp2(job, model, comm)

    def clip(*call: Any) -> None:
        local = [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        norm = torch.stack([g.norm() for g in local]).norm()
        for gradient in local:
            gradient.mul_((CLIP / (norm + 1e-6)).clamp(max=1.0))

    return _before_update(made, clip, no_clip=True)


def clipped_by_a_norm_that_counts_twice(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Every rank holds the whole gradient, and the squares are summed over the ranks."""
    made = ddp(job, model, comm)

    def clip(*call: Any) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        square = sum(g.square().sum() for g in gradients)
        dist.all_reduce(square)  # type: ignore[arg-type]
        for gradient in gradients:
            gradient.mul_((CLIP / square.sqrt()).clamp(max=1.0))  # type: ignore[union-attr]

    return _before_update(made, clip, no_clip=True)


def measured_and_not_clipped(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """The norm is right, and clips a list of tensors that is empty."""
    return _before_update(ddp(job, model, comm), no_clip=True)


def _before_update(made: Driven, change: Callable[..., None] = lambda *call: None, *, no_clip: bool = False) -> Driven:
    """The engine, with something done to the gradients before the optimizer sees them."""
    made.optimizer.register_step_pre_hook(change)
    if not no_clip:
        return made
    return made._replace(step=lambda batches, count, clip: made.step(batches, count, None))


# ---- pipelines, in torch's ---------------------------------------------------------------------------------------


def summed_over_microbatches(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Each microbatch's mean loss goes backward, without a division by their number."""
    made = torch_pipelining(job, model, comm)
    return made._replace(step=lambda batches, count, clip: made.step(batches, count // len(batches), clip))


def not_divided_by_the_count(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """The schedule goes backward from the sum; the count divides what is reported."""
    made = torch_pipelining(job, model, comm)
    return made._replace(step=lambda batches, count, clip: made.step(batches, 1, clip))


def scaled_on_every_stage(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """The last stage divides by the number of microbatches, and each stage before it does so once more."""
    made = torch_pipelining(job, model, comm)
    for p in made.model.parameters() if comm.rank < comm.mesh.size - 1 else ():
        p.register_hook(lambda gradient: gradient / 2)
    return made


def only_the_last_microbatch(job: Job, model: nn.Module, comm: Comm) -> Driven:
    made = torch_pipelining(job, model, comm)
    for p in made.model.parameters():
        calls: list[int] = []

        def keep(gradient: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(0)
            return gradient if len(calls) % 2 == 0 else torch.zeros_like(gradient)

        p.register_hook(keep)
    return made


# ---- parts of a sample on several ranks ---------------------------------------------------------------------------


def in_time(job: Job, model: Any, comm: Comm, reduce: Callable[[str, Tensor], None] | None = None) -> Driven:
    """A right engine that cuts time: the loss of a rank's part, gradients summed over the ranks.

    Args:
        reduce: what to do with a parameter's gradient instead.
    """
    each = TIME // comm.mesh.size
    model.part = slice(comm.rank * each, (comm.rank + 1) * each)
    optimizer = job.optimizer(model.parameters())
    plain = loop(replace(job, loss_fn=lambda m, batch: loss_sum(m, batch, model.part)), model, optimizer, 1)

    def sums(*call: Any) -> None:
        for name, p in model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            (reduce or summed)(name, p.grad)

    optimizer.register_step_pre_hook(sums)
    return Driven(model, optimizer, plain)


def summed(name: str, gradient: Tensor) -> None:
    dist.all_reduce(gradient)


def norms_are_not_summed(job: Job, model: nn.Module, comm: Comm) -> Driven:
    return in_time(job, model, comm, lambda name, g: None if name.startswith("norm") else summed(name, g))


def scaled(prefix: str, factor: float) -> Callable[[str, Tensor], None]:
    """Gradients are summed, and those of some parameters scaled."""

    def reduce(name: str, gradient: Tensor) -> None:
        summed(name, gradient)
        if name.startswith(prefix):
            gradient.mul_(factor)

    return reduce


def norms_are_averaged(job: Job, model: nn.Module, comm: Comm) -> Driven:
    return in_time(job, model, comm, scaled("norm", 1 / comm.mesh.size))


def the_shared_key_is_not_summed(job: Job, model: nn.Module, comm: Comm) -> Driven:
    return in_time(job, model, comm, lambda name, g: None if name == "key.weight" else summed(name, g))


def the_bias_is_not_summed(job: Job, model: nn.Module, comm: Comm) -> Driven:
    return in_time(job, model, comm, lambda name, g: None if name == "key.bias" else summed(name, g))


def the_gate_is_not_summed(job: Job, model: nn.Module, comm: Comm) -> Driven:
    return in_time(job, model, comm, lambda name, g: None if name.startswith("gate") else summed(name, g))


def the_gate_is_detached(job: Job, model: Any, comm: Comm) -> Driven:
    model.routed = False
    return in_time(job, model, comm)


def experts_are_summed_twice(job: Job, model: nn.Module, comm: Comm) -> Driven:
    return in_time(job, model, comm, scaled("experts", comm.mesh.size))


def the_loss_is_scaled_by_the_context(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """A factor for a mean over the ranks, where a sum is taken."""
    return in_time(job, model, comm, lambda name, g: summed(name, g.mul_(comm.mesh.size)))


# ---- honest variations -------------------------------------------------------------------------------------------


def small_buckets(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """A message for nearly every parameter."""
    optimizer = job.optimizer(model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)  # type: ignore[arg-type]
    return Driven(wrapped, optimizer, loop(job, wrapped, optimizer, comm.mesh.size, wrapped.no_sync))


def a_fused_optimizer(job: Job, model: nn.Module, comm: Comm) -> Driven:
    fused = replace(job, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True))
    return ddp(fused, model, comm)


def another_tree(job: Job, model: nn.Module, comm: Comm) -> Driven:
    """Gradients are gathered and added from the last rank to the first, in double precision."""
    optimizer = job.optimizer(model.parameters())

    def sums(*call: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            parts = [torch.empty_like(p.grad) for _ in range(comm.mesh.size)]
            dist.all_gather(parts, p.grad)
            p.grad.copy_(sum(part.double() for part in parts[::-1]))  # type: ignore[arg-type]

    optimizer.register_step_pre_hook(sums)
    return Driven(model, optimizer, loop(job, model, optimizer, 1))


def kept_gathered(job: Job, model: Any, comm: Comm) -> Driven:
    """FSDP2 that gathers once for a forward and its backward."""
    made = fsdp2(job, model, comm)
    model.set_reshard_after_forward(False)
    return made


# ---- the list ----------------------------------------------------------------------------------------------------


LAST, NOT_ADDED = "only the last forward of each rank is in it", "the parts are not added up over the 2 ranks"
PIPE, TENSOR = "pipe=2", "tensor=2"

BUGS = [
    Bug(means_are_averaged, "transformers #34191, ms-swift #10084", "", None, "means of forwards of different counts"),
    Bug(means_are_summed, "transformers #35203, #35438", "", 2.0, "not divided by the 2 forwards"),
    Bug(ranks_count_their_own, "torchtitan #1842, #2206", "", None, "each rank divides by its own count"),
    Bug(divided_by_the_ranks_again, "torchtune #2172", "", 0.5, "divided by the 2 ranks once too often"),
    Bug(scaled_after_every_forward, "torchtitan #1732", "", None, "forward 0 of rank 0 counts 1/4 times"),
    Bug(the_last_rank_never_updates, "pytorch #176076", "embed.weight", 0.0, "rank 1: zero"),
    Bug(kept_over_the_update, "FSDP2: set_reshard_after_backward", "", None, "step 1, gradient"),
    Bug(weights_become_active_late, "Megatron-Bridge #3397", "", None, "the values from before the last update"),
    Bug(tied_use_after_the_reduction, "Megatron-LM #844", "embed.weight", None, "all other parameters are right"),
    Bug(clipped_by_the_local_norm, "pytorch #170862", "", None, "norm of its own pieces", clip=CLIP),
    Bug(clipped_by_a_norm_that_counts_twice, "VeOmni #184", "", 2**-0.5, "", clip=CLIP),
    Bug(measured_and_not_clipped, "transformers #46113", "", None, "it is not clipped", clip=CLIP),
    Bug(summed_over_microbatches, "DeepSpeed #7773", "", 2.0, "not divided by the 2 forwards", mesh=PIPE),
    Bug(not_divided_by_the_count, "torchtitan #2972, #4194", "", 8.0, "not divided by its count", mesh=PIPE),
    Bug(scaled_on_every_stage, "DeepSpeed #8152, #8154", "", 0.5, "rank 0: every gradient is 1/2 times", mesh=PIPE),
    Bug(only_the_last_microbatch, "NeMo Automodel #3530", "", None, LAST, mesh=PIPE),
    Bug(norms_are_not_summed, "Megatron-LM #1446", "norm", None, NOT_ADDED, mesh=TENSOR),
    Bug(norms_are_averaged, "gpt-neox #1259", "norm", 0.5, "", mesh=TENSOR),
    Bug(the_shared_key_is_not_summed, "torchtitan #1373", "key.weight", None, NOT_ADDED, mesh=TENSOR),
    Bug(the_bias_is_not_summed, "bigcode Megatron-LM #11", "key.bias", None, NOT_ADDED, mesh=TENSOR),
    Bug(the_gate_is_not_summed, "torchtitan #2387, #2416, #4054", "gate", None, NOT_ADDED, mesh=TENSOR),
    Bug(the_gate_is_detached, "NeMo Automodel #2995", "gate", 0.0, "never computed", mesh=TENSOR),
    Bug(experts_are_summed_twice, "pytorch #160285, transformers #45994", "experts", 2.0, "", mesh=TENSOR),
    Bug(the_loss_is_scaled_by_the_context, "Megatron-LM #673", "", 2.0, "", mesh=TENSOR),
]

RIGHT = [
    Bug(ddp, "", "", None, ""),
    Bug(fsdp2, "", "", None, "", clip=CLIP),
    Bug(torch_pipelining, "", "", None, "", mesh=PIPE),
    Bug(in_time, "", "", None, "", mesh=TENSOR),
    Bug(small_buckets, "", "", None, ""),
    Bug(a_fused_optimizer, "", "", None, "", clip=CLIP),
    Bug(another_tree, "", "", None, ""),
    Bug(kept_gathered, "", "", None, ""),
]
"""The engines on which the bugs are put, and honest variations of them."""
