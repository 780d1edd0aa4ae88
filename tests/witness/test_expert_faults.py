"""Published faults of expert axes in a handwritten engine: the judge names them; docs/silent-bugs.md has the threads."""

# ruff: noqa: E501 (a row is a line)

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expert_engine import ALL, EXPERT, EXPERTS, RANKS, TOP, WAYS, Engine, gathered, judged
from published import check_page
from torch import Tensor, nn

# ---- gradients of experts ----------------------------------------------------------------------------------------


class ExpertsAreNotDivided(Engine):
    """Dense gradients are averaged from means of ranks; experts', of which a rank has seen all tokens, are not."""

    def reduce(self, name: str, p: nn.Parameter) -> None:
        super().reduce(name, p)
        if name.startswith("experts"):
            p.grad.mul_(WAYS)  # type: ignore[union-attr]


class ExpertsAreMixed(Engine):
    def reduce(self, name: str, p: nn.Parameter) -> None:
        self.add(p.grad, ALL)  # type: ignore[arg-type]


class ReplicasOfExpertsKeepTheirOwn(Engine):
    def reduce(self, name: str, p: nn.Parameter) -> None:
        if not name.startswith("experts"):
            super().reduce(name, p)


class IdleExpertsHaveNoGradient(Engine):
    def reduce(self, name: str, p: nn.Parameter) -> None:
        super().reduce(name, p)
        if not p.grad.any():  # type: ignore[union-attr]
            p.grad = None


class IdleExpertsSendNothing(Engine):
    def reduce(self, name: str, p: nn.Parameter) -> None:
        if p.grad.any():  # type: ignore[union-attr]
            super().reduce(name, p)


