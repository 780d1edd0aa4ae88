"""The expert axis: neighbours of ``shard`` share the experts of a layer, and tokens travel to them.

    shard=4 expert=2       rank    0      1      2      3
                           tokens  t0     t1     t2     t3           as without the axis
                           experts 0, 1   2, 3   0, 1   2, 3         a piece of dim 0 of their parameters

Experts are cut before a row splits their state, as a tensor axis cuts a weight; if there is one, both cut them.  The
row then reads ``shard`` as ``expert_shard``: the ranks that have the same experts.  Sums over a step need no factor,
because the backward of the messages brings every token's gradient to its expert.

    gather        all ranks' tokens come, each rank runs its experts, a reduce_scatter adds up their outputs
    all_to_all    each token goes to the ranks of its experts, padded to the most that one rank sends to another

A module that has experts asks for it by ``expert_axis = None``, and owns their parameters, [experts, ...] each.

Sources: GShard (Lepikhin et al. 2020), parallel folding of Megatron Core (Liu et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import Comm
from plait.comm.padded import padded
from plait.table.cells import EXPERTS
from plait.table.collectives import Note
from plait.table.mesh import Mesh
from plait.table.region import part
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import BALANCE, EXPERT_BACKWARD, EXPERT_FORWARD
from plait.tensor.no_double_backward import no_double_backward
from plait.tensor.plan import Parallel

AXES = ("expert",)
TENSOR = ("tensor",)

Run = Callable[[Tensor, Tensor], Tensor]
"""Maps rows [rows, width], and the number on this rank of each row's expert, to the outputs of the experts."""

Send = Callable[[Tensor, "ExpertAxis", str], Tensor]
"""Sends a tensor in a message, in a phase of the ledger."""

first_order = no_double_backward("an expert axis", "train such a model without it")


def run_experts(run: Run, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor, first: int, count: int) -> Tensor:
    """For each token, the weighted sum of its experts among ``first .. first + count``: [T, D]."""
    token, choice = ((expert_TK >= first) & (expert_TK < first + count)).nonzero(as_tuple=True)
    rows = x_TD[token]
    out = run(rows, expert_TK[token, choice] - first)
    if not len(token):  # no rows need no graph, but the backward sends messages on every rank
        out = _FromNoRows.apply(out, rows)
    out_PD = out * weight_TK[token, choice, None]
    return _sum_of_choices(out_PD.to(x_TD.dtype), token, choice, expert_TK.shape)


def _sum_of_choices(out_PD: Tensor, token: Tensor, choice: Tensor, shape: torch.Size) -> Tensor:
    every_TKD = out_PD.new_zeros(*shape, out_PD.size(-1))
    return every_TKD.index_put((token, choice), out_PD).sum(1)


