"""An expert axis trains as one process does: rows, pipelines, context and tensor axes, uneven tokens and experts."""

import copy
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from context_runs import engine_of
from torch import Tensor, nn

import plait
from plait.anymodel import plan_of
from plait.anymodel.experts import use_expert_axis
from plait.referee.sanitize.drift import DriftCheck, DriftError
from plait.run.commands.main import main
from plait.run.models.hf import BUILDING
from plait.run.models.moe import MoE, MoEConfig, loss_sum
from plait.tensor import cross_entropy_sum
from plait.tensor.expert_axis import ExpertAxis, run_experts

CONFIG = MoEConfig(
    vocabulary=37, num_layers=2, width=16, num_heads=4, num_kv_heads=2, hidden=12, max_length=24, dropout=0.1,
    num_experts=8, num_chosen=3, balance_weight=0.3, z_weight=0.1,
)  # fmt: skip
STEPS, LENGTH = 3, 12
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


def batch(step: int, number: int, *, ragged: bool) -> dict[str, Tensor]:
    """Microbatch ``number`` of a step; ragged ones have 1 to 3 samples, of different lengths."""
    numbers = torch.Generator().manual_seed(100 * step + number)
    shape = (1 + number % 3, LENGTH - 4 * (number % 2)) if ragged else (2, LENGTH)
    tokens = torch.randint(CONFIG.vocabulary, (shape[0], shape[1] + 1), generator=numbers)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=numbers) < 0.3] = -100
    return {"tokens": tokens[:, :-1].clone(), "targets": targets}


def train(
    comm: plait.Comm, microbatches: int = 2, ragged: bool = False, sizes: dict[str, Any] | None = None, **settings: Any
) -> Any:
    with plait.empty_parameters():
        model = MoE(MoEConfig(**{**vars(CONFIG), **(sizes or {})})).double()
    engine = engine_of(comm, model, optimizer=SGD, loss_fn=loss_sum, clip=2.0, seed=3, **settings)
    losses = []
    for step in range(STEPS):
        first = comm.data_rank * microbatches
        mine = [batch(step, first + m, ragged=ragged) for m in range(microbatches)]
        result = engine.step(mine)
        losses += [result.loss, result.grad_norm]
    losses.append(engine.evaluate(mine).loss)
    return losses, engine.full_state_dict()


TIGHT: dict[str, Any] = {"sizes": {"capacity": 0.8, "dropout": 0.0}}
UNEVEN: dict[str, Any] = {"sizes": {"num_experts": 7, "num_chosen": 1, "shared": False}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("shard=2 expert=2", {"strategy": "ddp"}),
    "ddp, two copies": ("shard=4 expert=2", {"strategy": "ddp"}),
    "zero1": ("shard=4 expert=2", {"strategy": "zero1"}),
    "zero1, whole tensors": ("shard=4 expert=2", {"strategy": "zero1", "cut": "tensor"}),
    "zero2": ("shard=4 expert=4", {"strategy": "zero2"}),
    "zero3": ("shard=4 expert=2", {"strategy": "zero3"}),
    "zero3_keep": ("shard=4 expert=2", {"strategy": "zero3_keep"}),
    "hsdp": ("replica=2 shard=2 expert=2", {"strategy": "hsdp"}),
    "psdp": ("replica=2 shard=4 expert=2", {"strategy": "psdp", "microbatches": 1}),
    "hpz": ("replica=2 shard=4 expert=2", {"strategy": "hpz", "microbatches": 1}),
    "hosts": ("replica=2 shard=4 expert=2 hosts=2", {"strategy": "zero3", "microbatches": 1}),
    "uneven tokens": ("shard=4 expert=2", {"strategy": "zero3", "ragged": True}),
    "uneven tokens to their experts": ("shard=4 expert=4", {"strategy": "zero3", "ragged": True, "all_to_all": True}),
    "uneven experts, all_to_all": ("shard=4 expert=4", {"strategy": "zero2", "all_to_all": True, **UNEVEN}),
    "all_to_all": ("shard=4 expert=2", {"strategy": "zero3", "all_to_all": True}),
    "recomputed": ("shard=2 expert=2", {"strategy": "zero3", "recompute": "full"}),
    "recomputed, all_to_all": ("shard=2 expert=2", {"recompute": "full", "all_to_all": True}),
    "1f1b": ("pipe=2 shard=2 expert=2", {"strategy": "zero3", "schedule": "1f1b"}),
    "zero bubble": ("pipe=2 shard=2 expert=2", {"schedule": "zb_h1", "all_to_all": True}),
    "tensor alone": ("tensor=2", {"strategy": "ddp"}),
    "tensor of 4": ("shard=2 tensor=2 expert=2", {"strategy": "zero3"}),
    "tensor, all_to_all": ("shard=2 tensor=2 expert=2", {"strategy": "hsdp", "all_to_all": True}),
    "sequence": ("shard=2 tensor=2 expert=2", {"strategy": "zero3", "sequence_parallel": True}),
    "sequence, all_to_all": ("shard=2 tensor=2 expert=2", {"sequence_parallel": True, "all_to_all": True}),
    "context": ("shard=2 context=2 expert=2", {"strategy": "zero3"}),
    "context beside": ("shard=4 context=2 expert=4", {"strategy": "zero2", "all_to_all": True}),
    "capacity": ("shard=4 expert=2", {"strategy": "zero3", **TIGHT}),
    "capacity of 3, uneven": ("shard=3 expert=3", {"strategy": "zero1", "ragged": True, "all_to_all": True, **TIGHT}),
    "capacity, sequence": ("shard=2 tensor=2 expert=2", {"sequence_parallel": True, "ragged": True, **TIGHT}),
    "capacity, context": ("shard=3 context=3 expert=3", {"recompute": "full", **TIGHT}),
    "capacity, both": ("shard=2 context=2 tensor=2 expert=2", {"sequence_parallel": True, **TIGHT}),
    "all of them": ("pipe=2 shard=2 tensor=2 context=2 expert=2", {"strategy": "zero3", "sizes": {"dropout": 0.0}}),
}


