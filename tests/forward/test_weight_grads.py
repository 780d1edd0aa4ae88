"""A backward in two parts equals a plain one to the bit, in any order; what it keeps, and when hooks fire."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_cases import Made
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from weight_grads_cases import ORDER, Deferring, assert_equal, draws, plain, split

from plait.comm import Comm, run
from plait.run.models.gpt import Block, GPTConfig
from plait.run.models.mlp import MLP, MLPConfig
from plait.step import Engine
from plait.table.mesh import Mesh


def transposed(m: Any, x: Tensor) -> Tensor:
    """Reads its weight as ``weight.t()``, a slice of it, and its bias in an element-wise product."""
    return torch.cat([x @ m.weight * m.bias, x @ m.weight.t().t()[:, :2]], -1).relu_()


def mixing(m: Any, x: Tensor) -> Tensor:
    """Multi-head attention of a learned query over the input, through self-attention."""
    x = m.own(x, x, x)[0]
    x = m.cross(m.query.expand(len(x), -1, -1), x, x)[0]
    return m.head(x) + F.linear(m.query, m.head.weight)


def attention() -> nn.Module:
    own = nn.MultiheadAttention(6, 2, batch_first=True)
    cross = nn.MultiheadAttention(6, 3, batch_first=True, kdim=6, vdim=6)
    return Made(mixing, own=own, cross=cross, query=nn.Parameter(torch.randn(1, 3, 6)), head=nn.Linear(6, 4))


def frozen() -> nn.Module:
    """A frozen layer between two that train, one bias frozen, one layer that never runs, and a buffer."""
    run = lambda m, x: m.last(m.middle(m.first(F.linear(x, m.constant))).relu())  # noqa: E731
    middle, last = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)
    last.bias.requires_grad_(False)
    constant = nn.Buffer(torch.randn(5, 5))
    return Made(run, first=nn.Linear(5, 6), middle=middle, last=last, unused=nn.Linear(3, 3), constant=constant)


def mapped(m: Any, x: Tensor) -> Tensor:
    """A linear under vmap, whose weight is first read there, and read again outside."""
    return m.last(m.inner(torch.vmap(lambda row: m.inner(row).tanh())(x)))


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 4, 3, groups=2, bias=False), nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 2, 2)),
        *(nn.Flatten(), nn.Linear(12, 5), nn.GELU()),
    )


def block() -> nn.Module:
    return Block(GPTConfig(width=12, num_heads=2, num_kv_heads=1, max_length=9, dropout=0.0))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (block, (2, 7, 12)),
    "mlp": (lambda: MLP(MLPConfig(num_layers=3, width=5)), (4, 5)),
    "convolutions": (convolutional, (3, 3, 8, 6)),
    "recurrent": (
        lambda: Made(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True)),
        (2, 4, 5),
    ),
    "attention": (attention, (2, 5, 6)),
    "transposed": (
        lambda: Made(transposed, weight=nn.Parameter(torch.randn(5, 7)), bias=nn.Parameter(torch.randn(7))),
        (3, 5),
    ),
    "frozen": (frozen, (4, 5)),
    "mapped": (lambda: Made(mapped, inner=nn.Linear(5, 5), last=nn.Linear(5, 3)), (4, 5)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_models(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().to(dtype)
    xs = [draws(torch.empty(shape, dtype=dtype), m) for m in range(4)]
    want = plain(model, xs, ORDER)
    assert_equal(split(model, xs, ORDER), want)
    assert_equal(split(model, xs, "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3"), plain(model, xs, "W0 W1 W2 W3"))


@pytest.mark.parametrize("name", ["mlp", "block", "attention", "convolutions"])
def test_autocast(name: str) -> None:
    make, shape = MODELS[name]
    model = make()
    forward = model.forward

    def twice(x: Tensor) -> Tensor:
        """Autocast adds up what the uses of one weight give, in bf16: two regions, and a weight used twice in one."""
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(x)
            y = y + forward(x.tanh())
        with torch.autocast("cpu", torch.bfloat16):
            return y.float() + forward(x.sin())

    model.forward = twice
    xs = [draws(torch.empty(shape), m) for m in range(4)]
    assert_equal(split(model, xs, ORDER), plain(model, xs, ORDER))


def test_a_loop_of_ones_own_under_such_an_order_has_backwards_in_one_piece() -> None:
    """One stage, whose order splits backwards: only ``engine.step`` takes them apart."""
    x, states = draws(torch.empty(4, 5), 0), []

    def body(comm: Comm) -> None:
        for order in ("zb_h1", None):
            model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
            for seed, parameter in enumerate(model.parameters()):
                parameter.data = draws(parameter, seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = Engine(model, comm, strategy="ddp", optimizer=optimizer, schedule=order)
            engine.backward(model(x).square().sum(), len(x))
            optimizer.step()
            states.append(engine.full_state_dict())

    run(Mesh(), body, deadline=20)
    ours, theirs = states
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_hooks_fire_once_in_the_weight_part_with_the_whole_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 2))
    model[2].weight = model[0].weight  # used twice
    unused = nn.Parameter(torch.ones(3))
    model.register_parameter("unused", unused)
    heard: list[tuple[str, str, Tensor]] = []

    def listen(name: str, p: nn.Parameter) -> None:
        p.register_hook(lambda g: heard.append(("before", name, g.clone())))
        p.register_post_accumulate_grad_hook(lambda p: heard.append(("after", name, p.grad.clone())))

    for name, p in model.named_parameters():
        listen(name, p)
    x = draws(torch.empty(4, 5), 0)
    plain(model, [x], "W0")
    want = {(when, name): g for when, name, g in heard}
    heard.clear()
    split(model, [x], "F0 I0 W0", between=lambda: heard and pytest.fail("a hook fired in I"))
    assert len(heard) == len(want) == 2 * (len(list(model.parameters())) - 1)
    for when, name, g in heard:
        assert torch.equal(g, want[when, name])
    assert unused.grad is None
    assert [n for when, n, _ in heard if when == "after"][-1] in ("0.weight", "0.bias")  # those used last come first


@pytest.mark.parametrize("keeps_output", [False, True])
def test_only_operands_stay_after_the_input_part_and_nothing_after_the_weight_part(keeps_output: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 2))
    seen: dict[str, StorageWeakRef] = {}
    graph: list[weakref.ref[Any]] = []

    def watch(name: str, module: nn.Module) -> None:
        def gradient_hook(g: Tensor) -> None:
            seen[f"gradient of {name}"] = StorageWeakRef(g.untyped_storage())

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen[name] = StorageWeakRef(output.untyped_storage())
            output.register_hook(gradient_hook)

        module.register_forward_hook(hook)

    class OnNode:
        """A hook that lives as long as the node that it hangs on."""

        def __call__(self, g: Tensor) -> None: ...

    for i, module in enumerate(model):
        watch(str(i), module)

    def hang(module: nn.Module, args: Any, output: Tensor) -> None:
        on_node = OnNode()
        output.register_hook(on_node)
        graph.append(weakref.ref(on_node))

    model[2].register_forward_hook(hang)  # on the x of a product
    deferred = Deferring(model.parameters())
    deferred.begin(0)
    with deferred:
        y = model(draws(torch.empty(3, 5), 0).requires_grad_())
    if not keeps_output:
        graph.append(weakref.ref(deferred.stand_in(model[0].weight)))
    g = draws(y, 1)
    y.backward(g)
    del g
    if not keeps_output:
        del y
    gc.collect()
    stays = {name for name, storage in seen.items() if not storage.expired()}
    output = {"3"} if keeps_output else set()
    # x of the last layer is the norm's output; g of the first is the gradient of its output.
    assert stays == {"2", "gradient of 0", "gradient of 3"} | output
    assert keeps_output or graph[0]() is None, "the graph before a product stays"

    def freed(p: nn.Parameter) -> None:
        assert seen["2"].expired(), "what a gradient was made of stays while its hooks run"

    model[3].weight.register_post_accumulate_grad_hook(freed)
    deferred.weigh(0)
    assert {name for name, storage in seen.items() if not storage.expired()} == output
    assert keeps_output or all(ref() is None for ref in graph)


def test_a_parameter_whose_use_gives_no_gradient_gets_none() -> None:
    layer, aside = nn.Linear(5, 6), nn.Linear(5, 6)
    for p in aside.parameters():
        p.register_hook(lambda g: pytest.fail("no gradient is not a gradient of zeros"))
    deferred = Deferring([*layer.parameters(), *aside.parameters()])
    deferred.begin(0)
    x = torch.ones(2, 5)
    with deferred:
        y = layer(x) + aside(x).detach()
    y.sum().backward()
    deferred.weigh(0)
    assert layer.weight.grad is not None and aside.weight.grad is None


def test_an_activation_written_to_before_the_weight_part_raises() -> None:
    layer, x = nn.Linear(5, 6), torch.ones(2, 5)
    deferred = Deferring(layer.parameters())
    deferred.begin(0)
    with deferred:
        y = layer(x)
    y.sum().backward()
    x.zero_()
    with pytest.raises(ValueError, match=r"a weight gradient \(tensors of shapes \[2, 6\], \[2, 5\]\) was written to"):
        deferred.weigh(0)
