"""A context axis in a program's own loop, refusals, messages as predicted; and one changed token, which finds leaks."""

import copy
import shlex
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from context_runs import CONFIG, STEPS, batches, engine_of
from each_rank import each_rank
from torch import Tensor

import plait
from plait.anymodel.context import use_context_axis
from plait.referee.verify.probe_token import ProbedToken, probe_tokens
from plait.run.commands.main import main
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import make_job
from plait.run.models import gpt
from plait.run.models.gpt import GPT, loss_sum, token_count
from plait.tensor.time_axis import TimeAxis, give_time_axis


def test_what_cannot_be_cut_in_time_is_refused() -> None:
    def body(comm: plait.Comm) -> None:
        axis = TimeAxis(comm)
        axis.cut(torch.zeros(1, 8))
        with plait.empty_parameters():
            one = torch.nn.Linear(2, 2)
        with pytest.raises(ValueError, match="must be a multiple of 4"):
            axis.cut_batch({"tokens": torch.zeros(2, 6)})
        with pytest.raises(ValueError, match=r"give \[..., 4, 8\]"):
            axis.attention(*(torch.zeros(1, 1, 4, 2) for _ in range(3)), mask=torch.zeros(4, 4))
        with pytest.raises(ValueError, match="no module of Linear has a 'time_axis'"):
            plait.Engine(one, comm)

    plait.run_threads("shard=2 context=2", body)
    with pytest.raises(ValueError, match="context=2 borrows neighbours of shard=3"):
        plait.Mesh.parse("shard=3 context=2")


@each_rank("shard=2 context=2")
def test_ranks_that_bring_different_samples_are_refused(comm: plait.Comm) -> None:
    engine = engine_of(comm)
    with pytest.raises(ValueError, match="the ranks of a context group bring different batches"):
        engine.step(batches(comm.rank, 0, 1, 1, packed=False))


def own_loop(comm: plait.Comm) -> Any:
    with plait.empty_parameters():
        model = GPT(CONFIG).double()
    engine = engine_of(comm, model, strategy="zero3", optimizer=partial(torch.optim.AdamW, lr=1e-2), clip=0.5)
    for step in range(STEPS):
        (batch,) = batches(step, comm.data_rank, comm.mesh.data_size, 1, packed=True)
        if engine.placed.time_axis is not None:
            batch = engine.placed.time_axis.cut_batch(batch)
        engine.backward(loss_sum(model, batch), token_count(batch), "sum")
        engine.optimizer.step()
    return engine.full_state_dict()


def test_a_programs_own_loop_cuts_its_batch() -> None:
    right = plait.run_threads("shard=1", own_loop)[0]
    for mine in plait.run_threads("shard=4 context=2", own_loop):
        assert all(torch.allclose(mine[name], value, rtol=1e-9, atol=1e-11) for name, value in right.items())


SHORT = {"tokens": torch.zeros(2, 8, dtype=torch.int64), "targets": torch.zeros(2, 8, dtype=torch.int64)}
WRONG: dict[str, tuple[Any, Any, str]] = {
    "a count of samples": (SHORT, lambda b: len(b["tokens"]), "count the targets of the batch, not its samples"),
    "features beside tokens": ({**SHORT, "features": torch.zeros(2, 4)}, token_count, "give tensors of one length"),
    "no time": ({"tokens": torch.zeros(8, dtype=torch.int64)}, len, "no tensor of two dims"),
}


@pytest.mark.parametrize("wrong", WRONG)
@each_rank("shard=2 context=2")
def test_batches_that_would_count_or_be_cut_wrongly_are_refused(comm: plait.Comm, wrong: str) -> None:
    batch, count_fn, why = WRONG[wrong]
    engine = engine_of(comm, count_fn=count_fn)
    for run in (engine.step, engine.evaluate):
        with pytest.raises(ValueError, match=why):
            run([batch])


@dataclass
class Rows:
    tokens: Tensor
    rest: SimpleNamespace


@each_rank("shard=2 context=2")
def test_containers_of_a_batch_are_built_anew(comm: plait.Comm) -> None:
    numbers = torch.arange(8)[None]
    batch = [Rows(numbers, SimpleNamespace(deep=UserDict(more=numbers, weight=torch.ones(1))))]
    (cut,) = TimeAxis(comm).cut_batch(batch)
    wanted = [[0, 1, 6, 7], [2, 3, 4, 5]][comm.rank]
    assert cut.tokens.tolist() == cut.rest.deep["more"].tolist() == [wanted] and len(cut.rest.deep["weight"]) == 1
    assert type(cut.rest.deep) is UserDict and batch[0].tokens.shape == (1, 8)


