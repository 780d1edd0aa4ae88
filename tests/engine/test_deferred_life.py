"""What a backward in two parts keeps, until when, and when parameters' hooks fire."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from deferred_cases import ORDER, assert_equal, draws, grads, parameters_of, plain, split
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from plait.engine.deferred import Deferred


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


def test_hooks_may_change_the_gradient_and_free_it() -> None:
    """As an engine does: the gradient is taken away as soon as it has come, one at a time."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2))
    taken: list[Tensor] = []
    held: list[int] = []

    def take(p: Tensor) -> None:
        assert p.grad is not None
        held.append(sum(q.grad is not None for q in model.parameters()))
        taken.append(p.grad)
        p.grad = None

    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(take)
    x = draws(torch.empty(4, 5), 0)
    plain(model, [x], "W0")
    want, held[:] = sorted(taken, key=lambda g: g.shape), []
    taken.clear()
    split(model, [x], "F0 I0 W0")
    assert_equal(sorted(taken, key=lambda g: g.shape), want)
    assert held == [1, 1, 1, 1]


def test_only_operands_stay_after_the_input_part_and_nothing_after_the_weight_part() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 2))
    seen: dict[str, StorageWeakRef] = {}
    nodes: dict[str, Any] = {}

    def watch(name: str, module: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            seen[name] = StorageWeakRef(output.untyped_storage())
            output.register_hook(lambda g: seen.update({f"gradient of {name}": StorageWeakRef(g.untyped_storage())}))

        module.register_forward_hook(hook)

    for i, module in enumerate(model):
        watch(str(i), module)
    deferred = Deferred(model.parameters())
    deferred.begin(0)
    with deferred:
        y = model(draws(torch.empty(3, 5), 0).requires_grad_())
    nodes["stand-in"] = weakref.ref(deferred.stand_in(model[0].weight))
    y.backward(draws(y, 1))
    del y
    gc.collect()
    stays = {name for name, storage in seen.items() if not storage.expired()}
    # x of the last layer is the norm's output; g of the first is the gradient of its output.
    assert stays == {"2", "gradient of 0", "gradient of 3"}
    assert not any(isinstance(g, Tensor) and g.grad_fn for p in model.parameters() for g in [p.grad])
    deferred.weigh(0)
    assert all(storage.expired() for storage in seen.values())
    assert nodes["stand-in"]() is None
    assert not deferred._stand_ins and deferred._running is None


def test_weights_are_freed_and_filled_in_place() -> None:
    """As sharded data parallelism does: a parameter's values are there in F and I only, NaN elsewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    x = draws(torch.empty(3, 5), 0)
    want = plain(model, [x], "W0")
    model.zero_grad()
    values = [p.detach().clone() for p in model.parameters()]
    full = [torch.empty_like(v) for v in values]

    def fill() -> None:
        for p, f, v in zip(model.parameters(), full, values, strict=True):
            f.untyped_storage().resize_(f.numel() * f.element_size())
            f.copy_(v)
            p.data = f

    def free() -> None:
        for p, f in zip(model.parameters(), full, strict=True):
            p.data = torch.full((), float("nan")).expand(p.shape)
            f.untyped_storage().resize_(0)

    deferred = Deferred(model.parameters())
    free()
    deferred.begin(0)
    mine = x.clone().requires_grad_()
    fill()
    with deferred:
        y = model(mine)
    free()
    fill()
    y.backward(draws(y, 0))
    free()
    deferred.weigh(0)
    assert_equal([y.detach(), mine.grad, *grads(parameters_of(model))], want)


def test_parameters_are_rewritten_in_place_between_steps() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    xs = [draws(torch.empty(3, 5), m) for m in range(4)]
    start = [p.detach().clone() for p in model.parameters()]
    found = []
    for way in (split, plain):
        with torch.no_grad():
            for p, v in zip(model.parameters(), start, strict=True):
                p.copy_(v)
        for _ in range(3):
            way(model, xs, ORDER)
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
        found.append([p.detach().clone() for p in model.parameters()])
    assert_equal(*found)


def test_a_parameter_rewritten_before_the_input_part_raises_as_in_a_plain_backward() -> None:
    layer = nn.Linear(5, 6)
    deferred = Deferred(layer.parameters())
    deferred.begin(0)
    with deferred:
        y = layer(torch.ones(2, 5, requires_grad=True))
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_activation_written_to_before_the_weight_part_raises() -> None:
    layer, x = nn.Linear(5, 6), torch.ones(2, 5)
    deferred = Deferred(layer.parameters())
    deferred.begin(0)
    with deferred:
        y = layer(x)
    y.sum().backward()
    x.zero_()
    with pytest.raises(ValueError, match=r"weight gradient \[6, 5\] .* was written to"):
        deferred.weigh(0)