# ---- the router ---------------------------------------------------------------------------------------------------


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, engine: Engine) -> Tensor:
        ctx.place = engine.place
        return gathered(engine.comm, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.chunk(WAYS)[ctx.place], None


class WeightsGetTheGradientOfOwnExperts(Engine):
    def weights(self, weights: Tensor) -> Tensor:
        return _OwnPart.apply(weights, self)  # type: ignore[no-any-return]


class SlotsOfOthersHaveAGradient(Engine):
    """A slot that another rank has is computed by an expert that is here, with a weight of zero."""

    def experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        others = chosen // (EXPERTS // WAYS) != self.place
        nothing = (weights - weights.detach()) * others
        here = list(self.model.experts.values())[-1]
        return super().experts(x, weights, chosen) + nothing.sum(1, keepdim=True) * here(x)


class BalanceTimesMicrobatches(Engine):
    def balance(self, share: Tensor, often: Tensor) -> Tensor:
        return 2 * super().balance(share, often)


class BalanceTimesRanks(Engine):
    def balance(self, share: Tensor, often: Tensor) -> Tensor:
        return RANKS * super().balance(share, often)


class RouterLossesTimesAxis(Engine):
    def balance(self, share: Tensor, often: Tensor) -> Tensor:
        return WAYS * super().balance(share, often)

    def z(self, logits: Tensor) -> Tensor:
        return WAYS * super().z(logits)


class CountsOfARank(Engine):
    def over_batch(self, counts: Tensor) -> Tensor:
        return counts


class BalanceHasNoGradient(Engine):
    def balance(self, share: Tensor, often: Tensor) -> Tensor:
        return super().balance(share, often).detach()


class BalanceOfAPackAsOneSequence(Engine):
    def balance(self, share: Tensor, often: Tensor) -> Tensor:
        return len(share) * super().balance(share.flatten(0, 1)[None], often.flatten(0, 1)[None])


# ---- the forward --------------------------------------------------------------------------------------------------


class SharedExpertOnEveryRank(Engine):
    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return super().mixed(x, weights, chosen) + (WAYS - 1) * self.model.shared(x)


class CapacityOfARank(Engine):
    def mixed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        most = len(x) * TOP // EXPERTS
        place = F.one_hot(chosen.flatten(), EXPERTS).cumsum(0).gather(1, chosen.flatten()[:, None]).view_as(chosen)
        return super().mixed(x, weights * (place <= most), chosen)


# ---- the norm -----------------------------------------------------------------------------------------------------


class NormIsAveraged(Engine):
    def norm(self) -> Tensor:
        return self.add((self.squares(False) + self.squares(True)).sqrt(), EXPERT) / WAYS


class NormWithoutExperts(Engine):
    def norm(self) -> Tensor:
        return self.squares(False).sqrt()


class NormOfTheOwnGroup(Engine):
    def norm(self) -> Tensor:
        return (self.squares(False) + self.squares(True)).sqrt()


class ExpertsAreClippedAlone(Engine):
    def clip_by(self, limit: float) -> None:
        norms = {True: self.add(self.squares(True), EXPERT).sqrt(), False: self.squares(False).sqrt()}
        for name, p in self.model.named_parameters():
            p.grad.mul_((limit / norms[name.startswith("experts")]).clamp(max=1.0))  # type: ignore[union-attr]


# ---- values -------------------------------------------------------------------------------------------------------


class ExpertsAreNumberedByRank(Engine):
    """A checkpoint has each rank's experts under the same names, and gives those of one rank to all."""

    def before_step(self, step: int) -> None:
        for p in self.model.experts.parameters() if step else ():
            p.data = gathered(self.comm, p.data[None])[0].clone()


class ExpertsAreReplacedAfterTheOptimizer(Engine):
    """The optimizer updates the experts that the model had before."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name, expert in self.model.experts.items():
            self.model.experts[name] = deepcopy(expert)


# ---- the list -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """An engine, its threads, the tensor that the judge has to name, and a part of what it says.

    Without a phase it is an error with these words.
    """

    engine: type[Engine]
    threads: str
    phase: str
    name: str
    words: str
    step: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


CLIP = 0.05
ROUTER = "2 other parameters are wrong too"
"""The router's bias, its weight and the embedding below it; experts and head are right."""
FAULTS = [
    Fault(ExpertsAreNotDivided, "DeepSpeed #5618, Megatron-LM #5956", "gradient", "experts.3.bias", "2 times what it should be; 7 other parameters are wrong too: the gradient of some parameters: it is divided by the 2 ranks that have it, and not by all 4"),
    Fault(ExpertsAreMixed, "DeepSpeed #3521", "gradient", "experts.2.weight", "it is made of the gradients of experts.0.weight and experts.2.weight"),
    Fault(ReplicasOfExpertsKeepTheirOwn, "Megatron-LM #5916", "gradient", "experts.3.bias", "each rank has a part of the sum, and the parts are not added up over the 2 ranks"),
    Fault(IdleExpertsHaveNoGradient, "NeMo Automodel #2995", "update", "experts.3.weight", "its gradient is None, and the job's is zeros: the optimizer's decay and momentum leave it out", 1),
    Fault(IdleExpertsSendNothing, "DeepSpeed #5066", "", "", "in sum all_reduce over replica (64 x float32)"),
    Fault(WeightsGetTheGradientOfOwnExperts, "transformers #48205", "gradient", "gate.bias", ROUTER),
    Fault(SlotsOfOthersHaveAGradient, "transformers #48687", "gradient", "gate.bias", ROUTER),
    Fault(BalanceTimesMicrobatches, "NeMo Automodel #3359", "gradient", "gate.bias", ROUTER, settings={"microbatches": 2}),
    Fault(BalanceTimesRanks, "transformers #48690", "gradient", "gate.bias", ROUTER),
    Fault(RouterLossesTimesAxis, "Megatron-LM #5047", "gradient", "gate.bias", ROUTER),
    Fault(CountsOfARank, "ltp-megatron-lm #68", "gradient", "gate.bias", "1 other parameter is wrong too", settings={"whole_batch": True}),
    Fault(CountsOfARank, "TransformerEngine #3471", "gradient", "embed.weight", "12 other parameters are wrong too", 1, settings={"rate": 0.05}),
    Fault(BalanceHasNoGradient, "NeMo Automodel #1408", "gradient", "gate.bias", ROUTER),
    Fault(BalanceOfAPackAsOneSequence, "Megatron-LM #5996", "gradient", "gate.bias", ROUTER),
    Fault(SharedExpertOnEveryRank, "sglang #26845", "gradient", "", "14 other parameters are wrong too: the gradient of some parameters is a different computation"),
    Fault(CapacityOfARank, "DeepSpeed #6809", "gradient", "", "12 other parameters are wrong too: the gradient of some parameters is a different computation"),
    Fault(NormIsAveraged, "DeepSpeed #8478", "gradient", "", "it is clipped by the mean of the ranks' norms, each of what that rank has", settings={"clip": CLIP}),
    Fault(NormWithoutExperts, "DeepSpeed #8613", "gradient", "", "the norm that it is clipped by leaves out what some ranks alone have (experts.0.weight and 7 more)", settings={"clip": CLIP}),
    Fault(NormOfTheOwnGroup, "NeMo Automodel #3816, ColossalAI #2192", "gradient", "", "each rank clips by the norm of its own pieces", settings={"clip": CLIP}),
    Fault(ExpertsAreClippedAlone, "Megatron-LM #785", "gradient", "experts.3.bias", "is clipped by a separate norm, not by that of the whole", settings={"clip": CLIP}),
    Fault(ExpertsAreNumberedByRank, "KempnerForge #202, DeepSpeed #6589", "between", "experts.2.weight", "something besides the optimizer writes parameters"),
    Fault(ExpertsAreReplacedAfterTheOptimizer, "DeepSpeed #8354", "", "", "4 of the optimizer's tensors are not parameters of the model"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.threads for fault in FAULTS])
def test_a_published_fault_is_named_and_placed(fault: Fault, tmp_path: Path) -> None:
    check_page(fault.threads, fault.words)
    if not fault.phase:
        with pytest.raises((ValueError, TimeoutError)) as raised:
            judged(fault.engine, tmp_path / "w", deadline=1, **fault.settings)
        assert fault.words in str(raised.value)
        return
    found = judged(fault.engine, tmp_path / "w", **fault.settings)
    assert (found.step, found.phase) == (fault.step, fault.phase) and found.name.startswith(fault.name), found
    assert fault.words in found.text, found


@pytest.mark.parametrize(
    "settings", [{}, {"microbatches": 2}, {"clip": CLIP}, {"whole_batch": True}, {"rate": 0.05}], ids=str
)
def test_the_engine_below_the_faults_is_right(settings: dict[str, Any], tmp_path: Path) -> None:
    found = judged(Engine, tmp_path / "w", **settings)
    assert found.equal and found.residual < 1e-5, found