@each_rank("shard=2 context=2")
def test_dropout_of_a_shape_in_which_time_is_unclear_is_refused(comm: plait.Comm) -> None:
    axis = TimeAxis(comm)
    for shape in ((2, 4, 4, 8), (2, 3), (8, 4, 5), (5, 4)):
        assert axis.steps_of(shape, [4], 2) is None
    clear = [axis.steps_of(shape, [4], 2) for shape in ((2, 4, 8), (8, 5), (2, 4, 3, 5))]
    assert [steps.dim for steps in clear if steps is not None] == [1, 0, 1]


@pytest.mark.parametrize("ring", [False, True])
@each_rank("shard=2 context=2", sanitize=False)
def test_a_gradient_of_gradients_is_refused(comm: plait.Comm, ring: bool) -> None:
    q, k, v = (torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    axis = TimeAxis(comm, ring=ring)
    axis.cut(torch.zeros(1, 8))
    out = axis.attention(q, k, v).sum()
    with pytest.raises(ValueError, match="create_graph=True"):
        torch.autograd.grad(out, k, create_graph=True)


def test_a_ring_without_a_context_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="goes over the context axis"):
        plait.run_threads("shard=1", lambda comm: engine_of(comm, ring_attention=True))


SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}


def test_a_decoder_without_the_axis_computes_as_before() -> None:
    from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=32)
    model: Any = LlamaForCausalLM(config).eval()
    tokens = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0

    def results() -> list[Tensor]:
        with torch.no_grad():
            return [model(tokens).logits, model(tokens, mask).logits, model.generate(tokens, max_new_tokens=4)]

    before = results()
    use_context_axis(use_context_axis(model))
    assert all(torch.equal(a, b) for a, b in zip(before, results(), strict=True))
    LlamaForCausalLM(model.config)(tokens)
    gemma = Gemma2Config(**SIZES, num_attention_heads=6, num_key_value_heads=2, head_dim=4)
    for other in (BertModel(BertConfig(**SIZES, num_attention_heads=6)), Gemma2ForCausalLM(gemma)):
        with pytest.raises(ValueError, match="full, causal attention"):
            use_context_axis(other)


def test_what_a_decoder_would_take_for_the_whole_time_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = use_context_axis(LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=6)))
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    def body(comm: plait.Comm) -> None:
        mine = copy.deepcopy(model)
        give_time_axis([mine], TimeAxis(comm))
        for name, args, kwargs in (
            ("attention_mask", (tokens, torch.ones(1, 4)), {}),
            ("labels", (tokens,), {"labels": tokens}),
            ("position_ids", (), {"input_ids": tokens, "position_ids": tokens}),
        ):
            with pytest.raises(ValueError, match=f"gets '{name}' under context=2"):
                mine(*args, **kwargs)

    plait.run_threads("shard=2 context=2", body)


class Asks(torch.nn.Module):
    """A decoder's layer and positions that forget the axis on request."""

    time_axis: Any = None

    def __init__(self, forgets: str) -> None:
        super().__init__()
        self.forgets, self.tokens, self.places = forgets, torch.nn.Embedding(9, 4), torch.nn.Embedding(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        steps = tokens.shape[1]
        own = self.forgets == "places" or self.time_axis is None
        x = self.tokens(tokens) + self.places(torch.arange(steps) if own else self.time_axis.places(steps))
        heads = x[:, None]
        if self.forgets == "attention" or self.time_axis is None:
            return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]
        return self.time_axis.attention(heads, heads, heads)[:, 0]


@pytest.mark.parametrize("forgets", ["attention", "places", "the batch", ""])
def test_what_a_program_forgets_is_named(forgets: str) -> None:
    def body(comm: plait.Comm) -> None:
        with plait.empty_parameters():
            model = Asks(forgets)
        engine = engine_of(comm, model, loss_fn=lambda m, b: m(b).square().sum(), count_fn=torch.numel)
        batch = torch.arange(8)[None] % 9
        if forgets == "the batch":
            with pytest.raises(ValueError, match="no steps of time, and 8 came"):
                model(batch)
        elif forgets == "attention":
            engine.backward(model(engine.placed.time_axis.cut_batch(batch)).square().sum(), 4)
            for update in (engine.reduce, partial(engine.step, [batch])):
                with pytest.raises(ValueError, match=r"never called time_axis\.attention"):
                    update()
                engine.discard()
        else:
            engine.step([batch])

    warned = pytest.warns(UserWarning, match=r"no module has called time_axis\.places")
    with warned if forgets == "places" else nullcontext():
        plait.run_threads("shard=2 context=2", body, sanitize=False)


@each_rank("pipe=2 shard=2 context=2")
def test_one_stage_that_attends_is_enough(comm: plait.Comm) -> None:
    with pytest.raises(ValueError, match="never called"):
        TimeAxis(comm).check_asked()
    (axis := TimeAxis(comm)).asked = {"attention", "places"} if comm.rank > 1 else set()
    axis.check_asked()