@cache
def alone(parts: int, ragged: bool, sizes: str) -> Any:
    return plait.run_threads("shard=1", lambda c: train(c, parts, ragged, json.loads(sizes)), sanitize=False)[0]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_run_of_one_process(case: str) -> None:
    mesh, settings = CASES[case]
    parts = plait.Mesh.parse(mesh).data_size * settings.get("microbatches", 2)
    right, state = alone(parts, settings.get("ragged", False), json.dumps(settings.get("sizes", {})))
    for numbers, mine in plait.run_threads(mesh, lambda c: train(c, **settings), sanitize=False):
        assert numbers == pytest.approx(right, rel=1e-12)
        assert all(torch.allclose(mine[name], value, rtol=1e-11, atol=1e-12) for name, value in state.items())


def test_the_two_ways_of_tokens_give_the_same_bits() -> None:
    sizes = {"num_chosen": 2}  # the sum of two is the same in any order

    def body(comm: plait.Comm, **settings: Any) -> Any:
        return train(comm, sizes=sizes, strategy="ddp", **settings)

    one, other = (
        plait.run_threads("shard=2 expert=2", lambda c, way=way: body(c, all_to_all=way), sanitize=False)[0]
        for way in (False, True)
    )
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], value) for name, value in other[1].items())


class Plain(nn.Module):
    """A user's experts, without a pipeline or a loss of the router."""

    expert_axis: ExpertAxis | None = None

    def __init__(self, num: int = 4, rows: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num, 2, 2))
        self.bias = nn.Parameter(torch.zeros(rows if rows != 3 else num, 2))

    def forward(self, x: Tensor) -> Tensor:
        number = torch.arange(len(x))[:, None] % 4
        one = torch.ones(number.shape)
        if self.expert_axis is None:
            return run_experts(self.run, x, number, one, 0, 4)
        return self.expert_axis.experts(self.run, 4, x, number, one)

    def run(self, x: Tensor, number: Tensor) -> Tensor:
        return torch.einsum("rij,rj->ri", self.weight[number], x) + self.bias[number]


class Buffered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))


