"""Dropout belongs to the samples: no cut of the batch or of an activation changes a mask, no global generator moves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from engine_cases import Made, batches, distinct, sgd, train
from pipeline_cases import engine_on, step
from tensor_models import WIDTH, Model, alone, model, same_run, token_batches
from torch import Tensor, nn

import plait
from plait.comm import Comm, run
from plait.forward.context import CurrentForward, RNGPosition
from plait.forward.dropout import DropoutRNG
from plait.forward.masks import Slice, keep_mask, stream_bits
from plait.step import Engine
from plait.table.mesh import Mesh


def lift(x_BC: Tensor) -> Tensor:
    """A sequence of 4 out of a sample."""
    return torch.stack([x_BC.roll(k, 1) for k in range(4)], 1)


def around(middle: nn.Module) -> nn.Module:
    """A linear before and after ``middle``."""
    run = lambda m, x_BC: m.last(m.middle(m.first(lift(x_BC)))).flatten(1)  # noqa: E731
    return distinct(Made(run, first=nn.Linear(WIDTH, 8), middle=middle, last=nn.Linear(8, 3)))


def calling(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Made(lambda m, x: function(x))


def self_attention() -> nn.Module:
    attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    return Made(lambda m, x: m.attention(x, x, x, need_weights=False)[0], attention=attention)


def heads(x_BTC: Tensor) -> Tensor:
    return x_BTC.unflatten(2, (2, 4)).transpose(1, 2)


def attention(x_BTC: Tensor) -> Tensor:
    h = heads(x_BTC)
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.4, is_causal=True).transpose(1, 2).flatten(2)


SERVED: dict[str, Callable[[], nn.Module]] = {
    "nn.Dropout": lambda: nn.Dropout(0.4),
    "F.dropout": lambda: calling(lambda x: F.dropout(x, 0.4)),
    "by keywords": lambda: calling(lambda x: torch.dropout(input=F.dropout(input=x, p=0.3), p=0.3, train=True)),
    "torch.dropout": lambda: calling(lambda x: torch.dropout(x, 0.4, train=True)),
    "in place": lambda: calling(lambda x: F.dropout(x.clone(), 0.4, inplace=True)),
    "twice": lambda: calling(lambda x: F.dropout(F.dropout(x, 0.3), 0.3)),
    "nn.Dropout1d": lambda: nn.Dropout1d(0.4),
    "nn.Dropout2d": lambda: calling(lambda x: nn.Dropout2d(0.4)(x[..., None])[..., 0]),
    "attention kernel": lambda: calling(attention),
    "nn.MultiheadAttention": self_attention,
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True),
    "called twice": lambda: nn.Sequential(*([nn.Dropout(0.3)] * 2)),
}


@pytest.mark.parametrize("kind", SERVED)
def test_masks_do_not_depend_on_the_cut(kind: str) -> None:
    """13 samples on 1, 2, 3 ranks and in 1 and 5 microbatches: one and the same run."""
    template = around(SERVED[kind]())
    whole = train(template, "shard=1", "ddp", batches(), optimizer=sgd)[0]
    for mesh, row, microbatches in (("shard=2", "zero3", 5), ("replica=3", "hpz", 1)):
        for record in train(template, mesh, row, batches(), optimizer=sgd, microbatches=microbatches):
            assert cases.close(torch.tensor(record.losses), torch.tensor(whole.losses)), (mesh, row)
            assert all(cases.close(record.state[name], value) for name, value in whole.state.items()), (mesh, row)


@pytest.mark.parametrize("kind", SERVED)
def test_something_is_dropped_and_anew_in_every_step_and_for_every_seed(kind: str) -> None:
    template, batch = around(SERVED[kind]()), batches(1)[0]

    def still(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    runs = [train(template, "shard=1", "ddp", [batch, batch], optimizer=still, seed=seed)[0] for seed in (0, 0, 1)]
    assert runs[0].losses == runs[1].losses, "the same seed, the same run"
    assert len({*runs[0].losses, *runs[2].losses}) == 4, "two steps and two seeds, four masks"


def test_how_many_elements_are_dropped() -> None:
    for p, error in ((0.0, 0.0), (0.1, 0.003), (0.5, 0.003), (0.9, 0.003), (1.0, 0.0)):
        share = keep_mask([1, 2, 3], 200_000, p, torch.device("cpu")).double().mean().item()
        assert abs(share - (1 - p)) <= error


@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_no_global_generator_is_touched(row: str) -> None:
    template = around(nn.Sequential(nn.Dropout(0.4), self_attention()))
    before = torch.get_rng_state()
    train(template, "replica=2 shard=2", row, batches(), microbatches=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_training_forward_without_gradient_touches_none_either() -> None:
    model = around(nn.Dropout(0.4))

    def body(comm: object) -> None:
        Engine(model, comm, strategy="ddp", optimizer=sgd(model.parameters()))
        with torch.no_grad():
            model(batches(1)[0]["x"])

    before = torch.get_rng_state()
    run(Mesh(), body)
    assert torch.equal(torch.get_rng_state(), before)


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "randperm": lambda x: x[:, torch.randperm(4)],
    "randint": lambda x: x * torch.randint(2, x.shape),
    "normal": lambda x: x + torch.normal(0.0, 1.0, tuple(x.shape), dtype=x.dtype),
    "multinomial": lambda x: x * torch.multinomial(torch.ones(4), 1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "kaiming_uniform_": lambda x: x + nn.init.kaiming_uniform_(torch.empty(8, 8, dtype=x.dtype)).sum(),
    "fractional_max_pool2d_with_indices": lambda x: x + F.fractional_max_pool2d(x, 2, 2, return_indices=True)[0].sum(),
}


@pytest.mark.parametrize("row", ["ddp", "zero3"])
@pytest.mark.parametrize("operator", RANDOM)
def test_a_random_operator_that_no_stream_serves_is_refused(operator: str, row: str) -> None:
    """It would depend on the cut; the message names the module and the operator."""
    template = around(calling(RANDOM[operator]))
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"(?s)'middle'.*{operator.rstrip('_')}"):
        train(template, "shard=2", row, batches(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_of_the_users_own_is_the_users_business() -> None:
    def noisy(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return x + torch.randn(8, generator=generator, dtype=x.dtype)

    template = around(calling(noisy))
    cases.agree(train(template, "shard=2", "zero3", batches()), cases.plain(template, batches()))


STACKS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(8, 4, 3, batch_first=True, bidirectional=True),
    "gru": lambda: nn.GRU(8, 8, 3, batch_first=True),
    "rnn": lambda: nn.RNN(8, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_run_and_are_refused_with_dropout_between_them(kind: str, packed: bool) -> None:
    def run(module: Any, x: Tensor) -> Tensor:
        if packed:
            rows = nn.utils.rnn.pack_padded_sequence(x, [4] * len(x), batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(module.layers(rows)[0], batch_first=True)[0]
        return module.layers(x)[0]

    template = around(Made(run, layers=STACKS[kind]()))
    cases.agree(train(template, "shard=3", "zero3", batches()), cases.plain(template, batches()))
    if template.middle.layers.num_layers > 1:
        template.middle.layers.dropout = 0.4
        with pytest.raises(ValueError, match=f"'middle.layers' calls the random operator '{kind}'"):
            train(template, "shard=2", "zero3", batches(1))


class DropsNothing(DropoutRNG):
    def dropout(self, input: Tensor, *settings: Any) -> Tensor:
        return input


@pytest.mark.parametrize("kind", ["hidden", "far below", "causal", "grouped", "scale", "negative scale", "fp16"])
def test_attention_that_is_written_out_is_torchs(kind: str) -> None:
    """Also where a query may attend to nothing, and where a product would overflow before it is scaled."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    settings: dict[str, Any] = {}
    mask = torch.rand(2, 1, 5, 5, generator=generator) < 0.6
    mask[0, :, 2], mask[1, :, 0] = False, False
    if kind == "hidden":
        settings["attn_mask"] = mask
    elif kind == "far below":
        settings["attn_mask"] = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    elif kind == "causal":
        settings["is_causal"] = True
    elif kind == "grouped":
        k, v, settings["enable_gqa"] = k[:, :2], v[:, :2], True
    elif "scale" in kind:
        settings["scale"] = -0.3 if "negative" in kind else 0.3
    else:
        # no weight is 0 or 1 to the last digit: a kernel's gradient there is the rounding of two equal numbers
        q, k, v, settings["scale"] = (120 * q).half(), (120 * k).half(), v.half(), 2e-5
        assert (q.double() @ k.double().mT).abs().max() > torch.finfo(torch.half).max
    results = []
    for attend in (F.scaled_dot_product_attention, partial(DropsNothing(0, CurrentForward()).attention, dropout_p=0.5)):
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        out = attend(*leaves, **settings)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert theirs.isfinite().all()
        close = (
            10 * torch.finfo(torch.half).eps * theirs.abs().max() if kind == "fp16" else 1e-10 * theirs.abs() + 1e-12
        )
        assert ((ours - theirs).abs() <= close).all()