def within_capacity(expert_BTK: Tensor, number: int, capacity: float, axis: ExpertAxis | None = None) -> Tensor:
    """The experts of each token, with -1 for those that are full: their output for the token is dropped.

    Each of the ``number`` experts takes ceil(capacity * chosen * tokens / number) of a sample's tokens, in the order of
    time.  A drop depends on nothing later, and on no other sample, so it is the same under every layout.
    """
    chosen_BTE = F.one_hot(expert_BTK + 1, number + 1)[..., 1:].sum(2)
    place_BTE, whole_BE = chosen_BTE.cumsum(1), chosen_BTE.sum(1)
    if axis is not None and axis.comm.mesh.count(axis.sample_over) > 1:
        place_BTE, whole_BE = axis.in_time(chosen_BTE)
    share = Fraction(str(capacity)) / number
    room_B = -(-whole_BE.sum(-1) * share.numerator // share.denominator)
    full_BTK = place_BTE.gather(2, expert_BTK.clamp(min=0)) > room_B[:, None, None]
    return expert_BTK.masked_fill(full_BTK, -1)


class ExpertAxis:
    """A rank's place among those that share experts.  ``sequence``: the tensor axis cuts the tokens, too."""

    def __init__(self, comm: Comm, *, sequence: bool = False, all_to_all: bool = False) -> None:
        self.comm, self.sequence, self.all_to_all = comm, sequence, all_to_all
        mesh = comm.mesh
        self.ways, self.index = mesh.count(EXPERTS.cut), mesh.index(comm.rank, EXPERTS.cut)
        self.tokens_over = EXPERTS.cut if sequence else AXES
        """The ranks with other tokens for the same experts."""
        self.same_tokens = mesh.tensor > 1 and not sequence
        """True if the ranks of the tensor axis have the same tokens, each for different experts."""
        self.sample_over = ("context", *TENSOR) if sequence else ("context",)
        self.owner: nn.Module | None = None
        """The running module with experts; None once it has called ``experts``."""

    def part(self, num_experts: int, index: int | None = None) -> tuple[int, int]:
        """The first expert of a rank, and the first after its last; this rank's by default."""
        return part(num_experts, self.ways, self.index if index is None else index)

    def experts(self, run: Run, num_experts: int, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Runs the experts of this rank's tokens on the ranks that have them; weights and sums their outputs: [T, D].

        Args:
            run: computes this rank's experts.
            num_experts: the number on all ranks together.
            expert_TK: int64, the experts of each token; -1 for none.

        Raises:
            ValueError: a wrong shape, a module that owns no experts, or a wrong number of experts.
        """
        start, stop = self.part(num_experts)
        if x_TD.dim() != 2 or expert_TK.shape != weight_TK.shape or expert_TK.shape[:-1] != x_TD.shape[:1]:
            raise ValueError(
                f"tokens of {list(x_TD.shape)} for experts {list(expert_TK.shape)} with weights "
                f"{list(weight_TK.shape)}: give [tokens, width], and twice [tokens, chosen]"
            )
        if self.ways > 1:
            self._check_owner(num_experts, stop - start)
        if self.same_tokens:
            x_TD, weight_TK = (self._send(x, keep, add_up) for x in (x_TD, weight_TK))
        if self.comm.mesh.count(self.tokens_over) == 1:
            y_TD = run_experts(run, x_TD, expert_TK, weight_TK, start, stop - start)
        elif self.all_to_all:
            y_TD = self._by_all_to_all(run, num_experts, x_TD, expert_TK, weight_TK)
        else:
            y_TD = self._by_gather(run, start, stop, x_TD, expert_TK, weight_TK)
        return self._send(y_TD, add_up, keep) if self.same_tokens else y_TD

    def _check_owner(self, num_experts: int, mine: int) -> None:
        owner, self.owner = self.owner, None
        have = None if owner is None else len(next(owner.parameters(recurse=False)))
        if have != mine:
            says = "owns no parameter [experts, ...] itself" if owner is None else f"has {have} of them here"
            raise ValueError(
                f"expert_axis.experts is called for {num_experts} experts, {mine} on this rank, and the module that "
                f"calls it {says}: give the number on all ranks, and let one module own the parameters and call it once"
            )

    def _by_gather(self, run: Run, start: int, stop: int, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        tokens = len(x_TD)
        most = self._most(tokens)
        mine = padded(x_TD, 0, most), padded(expert_TK + 1, 0, most) - 1, padded(weight_TK, 0, most)  # -1: no expert
        x, expert, weight = (self._send(one, gather, scatter) for one in mine)
        shares = run_experts(run, x, expert, weight, start, stop - start)
        return self._send(shares, scatter, gather)[:tokens]

    def _by_all_to_all(self, run: Run, num_experts: int, x_TD: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        # 1. the ranks of each token, in the order of the ranks that have its experts
        ranks = self.comm.mesh.count(self.tokens_over)
        size = -(-num_experts // self.ways)
        owner_TK = expert_TK.div(size, rounding_mode="floor")
        goes_TK = expert_TK >= 0
        if self.same_tokens:  # the other ranks of the tensor axis send the other tokens
            ways = self.comm.mesh.tensor
            goes_TK, owner_TK = (
                goes_TK & (owner_TK % ways == self.index % ways),
                owner_TK.div(ways, rounding_mode="floor"),
            )
        token, choice = goes_TK.nonzero(as_tuple=True)
        order = owner_TK[token, choice].argsort(stable=True)
        token, choice = token[order], choice[order]
        owner_P = owner_TK[token, choice]
        counts = owner_P.bincount(minlength=ranks)
        most = self._most(int(counts.max()))
        slot_P = (
            owner_P * most + torch.arange(len(owner_P), device=owner_P.device) - (counts.cumsum(0) - counts)[owner_P]
        )
        # 2. to the ranks, through the experts, and back
        sent = x_TD.new_zeros(ranks * most, x_TD.size(-1)).index_put((slot_P,), x_TD[token])
        numbers = expert_TK.new_full((ranks * most, 1), -1).index_put((slot_P,), expert_TK[token, choice, None])
        x, expert = self._send(sent, exchange, exchange), self._send(numbers, exchange, exchange)
        start, stop = self.part(num_experts)
        out = run_experts(run, x, expert, x.new_ones(expert.shape), start, stop - start)
        out_PD = self._send(out, exchange, exchange)[slot_P] * weight_TK[token, choice, None]
        # 3. the sum for each token, as on a single rank
        return _sum_of_choices(out_PD.to(x_TD.dtype), token, choice, expert_TK.shape)

    def _send(self, tensor: Tensor, there: Send, back: Send) -> Tensor:
        sent: Tensor = _ThereAndBack.apply(tensor, self, there, back)
        return sent

    def _most(self, number: int) -> int:
        """The largest of these numbers on the ranks that exchange tokens."""
        most = torch.tensor([number], device=self.comm.device)
        self.comm.all_reduce(most, self.tokens_over, "max", Note(EXPERT_FORWARD)).wait()
        return int(most)

    def over_sample(self, sums: Tensor) -> Tensor:
        """Adds up sums over the ranks that have a part of the same samples; passes no gradient."""
        return self._over(sums.detach(), self.sample_over)

    def in_time(self, counts_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """The running sums over a sample's steps, in the order of time, and the whole sums: [B, T, E] and [B, E].

        This rank has an early and a late run of steps under a context axis, and a part of each under ``sequence``.
        """
        mesh, mine = self.comm.mesh, counts_BTE.size(1)
        contexts, parts = (mesh.axis(axis) if axis in self.sample_over else 1 for axis in ("context", "tensor"))
        steps = int(self._over(counts_BTE.new_tensor(mine), TENSOR)) if parts > 1 else mine  # of the context rank
        first, _ = part(steps, parts, mesh.index(self.comm.rank, TENSOR) if parts > 1 else 0)
        early = min(max(steps // min(contexts, 2) - first, 0), mine)
        runs = counts_BTE.split([early, mine - early], 1)
        sums = torch.stack([run.sum(1) for run in runs])
        every = sums.new_empty(contexts, parts, *sums.shape)
        self.comm.all_gather(every, sums, self.sample_over, Note(BALANCE)).wait()
        ordered = torch.cat((every[:, :, 0].flatten(0, 1), every[:, :, 1].flip(0).flatten(0, 1)))
        before = ordered.cumsum(0) - ordered
        context, place = divmod(mesh.index(self.comm.rank, self.sample_over), parts)
        at = context * parts + place, (2 * contexts - 1 - context) * parts + place
        running = [run.cumsum(1) + before[k][:, None] for run, k in zip(runs, at, strict=True)]
        return torch.cat(running, 1), ordered.sum(0)

    def whole_loss(self, loss: Tensor) -> Tensor:
        """Adds to a loss of this rank's tokens those of the other tensor ranks, where they have other tokens."""
        if not self.sequence:
            return loss
        return loss + (self._over(loss.detach(), TENSOR) - loss).detach()

    def _over(self, sums: Tensor, axes: Sequence[str]) -> Tensor:
        sums = sums.clone()
        self.comm.all_reduce(sums, axes, note=Note(BALANCE)).wait()
        return sums


# ---- messages ----------------------------------------------------------------------------------------------------


class _FromNoRows(torch.autograd.Function):
    """Links an output to no rows in the graph, as if it were computed from them."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, rows: Tensor) -> Tensor:
        ctx.rows = rows.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_zeros(ctx.rows)


class _ThereAndBack(torch.autograd.Function):
    """Sends a tensor by one of the messages below; the backward sends its gradient by another."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, axis: ExpertAxis, there: Send, back: Send) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return there(mine, axis, EXPERT_FORWARD)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.axis, EXPERT_BACKWARD), None, None, None


def gather(mine: Tensor, axis: ExpertAxis, phase: str) -> Tensor:
    """Gathers all ranks' tokens."""
    whole = mine.new_empty(axis.comm.mesh.count(axis.tokens_over) * len(mine), *mine.shape[1:])
    axis.comm.all_gather(whole, mine.contiguous(), axis.tokens_over, Note(phase)).wait()
    return whole


def scatter(shares: Tensor, axis: ExpertAxis, phase: str) -> Tensor:
    """Sums this rank's tokens over the ranks, each of which has a share of them."""
    mine = shares.new_empty(len(shares) // axis.comm.mesh.count(axis.tokens_over), *shares.shape[1:])
    axis.comm.reduce_scatter(mine, shares.contiguous(), axis.tokens_over, note=Note(phase)).wait()
    return mine


def exchange(mine: Tensor, axis: ExpertAxis, phase: str) -> Tensor:
    """Sends piece k to rank k."""
    arrived = torch.empty_like(mine, memory_format=torch.contiguous_format)
    axis.comm.all_to_all(arrived, mine.contiguous(), axis.tokens_over, Note(phase)).wait()
    return arrived


def add_up(share: Tensor, axis: ExpertAxis, phase: str) -> Tensor:
    """Sums the tensor ranks' shares."""
    whole = share.clone(memory_format=torch.contiguous_format)
    axis.comm.all_reduce(whole, TENSOR, note=Note(phase)).wait()
    return whole


def keep(same: Tensor, axis: ExpertAxis, phase: str) -> Tensor:
    """Sends nothing, because the tensor ranks have the same tensor."""
    return same.view_as(same)


# ---- models ------------------------------------------------------------------------------------------------------


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that own experts, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "expert_axis") and any(True for _ in module.parameters(recurse=False))
    }


def cut_experts(model: nn.Module, mesh: Mesh, parallel: Parallel) -> Parallel:
    """Adds the cuts of experts to those of a tensor plan.

    Raises:
        ValueError: no experts on a mesh with an expert axis; fewer experts than ranks; parameters not [experts, ...].
    """
    ways, found = mesh.count(EXPERTS.cut), experts_of(model)
    if mesh.expert > 1 and not found:
        raise ValueError(
            f"expert={mesh.expert} shares experts, and no module of {type(model).__name__} that owns parameters has an "
            f"'expert_axis' (see docs/guide/experts.md); a model of transformers gets it by "
            f"plait.anymodel.experts.use_expert_axis(model)"
        )
    if ways == 1 or not found:
        return parallel
    uses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(parameter), []).append(name)
    cuts: dict[int, TensorCut] = {}
    for name, module in found.items():
        own = dict(module.named_parameters())
        sizes = {short: tuple(p.shape) for short, p in own.items()}
        number = {shape[0] if shape else 0 for shape in sizes.values()}
        whole = [short for short, buffer in module.named_buffers() if buffer.dim() and len(buffer) in number]
        if whole:
            raise ValueError(
                f"'{name}.{whole[0]}' is a buffer as long as the experts, whole on every rank that has some of them: "
                f"make it a parameter, requires_grad=False if it does not train, or keep it outside"
            )
        if len(number) > 1 or any("." in short for short in own):
            raise ValueError(f"{name!r} has experts, so each of its parameters is [experts, ...], and it has {sizes}")
        if (ways - 1) * -(-min(number) // ways) >= min(number):
            raise ValueError(f"{name!r} has {min(number)} experts, which leave a rank of {ways} (mesh '{mesh}') none")
        for short, parameter in own.items():
            if len(names := uses[id(parameter)]) > 1:
                raise ValueError(f"experts that {ways} ranks share belong to one module, and these are {names}")
            if id(parameter) in parallel.cuts or id(parameter) in parallel.summed:
                raise ValueError(
                    f"'{name}.{short}' has experts, which {ways} ranks share, and the tensor plan names it: leave it "
                    f"out (plait.anymodel.plan_of(model) does)"
                )
            cuts[id(parameter)] = TensorCut(sizes[short], 0, ways, (sizes[short][0],))
    return replace(
        parallel,
        cuts={**parallel.cuts, **cuts},
        pieces=parallel.pieces | cuts.keys(),
        experts=frozenset(found),
    )


def give_expert_axis(models: Sequence[tuple[nn.Module, Parallel]], comm: Comm, *, sequence: bool, **how: bool) -> None:
    """Gives the axis to the modules of a model, and of its stages, that ask for it.

    Args:
        models: each with its tensor plan.
        sequence: the stream is cut in time, except in modules that the plan calls ``unsplit``.
    """
    axes = {cut: ExpertAxis(comm, sequence=cut, **how) for cut in (False, True)}
    given: set[int] = set()
    for model, parallel in models:
        whole = tuple(f"{name}." for name, style in parallel.styles.items() if style.kind == "unsplit")
        for name, module in model.named_modules():
            if hasattr(module, "expert_axis") and id(module) not in given:
                given.add(id(module))
                axis = vars(module)["expert_axis"] = axes[sequence and not f"{name}.".startswith(whole)]
                if axis.ways > 1 and any(True for _ in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(partial(_begin, axis))
                    module.register_forward_hook(partial(_end, axis))


def _begin(axis: ExpertAxis, module: nn.Module, args: Any) -> None:
    axis.owner = module


def _end(axis: ExpertAxis, module: nn.Module, args: Any, output: Any) -> None:
    if axis.owner is module:
        raise ValueError(
            f"{type(module).__name__} has some experts of {axis.ways} ranks here and returned without "
            f"self.expert_axis.experts(...), so its tokens saw these alone. If it has none, and asks for over_sample, "
            f"let the module around it ask; see docs/guide/experts.md"
        )
