"""ZeRO's memory table, number by number, and predicted activation bytes against what autograd saves."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from plait.comm import Comm, run
from plait.predict.activations import DecoderSizes, block, decoder
from plait.predict.memory import Held, formula, held
from plait.run.models.gpt import GPT, GPTConfig, loss_sum, token_count
from plait.step import Engine, empty_parameters
from plait.table.cells import TABLE, Strategy
from plait.table.flat import Cut, UnitLayout, lay
from plait.table.mesh import Mesh

B, T, GB = 1e9, 1e12, 1e9

# ---- the published table ---------------------------------------------------------------------------------

# GB per device, stages 1 / 2 / 3, 16-bit parameters and gradients, K = 12 (Rajbhandari et al. 2020, table 1)
PUBLISHED = """
N     7.5B                 128B             1T
1     120  / 120   / 120   2048/2048/2048   16000/16000/16000
4     52.5 / 41.25 / 30    896 /704 /512    7000 /5500 /4000
16    35.6 / 21.6  / 7.5   608 /368 /128    4750 /2875 /1000
64    31.4 / 16.6  / 1.88  536 /284 /32     4188 /2219 /250
256   30.4 / 15.4  / 0.47  518 /263 /8      4047 /2055 /62.5
1024  30.1 / 15.1  / 0.12  514 /258 /2      4012 /2014 /15.6
"""
SIZES = {"7.5B": 7.5 * B, "128B": 128 * B, "1T": T}
STAGES = ("zero1", "zero2", "zero3")


def published() -> list[tuple[int, str, str, str]]:
    header, *lines = PUBLISHED.strip().splitlines()
    cells = []
    for line in lines:
        n, *models = re.sub(r" */ *", "/", line).split()
        for model, stages in zip(header.split()[1:], models, strict=True):
            cells += [(int(n), model, row, text) for row, text in zip(STAGES, stages.split("/"), strict=True)]
    return cells


def mixed(num_parameters: float, mesh: Mesh, row: str) -> Held:
    """16-bit parameters and gradients, fp32 Adam with master weights."""
    return formula(num_parameters, mesh, TABLE[row], param_bytes=2, grad_bytes=2, optimizer_bytes=12)


@pytest.mark.parametrize(("n", "model", "row", "text"), published())
def test_the_published_zero_table(n: int, model: str, row: str, text: str) -> None:
    num_decimals = len(text.partition(".")[2])
    half_a_digit = 0.5 * 10**-num_decimals
    for mesh in (Mesh(shard=n), Mesh(replica=n), Mesh(replica=2, shard=n // 2) if n > 1 else Mesh()):
        assert abs(mixed(SIZES[model], mesh, row).total / GB - float(text)) <= half_a_digit * (1 + 1e-9)


# ---- what the buffers hold -------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 60), max_size=2).map(tuple), min_size=1, max_size=4)
DATA = st.builds(Mesh, replica=st.integers(1, 4), shard=st.integers(1, 4))
ROWS = st.sampled_from(list(TABLE.values()))
CUTS: st.SearchStrategy[Cut] = st.sampled_from(["element", "tensor"])


def units_of(models: list[list[tuple[int, ...]]], itemsize: int, mesh: Mesh, cut: Cut = "element") -> list[UnitLayout]:
    """One unit a list; every second one has a frozen buffer beside the trainable one."""
    units = []
    for u, shapes in enumerate(models):
        flat = lay([(f"{u}.{i}", shape) for i, shape in enumerate(shapes)], itemsize, mesh.data_size, cut)
        frozen = lay([(f"{u}.frozen", (11, 3))], itemsize, mesh.data_size, cut)
        units.append(UnitLayout(f"u{u}", *(((flat, frozen), (True, False)) if u % 2 else ((flat,), (True,)))))
    return units


def count(units: list[UnitLayout]) -> tuple[int, int]:
    """Parameters, and those that train."""
    flats = [(sum(s.numel for s in f.slots), t) for u in units for f, t in zip(u.flats, u.trainable, strict=True)]
    return sum(n for n, _ in flats), sum(n for n, t in flats if t)


def padding(units: list[UnitLayout]) -> int:
    """Bytes of the flat buffers that hold no parameter."""
    return sum((f.numel - sum(s.numel for s in f.slots)) * f.itemsize for unit in units for f in unit.flats)


@settings(max_examples=100, deadline=None)
@given(models=st.lists(SHAPES, min_size=1, max_size=3), itemsize=st.sampled_from([2, 4, 8]), mesh=DATA, row=ROWS)
def test_held_is_the_formula_within_padding(
    models: list[list[tuple[int, ...]]], itemsize: int, mesh: Mesh, row: Strategy
) -> None:
    units = units_of(models, itemsize, mesh)
    everything, trained = count(units)
    sizes = {"param_bytes": itemsize, "grad_bytes": itemsize, "optimizer_bytes": 2 * itemsize}
    whole, learning = formula(everything, mesh, row, **sizes), formula(trained, mesh, row, **sizes)
    extra = padding(units)
    for rank in range(mesh.size):
        found = held(units, mesh, row, rank)
        ways = mesh.count(row.params.split)
        assert found.params * ways == everything * itemsize + extra  # every byte of it, and no other
        assert 0 <= found.params - whole.params <= extra / ways + 1
        assert 0 <= found.grads - learning.grads <= extra / mesh.count(row.grads.split) + 1
        assert abs(found.optimizer - learning.optimizer) <= 2 * extra  # padding has no state
        assert found.total == found.params + found.grads + found.optimizer


@settings(max_examples=60, deadline=None)
@given(models=st.lists(SHAPES, min_size=1, max_size=3), mesh=DATA, row=ROWS, cut=CUTS, states=st.integers(0, 3))
def test_together_the_ranks_hold_every_state_once_per_copy(
    models: list[list[tuple[int, ...]]], mesh: Mesh, row: Strategy, cut: Cut, states: int
) -> None:
    """Under either cut: the sum over ranks is the whole, times the ranks that hold the same."""
    units, itemsize = units_of(models, 4, mesh, cut), 4
    trained = count(units)[1]
    every = [held(units, mesh, row, rank, states) for rank in range(mesh.size)]
    full = sum(f.numel for u in units for f in u.flats) * itemsize
    learning = sum(f.numel for u in units for f, t in zip(u.flats, u.trainable, strict=True) if t) * itemsize
    copies = {part: mesh.size // mesh.count(getattr(row, part).split) for part in ("params", "grads", "optim")}
    assert sum(h.params for h in every) == full * copies["params"]
    assert sum(h.grads for h in every) == learning * copies["grads"]
    assert sum(h.optimizer for h in every) == trained * states * itemsize * copies["optim"]
    assert full == count(units)[0] * itemsize + padding(units)


DECODER = DecoderSizes(batch=3, length=7, width=24, heads=6, kv_heads=2, hidden=40, vocabulary=11)
MODES = (None, "selective", "full")


@dataclass
class Saved:
    """Tensors that autograd saved, each storage once."""

    own: set[int]
    alive: list[Tensor] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.alive}
        return sum(size for at, size in storages.items() if at not in self.own)


@contextmanager
def saving(own: Iterable[Tensor]) -> Iterator[Saved]:
    seen = Saved({t.untyped_storage().data_ptr() for t in own})

    def pack(tensor: Tensor) -> Tensor:
        seen.alive.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


def tokens_of(s: DecoderSizes) -> Tensor:
    return torch.randint(0, s.vocabulary, (s.batch, s.length), generator=torch.Generator().manual_seed(1))


def measured(
    s: DecoderSizes, layers: int, recompute: str | None, dtype: torch.dtype, sequence: bool = False
) -> list[int]:
    """Bytes of one forward and backward of the project's decoder, under the engine, on every rank."""
    heads: dict[str, Any] = {"num_heads": s.heads, "num_kv_heads": s.kv_heads, "dropout": 0.1 * s.dropout}
    sizes = GPTConfig(s.vocabulary, layers, width=s.width, hidden=s.hidden, max_length=s.length + 2, **heads)
    tokens = tokens_of(s)
    batch = {"tokens": tokens, "targets": tokens.roll(1, 1)}

    def body(comm: Comm) -> int:
        with empty_parameters():
            model = GPT(sizes)
        for p in model.parameters():
            p.data = p.data.to(dtype)
        settings: dict[str, Any] = {"recompute": recompute, "sequence_parallel": sequence}
        settings["listener"] = lambda event, engine: None  # looks at gradients, makes no step
        engine = Engine(model, comm, strategy="ddp", loss_fn=loss_sum, count_fn=token_count, **settings)
        own = [*model.parameters(), *model.buffers()]
        axis = engine.placed.time_axis
        with saving(own) as seen:
            engine.step([batch])
        masks = [] if axis is None or axis.masks is None else axis.masks
        assert axis is None or recompute == "full" or sum(m.nbytes for m in masks) == s.masks
        seen.own |= {m.untyped_storage().data_ptr() for m in masks}
        return seen.bytes

    return run(Mesh(shard=s.context, tensor=s.ways, context=s.context), body, deadline=20)


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("own", [{"kv_heads": 2}, {"kv_heads": 6}, {"length": 12, "context": 3}], ids=str)
def test_the_decoder_keeps_what_is_predicted(
    own: dict[str, int], dtype: torch.dtype, dropout: bool, recompute: str | None
) -> None:
    """Masks that blocks share, where time is cut, are counted beside the blocks."""
    sizes = replace(DECODER, itemsize=dtype.itemsize, dropout=dropout, **own)
    links = ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert measured(sizes, 2, recompute, dtype) == [decoder(sizes, links, recompute)] * sizes.context


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_cut_over_tensor_ranks_keeps_what_is_predicted(
    sequence: bool, dropout: bool, recompute: str | None
) -> None:
    """One block more costs as much; the rank with most steps of time (4 of 7) is the first."""
    sizes = replace(DECODER, itemsize=8, dropout=dropout, ways=2, sequence=sequence)
    less, more = (measured(sizes, layers, recompute, torch.float64, sequence)[0] for layers in (1, 2))
    assert more - less == sum(kept.bytes for kept in block(sizes, recompute))


@pytest.mark.parametrize("sequence", [False, True])
def test_what_tensor_ranks_keep_beside_the_blocks(sequence: bool) -> None:
    """The places of a rank's own targets are data."""
    sizes = replace(DECODER, itemsize=8, ways=2, sequence=sequence)
    links = ["embed", "blocks.0", "norm", "head"]
    own = 16 * int((tokens_of(sizes) < 6).sum())  # 6 of 11 classes on the first rank
    assert measured(sizes, 1, None, torch.float64, sequence)[0] == decoder(sizes, links) + own