CPU = torch.device("cpu")


def _sum(net: nn.Module, tokens: Tensor) -> Any:
    return net(tokens).square().sum()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_indices_of_a_slice_are_those_within_the_whole(dim: int) -> None:
    whole = torch.arange(5 * 7 * 3).view(5, 7, 3)
    size = whole.size(dim)
    for start in range(size):
        for stop in range(start, size + 1):
            local = whole.narrow(dim, start, stop - start)
            place = Slice(dim, start, size).indices(local.shape)
            assert torch.equal(place(torch.arange(local.numel())), local.reshape(-1))


@pytest.mark.parametrize(("keys", "numel"), [([7, 2**63, 2**64 - 1], 35), ([5, 2**40], 66_000), ([], 5), ([9], 0)])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 1.0])
@pytest.mark.parametrize("place", [None, lambda index: index * 3 + 2**31])
def test_numpy_makes_the_masks_of_torch(keys: list[int], numel: int, p: float, place: Any) -> None:
    expected = stream_bits(keys, numel, CPU, place) >= int(p * 2**32)
    assert torch.equal(keep_mask(keys, numel, p, CPU, place), expected)


@each_rank("tensor=2")
def test_flattened_tokens_under_sequence_parallelism_are_refused(comm: Comm) -> None:
    engine = Engine(model(), comm, strategy="ddp", sequence_parallel=True, loss_fn=_sum, count_fn=len)
    stage = engine.placed.stages[0]
    dropout = stage.interceptor.handlers[-1]
    assert isinstance(dropout, DropoutRNG) and dropout.slice_of is not None
    stage.current.replace(length=7, position=RNGPosition(0, 0, 0, 2, (7,)))
    start, stop = stage.axis.part(7)
    assert dropout.slice_of("blocks.0.dropout", (2, stop - start, WIDTH)) == Slice(1, start, 7)
    with pytest.raises(ValueError, match="draw before dims are flattened"):
        dropout.slice_of("blocks.0.dropout", (2 * (stop - start), WIDTH))


