"""A model cut at its blocks: which there are, the part that a stage runs, and who shares which weight."""

import copy
from collections.abc import Sequence
from typing import Any

import engine_cases as cases
import pytest
import torch
from torch import Tensor, nn

from plait.pipeline.blocks import SkippedBlock, cut, declared_blocks
from plait.pipeline.build_stages import split_of, stages_using
from plait.pipeline.cutting import release
from plait.pipeline.program import Blocks, StagePart, whole
from plait.run.models.gpt import GPT, GPTConfig
from plait.run.models.hf import HFConfig
from plait.run.models.hf import build as build_hf
from plait.schedule.partition import even

SMALL = GPTConfig(num_layers=3, width=24, num_heads=2, num_kv_heads=1, max_length=8)
LLAMA = {"num_layers": 2, "width": 16, "num_heads": 2, "num_kv_heads": 1, "max_length": 8}
GPT_LINKS = ("embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head")


class Told(nn.Module):
    """A model whose links are what it says."""

    def __init__(self, links: Sequence[str], extra: nn.Parameter | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        self.links = list(links)
        if extra is not None:
            self.scale = extra

    def pipeline_blocks(self) -> list[str]:
        return self.links

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.second(self.first(x_BC))


class TwiceNormal(Told):
    """One BatchNorm is two blocks: two stages would each have running statistics."""

    def __init__(self) -> None:
        super().__init__(["first", "second"])
        self.first = self.second = nn.BatchNorm1d(5)


CPU = torch.device("cpu")


def part_of(model: nn.Module, links: range) -> StagePart:
    return cut(model).part(links, set(), CPU)


# ---- which links there are ----------------------------------------------------------------------------------------


def test_a_model_tells_its_links() -> None:
    assert cut(GPT(SMALL)).blocks.names == GPT_LINKS
    assert cut(Told(["first", "second.0", "second.1"])).blocks.names == ("first", "second.0", "second.1")


def test_the_children_of_a_sequential_are_links() -> None:
    assert cut(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))).blocks.names == ("0", "1", "2")
    shared = nn.Linear(3, 3)
    assert cut(nn.Sequential(shared, nn.ReLU(), shared)).blocks.names == ("0", "1", "2"), "also one that stands twice"


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tie", [False, True])
def test_the_links_of_a_hugging_face_decoder(kind: Any, tie: bool) -> None:
    pytest.importorskip("transformers")
    model = build_hf(HFConfig(**LLAMA, kind=kind, tie=tie))
    names = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
    assert cut(model).blocks.names == names
    bare = model.get_submodule("model")
    assert cut(bare).blocks.names == ("embed_tokens", "layers.0", "layers.1", "norm")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (cases.Block(), r"Block does not say how a pipeline may cut it.*give it a method pipeline_links\(\)"),
        (Told(["first", "third"]), "of Told names 'third', which is no module of it"),
        (Told(["first", "second", "first"]), "of Told names 'first' twice"),
        (Told(["first", "second", "second.1"]), "of Told names 'second.1' and 'second', which contains it"),
        (Told(["first", "second"], nn.Parameter(torch.ones(2))), "'scale' is in no block, of pipeline_blocks"),
        (TwiceNormal(), "buffer 'second.running_mean' is in the blocks 'first' and 'second'"),
    ],
)
def test_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut(model)


def test_the_library_leaves_a_model_that_promises_nothing_to_the_wing() -> None:
    """A Sequential keeps the promise, unless two of its blocks share a buffer; links of a model promise nothing."""
    norm = nn.BatchNorm1d(5)
    assert declared_blocks(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))) is not None
    assert declared_blocks(nn.Sequential(norm, nn.Linear(5, 5), norm)) is None
    assert declared_blocks(cases.Net()) is None and cut(cases.Net()).blocks.outside
    linked = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    linked.pipeline_links = lambda: ["0", "1"]
    assert declared_blocks(linked) is None


