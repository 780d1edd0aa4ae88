"""The types that a plan implies are those of a run: shapes and values of activations and gradients, rank by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.anymodel.tensor import resolve_carried
from plait.anymodel.tensor.types import ModuleType, module_types
from plait.comm import Comm, run
from plait.run.commands.main import main
from plait.run.config import VerifyConfig
from plait.run.job.job import build_model, make_job

GPT = VerifyConfig(
    model="gpt", layers=2, width=24, heads=6, kv_heads=3, batch=4, length=9, steps=1, dtype="fp64", dropout=0.1
)
LLAMA = replace(GPT, model="llama", dropout=0.0)
MLP = VerifyConfig(model="mlp", layers=5, width=9, batch=7, steps=1, dtype="fp64", dropout=0.2)


def types_of(config: VerifyConfig) -> dict[str, ModuleType]:
    model = build_model(config.task)
    parallel = resolve_carried(model, config.machine.parsed_mesh.tensor, sequence=config.layout.sequence_parallel)
    return {one.name: one for one in module_types(model, parallel, sequence=config.layout.sequence_parallel)}


def seen(config: VerifyConfig, names: list[str]) -> list[dict[tuple[str, str], Tensor]]:
    """What each rank's modules leave, and the gradients of that and of parameters, by what it is and name."""
    job = make_job(config.task, config.dtypes)

    def train(comm: Comm) -> dict[tuple[str, str], Tensor]:
        engine, _ = job.engine(comm, config.parallelism)
        found: dict[tuple[str, str], Tensor] = {}
        model: nn.Module = engine.placed.stages[0].model

        def keep(what: str, name: str, value: Any) -> None:
            with torch._C.DisableTorchFunction():
                found.setdefault((what, name), value.detach().clone())

        def hook(name: str) -> Any:
            def left(module: nn.Module, args: Any, output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                keep("leaves", name, output)
                if output.requires_grad:
                    output.register_hook(lambda gradient: keep("gradient", name, gradient))

            return left

        for name in names:
            module = model.get_submodule(name)
            module.register_forward_hook(hook(name))
            for short, parameter in module.named_parameters(recurse=False):
                parameter.register_hook(lambda gradient, n=f"{name}.{short}": keep("parameter", n, gradient))
        engine.step(job.microbatches(0, 0, 1, 1))
        return found

    return run(config.machine.parsed_mesh, train, deadline=20)


def equal_everywhere(values: list[Tensor]) -> bool:
    return all(v.shape == values[0].shape and torch.allclose(v, values[0], rtol=1e-9, atol=1e-12) for v in values)


@pytest.mark.parametrize(
    ("config", "sequence"),
    [(GPT, False), (GPT, True), (LLAMA, False), (LLAMA, True), (MLP, False)],
    ids=["gpt", "gpt-sequence", "llama", "llama-sequence", "mlp"],
)
@pytest.mark.parametrize("ways", [2, 3])
def test_what_a_plan_implies_is_what_runs(config: VerifyConfig, sequence: bool, ways: int) -> None:
    if ways == 2:
        config = replace(config, kv_heads=2) if config is not MLP else config
    config = replace(config, mesh=f"tensor={ways}", strategy="ddp", sequence_parallel=sequence)
    types = types_of(config)
    ranks = seen(config, list(types))
    alone = replace(config, mesh="shard=1", sequence_parallel=False)
    whole = seen(alone, list(types))[0]
    for name, one in types.items():
        for what in ("leaves", "gradient"):
            if (what, name) not in whole:
                continue
            right, ours = whole[what, name], [rank[what, name] for rank in ranks]
            assert right.dim() == ours[0].dim(), (name, what)
            if one.leaves == "whole":
                assert equal_everywhere([right, *ours]), (name, what)
                continue
            dim = 1 if one.leaves == "time" else right.dim() - 1
            assert sum(part.shape[dim] for part in ours) == right.shape[dim], (name, what, one.leaves)
            others = [size for d, size in enumerate(right.shape) if d != dim]
            assert all([s for d, s in enumerate(part.shape) if d != dim] == others for part in ours), (name, what)
            if one.style.startswith(("sequence", "row")):
                assert torch.allclose(torch.cat(ours, dim), right, rtol=1e-9, atol=1e-12), (name, what)
        for short, shape, sums in one.weights:
            found = [rank["parameter", f"{name}.{short}"] for rank in ranks]
            assert tuple(found[0].shape) == shape, (name, short)
            right = whole["parameter", f"{name}.{short}"]
            if sums == "pending":
                assert not equal_everywhere(found), (name, short)
                assert torch.allclose(torch.stack(found).sum(0), right, rtol=1e-9, atol=1e-12), (name, short)
            elif tuple(right.shape) == shape:
                assert equal_everywhere([right, *found]), (name, short)


def test_the_command_shows_each_kind_of_layer_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "--layers", "3", "--mesh", "tensor=2", "--sequence-parallel", "--json", "-"]) == 0
    assert capsys.readouterr().out.count('"style": "row') == 6
    assert main(["explain", "--layers", "3", "--mesh", "tensor=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("row by") == 1 and "blocks.*.mlp.down x3" in shown
    assert main(["explain", "--model", "llama", "--mesh", "tensor=2", "--sequence-parallel"]) == 0
    shown = capsys.readouterr().out
    assert "\n  model.layers.*.post_attention_layernorm x4 " in shown and "…" not in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mesh", "shard=2"], "has no tensor axis"),
        (["--mesh", "tensor=3"], "cannot be shared by tensor=3"),
        (["--mesh", "tensor=2", "--job", "examples/my_job.py:job"], "(in the build function of a job)"),
    ],
)
def test_what_cannot_be_explained_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    assert says in capsys.readouterr().err