PLAN = {"pair.up": "column", "pair.down": "row"}


def net(hidden: int = 6, between: Any = nn.Identity(), after: Any = nn.Identity()) -> nn.Module:  # noqa: B008
    """A linear, then up, ``between``, down, ``after``, then a linear."""
    ends = {"up": nn.Linear(WIDTH, hidden), "down": nn.Linear(hidden, WIDTH)}
    pair = Made(lambda m, x: m.after(m.down(m.between(torch.tanh(m.up(x))))), **ends, between=between, after=after)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    return distinct(Made(lambda m, x: m.last(m.pair(m.first(x))), first=first, pair=pair, last=last))


def drop(x: Tensor) -> Tensor:
    """On the stream, in the module that holds the columns."""
    return F.dropout(x, 0.4)


def equal(template: nn.Module, ways: int = 2, **more: str) -> None:
    data = batches()
    ranks = train(template, f"tensor={ways}", "ddp", data, sgd, tensor_plan={**PLAN, **more})
    same_run(ranks, alone(template, data))


@pytest.mark.parametrize("site", ["pair.between", "pair.between.0", "pair.between.0.0"])
def test_dropout_between_a_column_and_a_row_that_the_plan_does_not_name_is_refused(site: str) -> None:
    inside: nn.Module = nn.Dropout(0.4)
    for _ in range(site.count(".") - 1):
        inside = nn.Sequential(inside)
    with pytest.raises(ValueError, match=f"module '{site}' draws dropout between cut products"):
        equal(net(between=inside))
    equal(net(between=inside), **{site: "hidden"})