# ---- the copy that a stage runs -----------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, tuple[int, int, Tensor]]:
    """Every parameter and buffer: its identity, where its memory is, and its values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (id(t), t.data_ptr(), t.detach().clone()) for name, t in tensors.items()}


@pytest.mark.parametrize(
    "links", [range(0, 1), range(0, 3), range(1, 2), range(2, 5), range(5, 6), range(0, 6)], ids=str
)
def test_names_stay_values_are_shared_and_nothing_is_copied(links: range) -> None:
    model = GPT(SMALL)
    whole = dict(model.named_parameters(remove_duplicate=False))
    part = part_of(model, links)
    here = dict(part.model.named_parameters(remove_duplicate=False))
    prefixes = tuple(f"{GPT_LINKS[i]}." for i in links)
    assert list(here) == [name for name in whole if name.startswith(prefixes)]
    for name, parameter in here.items():
        assert parameter is whole[name] and part.origin[id(parameter)] is parameter
    assert part.origin.keys() == {id(p) for p in part.model.parameters()}, "of the part's own parameters, no others"
    names = [name for name, _ in part.model.named_modules() if name.startswith(prefixes)]
    assert names == [name for name, _ in model.named_modules() if name.startswith(prefixes)]


def test_the_model_is_left_as_it_is() -> None:
    model = GPT(SMALL).eval()
    kept, state, modules = snapshot(model), copy.deepcopy(model.state_dict()), [*model.modules()]
    tokens = torch.arange(6).view(2, 3)
    before = model(tokens)
    for links in even(6, 3):
        part_of(model, links)
    after = snapshot(model)
    assert {name: found[:2] for name, found in kept.items()} == {name: found[:2] for name, found in after.items()}
    assert [*model.modules()] == modules and model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(tokens), before)


def test_a_second_stage_of_a_rank_gets_copies_of_what_the_first_one_has() -> None:
    """Embedding and head share a weight; of the head's stage, everything else is the model's own."""
    model, taken = GPT(SMALL), set[int]()
    cutter = cut(model)
    first, second = (cutter.part(links, taken, CPU) for links in (range(0, 2), range(4, 6)))
    weight, again = first.model.embed.weight, second.model.head.weight
    assert weight is model.embed.weight and second.model.norm is model.norm
    assert again is not weight and again.data_ptr() == weight.data_ptr() and second.origin[id(again)] is weight
    again.grad = torch.ones_like(again)
    assert weight.grad is None


def test_a_part_has_hooks_of_its_own_and_the_users() -> None:
    model, seen = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), []
    model.register_forward_pre_hook(lambda *_: seen.append("the user's"))
    part = part_of(model, range(0, 2))
    part.model.register_forward_pre_hook(lambda *_: seen.append("the stage's"))
    part.model(torch.zeros(1, 5))
    model(torch.zeros(1, 5))
    assert seen == ["the user's", "the stage's", "the user's"]


def test_what_stands_in_for_a_block_has_its_attributes_and_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].kind = "full attention"
    stands_in = part_of(model, range(1, 2)).model[0]
    assert isinstance(stands_in, SkippedBlock) and not [*stands_in.parameters()]
    assert (stands_in.kind, stands_in.in_features) == ("full attention", 5)
    with pytest.raises(AttributeError, match="'weight' of a block is a value of another stage"):
        _ = stands_in.weight


def test_frozen_parameters_marks_and_meta_come_along() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5, device="meta"))
    model[1].weight.requires_grad_(False)
    model[1].weight.mark = "mine"
    part = part_of(model, range(1, 3)).model
    weights = dict(part.named_parameters())
    assert not weights["1.weight"].requires_grad and weights["1.bias"].requires_grad
    assert weights["1.weight"].mark == "mine"
    assert weights["2.weight"].is_meta and weights["2.weight"].shape == (5, 5)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 2), r"1 \+ 2 = 3 links, but the model has 4.*; the blocks are l0, l1, l2, l3"),
        ((4, 0), "at least one"),
        ((5, -1), "at least one"),
        ((2.0, 2.0), r"a split with 2\.0: give whole numbers, .* as in \(5, 4\)"),
        (["2", "2"], "a split with '2': give whole numbers"),
        ((1, 2, 1), "a split for 3 stages, but the pipeline has 2"),
    ],
)
def test_splits_that_do_not_fit(sizes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_of(Blocks(("l0", "l1", "l2", "l3")), 2, sizes)


def test_a_split_that_does_not_fit_names_the_blocks_of_a_long_model_by_its_ends() -> None:
    with pytest.raises(ValueError, match=r"the blocks are l0, l1, l2, \.\.\., l11, l12$"):
        split_of(Blocks(tuple(f"l{i}" for i in range(13))), 2, (1, 1))


def test_the_whole_is_the_model_itself() -> None:
    model = cases.Net()
    part = whole(model).part(range(0), set(), CPU)
    assert part.model is model and all(part.origin[id(p)] is p for p in model.parameters())
    assert len(part.origin) == len([*model.parameters()])


# ---- who uses what ------------------------------------------------------------------------------------------------


def uses(model: nn.Module, num_stages: int) -> dict[str, tuple[int, ...]]:
    blocks = cut(model).blocks
    found = stages_using(model, blocks, even(len(blocks), num_stages))
    return {name: found[id(p)] for name, p in model.named_parameters()}


def test_stages_that_use_a_parameter() -> None:
    found = uses(GPT(SMALL), 3)
    assert found["embed.weight"] == (0, 2), "the head shares it"
    assert {name: stages for name, stages in found.items() if len(stages) > 1} == {"embed.weight": (0, 2)}
    assert found["norm.weight"] == (2,)
    for i, stage in ((0, 0), (1, 1), (2, 1)):
        assert {stages for name, stages in found.items() if name.startswith(f"blocks.{i}.")} == {(stage,)}
    assert uses(GPT(SMALL), 1)["embed.weight"] == (0,)


def test_none_in_a_list_uses_nothing() -> None:
    model = cases.Net()
    model.options = nn.ModuleList([None, None])
    model.blocks.insert(1, None)
    found = uses(model, 2)
    assert found["blocks.0.up.weight"] == (0,) and found["blocks.3.up.weight"] == (1,)


# ---- the model that is left ----------------------------------------------------------


def test_a_model_without_values_keeps_names_and_shapes_and_refuses_to_run() -> None:
    model = GPT(SMALL)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    release(model, [])
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert all(p.untyped_storage().nbytes() == p.element_size() for p in model.parameters()), "one number of memory"
    assert all(p.isnan().all() for p in model.parameters())
    with pytest.raises(ValueError, match=r"cut in stages.*train it by engine\.step"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_the_stages_of_a_rank_keep_their_values() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    release(model, [part_of(model, range(1, 2))])
    assert model[0].weight.isnan().all() and not model[1].weight.isnan().any()
    with pytest.raises(ValueError, match=r"engine\.full_state_dict"):
        model.state_dict()