SHARED = Plain()
REFUSED = {
    "a buffer": (Buffered(), 2, "scale' is a buffer as long as the experts"),
    "two places": (nn.Sequential(SHARED, nn.Sequential(SHARED)), 2, "belong to one module, and these are"),
    "no experts": (nn.Linear(2, 2), 2, "no module of Linear that owns parameters has an 'expert_axis'"),
    "too few": (Plain(), 8, r"4 experts, which leave a rank of 8 \(mesh 'shard=8 expert=8'\) none"),
    "other sizes": (Plain(rows=5), 2, r"each of its parameters is \[experts, ...\], and it has"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused(case: str) -> None:
    model, ranks, says = REFUSED[case]

    def body(comm: plait.Comm) -> None:
        with pytest.raises(ValueError, match=says):
            plait.Engine(copy.deepcopy(model), comm)

    plait.run_threads(f"shard={ranks} expert={ranks}", body)


def test_settings_without_the_axis_are_refused() -> None:
    with pytest.raises(ValueError, match="expert=2 borrows neighbours of shard=3"):
        plait.Mesh.parse("shard=3 expert=2")
    with pytest.raises(ValueError, match="all_to_all goes over the expert axis, and mesh 'shard=2' has none"):
        plait.run_threads("shard=2", lambda c: train(c, all_to_all=True))


def test_ranks_with_the_same_experts_are_compared() -> None:
    def body(comm: plait.Comm) -> None:
        comm.engine_watchers += (lambda engine: DriftCheck(engine, 1),)
        with plait.empty_parameters():
            model = MoE(CONFIG).double()
        engine = engine_of(comm, model, strategy="ddp", loss_fn=loss_sum)
        engine.step([batch(0, comm.rank, ragged=False)])
        if comm.rank == 1:
            next(o for o in engine.placed.owned if o.name == "blocks.0.mlp.experts.down").view.data[0] += 1e-9
        engine.step([batch(1, comm.rank, ragged=False)])

    with pytest.raises(DriftError, match=r"parameter 'blocks.0.mlp.experts.down' .*of expert rank 1.* rank 1 .*rank 3"):
        plait.run_threads("shard=4 expert=2", body)


class Forgetful(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, torch.zeros(len(x), dtype=torch.int64))


class Miscounting(Plain):
    def forward(self, x: Tensor) -> Tensor:
        number, axis = torch.zeros(len(x), 1, dtype=torch.int64), self.expert_axis
        return run_experts(self.run, x, number, x[:, :1], 0, 4) if axis is None else axis.experts(
            self.run, len(self.weight), x, number, x[:, :1]
        )  # fmt: skip


class Flat(Plain):
    def forward(self, x: Tensor) -> Tensor:
        assert self.expert_axis is not None
        number = torch.zeros(len(x), dtype=torch.int64)
        return self.expert_axis.experts(self.run, 4, x, number, x[:, 0])


class Dropping(Plain):
    def run(self, x: Tensor, number: Tensor) -> Tensor:
        return F.dropout(super().run(x, number), 0.5)


class InAList(nn.Module):
    """Experts that are modules, beside some that are not."""

    expert_axis: ExpertAxis | None = None

    def __init__(self) -> None:
        super().__init__()
        self.each, self.right = nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), Plain()

    def forward(self, x: Tensor) -> Tensor:
        assert self.expert_axis is not None
        number = torch.zeros(len(x), 1, dtype=torch.int64)
        return self.right(self.expert_axis.experts(lambda x, number: self.each[0](x), 4, x, number, x[:, :1]))


MISUSES = {
    Forgetful: "Forgetful has some experts of 2 ranks here and returned without",
    Miscounting: "called for 2 experts, 1 on this rank, and the module that calls it has 2 of them here",
    Flat: r"tokens of \[3, 2\] for experts \[3\] with weights \[3\]: give \[tokens, width\], and twice",
    Dropping: "'0' draws dropout inside experts",
    InAList: "the module that calls it owns no parameter",
}


@pytest.mark.parametrize("kind", MISUSES)
def test_experts_that_use_the_axis_wrongly_are_refused(kind: type[nn.Module]) -> None:
    models = [nn.Sequential(kind())]
    models += copy.deepcopy(models)

    def body(comm: plait.Comm) -> None:
        engine = engine_of(comm, models[comm.rank], loss_fn=lambda m, x: m(x).sum(), count_fn=len)
        with pytest.raises(ValueError, match=MISUSES[kind]):
            engine.step([torch.ones(3, 2)])

    plait.run_threads("shard=2 expert=2", body)


class Sparse(Plain):
    """Some experts get no token; each looks only at the rows that it has, and divides by their length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.data.copy_(torch.arange(16.0).view(4, 2, 2) / 8 + 0.1)
        self.before = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        number = torch.full((len(x), 1), 2) if len(x) % 2 else torch.full((len(x), 1), -1)
        one = x.norm(dim=-1, keepdim=True)
        if self.expert_axis is None:
            return run_experts(self.run, x, number, one, 0, 4)
        return self.expert_axis.experts(self.run, 4, x, number, one)

    def run(self, x: Tensor, number: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in number.unique():
            rows = x[number == expert]
            out[number == expert] = (rows / rows.norm(dim=-1, keepdim=True)) @ self.weight[expert] * self.before[expert]
        return out


@pytest.mark.parametrize("all_to_all", [False, True])
def test_ranks_whose_experts_get_nothing_take_part(all_to_all: bool) -> None:
    models = [nn.Sequential(nn.Linear(2, 2), Sparse(), nn.Linear(2, 2)).double()]
    models += [copy.deepcopy(models[0]) for _ in range(4)]

    def body(comm: plait.Comm, parts: int, **settings: Any) -> Any:
        model, how = copy.deepcopy(models[4 if parts > 1 else comm.rank]), {"count_fn": len, **settings}
        engine = engine_of(comm, model, loss_fn=lambda m, x: m(x).square().sum(), **how)
        first = comm.rank * parts
        return engine.step([torch.ones(1 + first + k, 2).double() for k in range(parts)]).loss, engine.full_state_dict()

    loss, state = plait.run_threads("shard=1", lambda c: body(c, 4))[0]
    for found, mine in plait.run_threads("shard=4 expert=4", lambda c: body(c, 1, all_to_all=all_to_all)):
        assert found == pytest.approx(loss, rel=1e-12)
        assert all(torch.allclose(mine[name], value, rtol=1e-11) for name, value in state.items())


MOE = "--model=moe --layers=1 --width=16 --ffn=12 --experts=4 --length=12 --batch=8 --capacity=1 --world=thread"


@pytest.mark.parametrize("mesh", ["shard=4 expert=2", "replica=2 shard=2 expert=2", "shard=2 tensor=2 expert=2"])
def test_a_training_holds_and_sends_the_bytes_that_were_predicted(
    mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *MOE.split(), "--mesh", mesh, "--strategy", "hsdp", "--steps", "2", "--check-drift", "1"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if "held: " in line or "sent per step" in line]
    assert rows and all("to the byte" in row for row in rows), printed


@pytest.mark.parametrize("more", ["--recompute full", "--all-to-all", "--sequence-parallel", "--dtype bf16-mixed"])
def test_verify_proves_a_layout_with_experts(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = "shard=2 tensor=2 expert=2" if "sequence" in more else "shard=4 expert=2"
    dtype = [] if "dtype" in more else ["--dtype", "fp64"]
    assert main(["verify", *MOE.split(), "--mesh", mesh, "--strategy", "zero3", *dtype, *more.split()]) == 0
    printed = capsys.readouterr().out
    assert "ledger: every message as predicted, byte for byte" in printed and "verdict: equal" in printed


# ---- models of transformers --------------------------------------------------------------------------------------

FEW: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FEW |= {"num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 32, "attention_dropout": 0.0}
STOCK: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 1,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1, all_to_all": ("shard=4 expert=2", {"strategy": "zero1", "all_to_all": True}),
    "tensor": ("shard=2 tensor=2 expert=2", {"strategy": "ddp"}),
    "sequence": ("shard=2 tensor=2 expert=2", {"strategy": "zero3", "sequence_parallel": True}),
}


def train_stock(comm: plait.Comm, kind: str, microbatches: int, **settings: Any) -> Any:
    import transformers

    with BUILDING, plait.empty_parameters():
        config = getattr(transformers, f"{kind}Config")(**FEW, **STOCK[kind])
        config._experts_implementation = "eager"  # others have no fp64
        model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    use_expert_axis(model)
    sequence = settings.get("sequence_parallel", False)
    plan = {"tensor_plan": plan_of(model, sequence=sequence)} if comm.mesh.tensor > 1 else {}
    engine = engine_of(
        comm, model, optimizer=partial(SGD, momentum=0.0), loss_fn=stock_loss, clip=2.0, **settings, **plan
    )
    for step in range(2):
        first = comm.data_rank * microbatches
        result = engine.step([batch(step, first + m, ragged=False) for m in range(microbatches)])
    return [result.loss, result.grad_norm], engine.full_state_dict()


def stock_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return cross_entropy_sum(logits, batch["targets"], -100)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", STOCK)
def test_a_model_of_transformers_is_the_run_of_one_process(kind: str, layout: str) -> None:
    pytest.importorskip("transformers")
    mesh, settings = LAYOUTS[layout]
    parts = plait.Mesh.parse(mesh).data_size
    right, state = plait.run_threads("shard=1", lambda c: train_stock(c, kind, parts), sanitize=False)[0]
    for numbers, mine in plait.run_threads(mesh, lambda c: train_stock(c, kind, 1, **settings), sanitize=False):
        assert numbers == pytest.approx(right, rel=1e-12)
        assert all(torch.allclose(mine[name], value, rtol=1e-11, atol=1e-12) for name, value in state.items())