def test_messages_of_a_strangers_model_are_not_compared() -> None:
    batches = [torch.arange(48).view(6, 8) % 9]
    job = plait.UserJob(lambda: Asks(""), lambda m, batch: m(batch).square().sum(), batches, count_fn=torch.numel)
    assert plait.verify(job, "shard=2 context=2", "zero3").word == "equal"


PREDICTED = ["", "--pack", "--recompute full", "--ring-attention", "--ring-attention --recompute full"]
PREDICTED += ["--dtype bf16-mixed", "--dtype bf16-mixed --ring-attention"]
PREDICTED += [
    "--model llama --kv-heads 1",
    "--model llama --dtype fp64 --dropout 0.1 --strategy zero2 --mesh 'shard=6 context=3'",
    "--model llama --dtype fp64 --recompute full --strategy zero1 --mesh 'shard=4 context=4'",
    "--model llama --dtype fp64 --recompute selective --mesh 'shard=2 context=2'",
    "--model llama --dtype fp64 --strategy ddp --mesh 'shard=2 tensor=2 context=2'",
    "--model llama --dtype fp64 --dropout 0.1 --schedule 1f1b --mesh 'pipe=2 shard=2 context=2'",
    "--model llama --dtype fp64 --ring-attention --schedule zbv --mesh 'pipe=2 shard=2 context=2'",
]


@pytest.mark.parametrize("flags", PREDICTED)
def test_messages_are_predicted_byte_for_byte(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mesh", "shard=3 context=3", "--length", "24", "--layers", "2", "--width", "24", "--heads", "2"]
    words += ["--steps", "1", "--batch", "4", "--world", "thread", "--dropout", "0", *shlex.split(flags)]
    assert main(["verify", *words]) == 0
    assert "ledger: every message as predicted, byte for byte" in capsys.readouterr().out


def probed(mesh: str, **flags: Any) -> list[ProbedToken]:
    config = VerifyConfig().with_flags(mesh=mesh, layers=2, width=24, heads=2, length=16, **flags)
    job = make_job(config.task, config.dtypes)
    num = config.layout.microbatches
    return plait.run_threads(mesh, lambda c: probe_tokens(job, c, config.parallelism, num), sanitize=False)[0]


@pytest.mark.parametrize("mesh", ["shard=2", "shard=2 context=2", "pipe=2 shard=2 context=2", "tensor=2"])
def test_a_causal_model_moves_its_own_and_later_steps(mesh: str) -> None:
    for one in probed(mesh, microbatches=2):
        assert [at[2] for at in one.moved] == list(range(one.token[2], 16))
        assert not one.leaks and "and nothing else" in str(one)


@pytest.mark.parametrize("capacity", [None, 0.8])
def test_a_router_that_moves_roundings_does_not_leak(capacity: float | None) -> None:
    sizes: dict[str, Any] = {"model": "moe", "experts": 4, "capacity": capacity, "batch": 8, "dtype": "fp64"}
    assert all(one.right for one in probed("shard=2 context=2 expert=2", **sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 3 to 11 bytes, several in a row of 16."""
    root: Path = tmp_path_factory.mktemp("documents")
    for i in range(60):
        (root / f"{i:02}.txt").write_bytes(bytes(97 + (i * i + j * (i + 3)) % 26 for j in range(3 + i % 9)))
    return str(root)


def test_documents_stay_apart(folder: str) -> None:
    ends = [one.moved[-1][2] for one in probed("shard=2 context=2", pack=True, data=folder) if not one.leaks]
    assert len(ends) == 3 and ends[0] < 15


def everything(*_: Any, length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool)


def all_samples(documents: Tensor) -> Tensor:
    return torch.ones(*documents.shape, documents.shape[1], dtype=torch.bool)[:, None].tril()


FAULTS: dict[str, tuple[str, Callable[..., Any], dict[str, Any], str]] = {
    "documents see each other": ("attention_mask", all_samples, {"pack": True}, "another document"),
    "the future is seen": ("attention_mask", partial(everything, length=16), {"pack": True}, "an earlier step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_leak_is_named(monkeypatch: pytest.MonkeyPatch, folder: str, fault: str) -> None:
    name, wrong, flags, why = FAULTS[fault]
    monkeypatch.setattr(gpt, name, wrong)
    assert any(why in str(one) and "LEAKS" in str(one) for one in probed("shard=2", data=folder, **flags))


def test_blocks_in_a_wrong_order_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeAxis, "ordered", lambda self, by_rank, dim: by_rank)
    assert any("an earlier step" in str(one) for one in probed("shard=2 context=2"))
