"""The tensors that a backward in two parts keeps, how long, and when parameters' hooks fire."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from weight_grads_cases import Deferring, draws, plain, split


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