@pytest.mark.parametrize("hidden", [2 * WIDTH, 3 * WIDTH, 7])
def test_dropout_after_the_row_is_on_the_whole_stream(hidden: int) -> None:
    """Where a rank's part of the hidden features is as wide as the stream, it must not be taken for it."""
    equal(net(hidden, after=nn.Dropout(0.4)), 2)
    equal(net(hidden, after=drop), 2)
    equal(net(hidden, after=drop), 3)


def test_a_style_that_does_not_fit_the_activation_is_refused() -> None:
    doubled = Made(lambda m, x: m.drop(torch.cat((x, x), -1))[..., : x.size(-1)], drop=nn.Dropout(0.4))
    with pytest.raises(ValueError, match="whose last dim is no part of the 6 features"):
        equal(net(between=doubled), **{"pair.between.drop": "hidden"})


@pytest.mark.parametrize("missing", ["dropout", "blocks.*.dropout"])
def test_a_stream_cut_in_time_never_gets_another_mask(missing: str) -> None:
    """Dropout on it that the plan does not name is refused, or served all the same."""
    plan = {name: style for name, style in Model().tensor_plan().items() if name != missing}
    data = token_batches()
    same_run(train(model(), "tensor=2", "ddp", data, sgd, tensor_plan=plan), alone(model(), data))
    try:
        ranks = train(model(), "tensor=2", "ddp", data, sgd, tensor_plan=plan, sequence_parallel=True)
    except ValueError as refused:
        assert "draws dropout" in str(refused) and "sequence" in str(refused)
    else:
        same_run(ranks, alone(model(), data))


@pytest.mark.parametrize("mesh", ["shard=2", "tensor=2"])
@pytest.mark.parametrize("by", ["hook", "forward"])
def test_dropout_that_a_user_adds_to_a_layer_has_one_site_on_every_mesh(by: str, mesh: str) -> None:
    """Layers that draw nothing are not followed unless asked for; these do draw."""

    def added(layer: nn.Linear) -> None:
        own = layer.forward
        if by == "hook":
            layer.register_forward_hook(lambda module, args, out: F.dropout(out, 0.4, module.training))
        else:
            layer.forward = lambda x: F.dropout(own(x), 0.4, layer.training)

    def built() -> nn.Module:
        net = model(0.0)
        for mlp in (block.mlp for block in net.blocks):
            added(mlp.down)
        return net

    data = token_batches()

    def losses(mesh: str) -> list[float]:
        def body(comm: Comm) -> list[float]:
            engine = engine_on(built(), comm, optimizer=sgd)
            return [step(engine, batch, 1).loss for batch in data]

        return plait.run_threads(mesh, body)[0]

    assert losses(mesh) == pytest.approx(losses("shard=1"), rel=1e-12)
    dry = model(0.0)
    assert losses("shard=1") != pytest.approx(alone(dry, data).losses, rel=1e-3)
