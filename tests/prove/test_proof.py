"""Layouts that are proved, those that are refuted, and refusals."""

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.referee.prove import Decoder, PaperRun, Refuted, prove
from plait.referee.prove.machine import Machine
from plait.referee.prove.program import AGAIN, Settled
from plait.referee.prove.proof import _tied, check_parameters
from plait.referee.prove.scenes import of_ranks, scene_of
from plait.referee.prove.symmetry import check_symmetry, model_ranks
from plait.schedule.orders import ORDERS
from plait.schedule.pipeline import Pipeline
from plait.table.cells import EXPERTS, TABLE
from plait.table.flat import Message
from plait.table.mesh import Mesh

SMALL = Decoder(layers=11, hidden=32, ffn=43, heads=4, kv_heads=2, vocab=71)
LLAMA_405B = Decoder(layers=126, hidden=16384, ffn=53248, heads=128, kv_heads=8, vocab=128256)
TRILLION = Decoder(layers=128, hidden=25600, ffn=4 * 25600, heads=160, kv_heads=160, vocab=51200, gated=False)


def paper(mesh: str, row: str = "zero3", order: str | None = None, decoder: Decoder = SMALL, m: int = 4) -> PaperRun:
    on = Mesh.parse(mesh)
    return PaperRun(decoder, on, TABLE[row], Pipeline(order, on.pipe), m, bucket=0)


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("order", ORDERS)
def test_every_row_and_order_on_three_data_ranks(row: str, order: str) -> None:
    proved = prove(paper("replica=2 shard=3 tensor=2 pipe=3", row, order, m=5))
    assert (proved.ranks, proved.microbatches) == (36, 5)
    assert proved.in_order


@pytest.mark.parametrize("row", TABLE)
def test_pieces_of_whole_parameters_are_proved_too(row: str) -> None:
    uneven = replace(paper("replica=2 shard=3", row), cut="tensor")
    assert any(not flat.even for units in uneven.laid().values() for unit in units for flat in unit.flats)
    assert prove(uneven).ranks == 6


def test_published_layouts_are_proved() -> None:
    assert LLAMA_405B.num_parameters == 405_853_388_800
    llama = prove(paper("shard=128 tensor=8 pipe=16", "zero1", "interleaved", LLAMA_405B, 16))
    assert (llama.ranks, llama.stages, llama.order) == (16_384, 32, ("microbatch", "shard", "replica"))
    assert round(TRILLION.num_parameters, -10) == 1_010_000_000_000
    megatron = prove(paper("replica=6 tensor=8 pipe=64", "ddp", "1f1b", TRILLION, 8))
    assert (megatron.ranks, megatron.stages) == (3_072, 64)
    long = paper("shard=128 context=16 tensor=8 pipe=16", "zero1", "interleaved", LLAMA_405B, 16)
    proved = prove(replace(long, length=131_072, recompute="full", strategy=TABLE["zero1"].mixed("bf16")))
    assert (proved.ranks, proved.stages) == (16_384, 32)


# ---- symmetry, owners ---------------------------------------------------------------------------------------------


class Crooked(Mesh):
    """A mesh on which one rank takes itself for its neighbour."""

    def index(self, rank: int, axes: tuple[str, ...]) -> int:
        return super().index(rank ^ 2 if rank == 13 and axes else rank, axes)


def test_a_rank_that_is_not_like_its_model_is_found() -> None:
    run = paper("pipe=2 shard=4 tensor=2", "zero3")
    layouts = [unit.flats[0] for unit in run.laid()[0, 0]][:1]
    assert check_symmetry(run.mesh, run.strategy, layouts) > 16
    with pytest.raises(Refuted, match="rank 13"):
        check_symmetry(Crooked(pipe=2, shard=4, tensor=2), run.strategy, layouts)


def test_a_parameter_that_no_stage_has_or_two_have_is_found() -> None:
    run = paper("pipe=3 tensor=2", "zero1", "1f1b")
    laid = run.laid()
    check_parameters(run, laid)
    for stage in (0, 1):
        lost = {key: units[1:] if key == (stage, 0) else units for key, units in laid.items()}
        with pytest.raises(Refuted, match="owners"):
            check_parameters(run, lost)
    doubled = {(s, t): units + laid[0, t][1:2] if s == 1 else units for (s, t), units in laid.items()}
    with pytest.raises(Refuted, match=r"2 of 3 stages have it \(parameter model.layers.0"):
        check_parameters(run, doubled)
    same = {(s, t): laid[s, 0] for s, t in laid}  # 71 rows of the vocabulary are 36 and 35
    with pytest.raises(Refuted, match="its pieces are not all of its 2,272 elements"):
        check_parameters(run, same)


@pytest.mark.parametrize("row", TABLE)
def test_parts_of_time_are_summed_like_other_parts_of_the_batch(row: str) -> None:
    alone, cut = (replace(paper(f"pipe=2 shard=6{more}", row, "1f1b"), length=36) for more in ("", " context=3"))
    one, three = prove(alone), prove(cut)
    assert (one.order, one.compared + 12, one.operations) == (three.order, three.compared, three.operations)
    assert three.traffic.messages - one.traffic.messages == SMALL.layers * 4 * 6 * 4
    with pytest.raises(ValueError, match="length 40 is cut in 6 blocks of time over context=3: give a multiple of 6"):
        prove(replace(cut, length=40))
    with pytest.raises(ValueError, match="a ring goes over a context axis"):
        prove(replace(alone, ring=True))


MIXTURE = replace(SMALL, ffn=48, experts=8, chosen=2, family="mixtral")


@pytest.mark.parametrize("row", TABLE)
def test_every_part_of_the_batch_comes_to_each_expert_once(row: str) -> None:
    """Proved for each row; refuted where experts are summed over ranks that have other experts, or their neighbours'
    tokens do not come."""
    run = paper("replica=2 shard=4 tensor=2 pipe=2 expert=2", row, "1f1b", MIXTURE)
    assert prove(run).compared > prove(replace(run, decoder=SMALL, mesh=replace(run.mesh, expert=1))).compared
    schedule = run.pipeline.completed(run.microbatches, run.strategy)
    line = tuple(action for action in schedule[0] if action.stage == 0)
    unit = next(unit for unit in run.laid()[0, 0] if unit.axes == EXPERTS)
    ranks = model_ranks(run.mesh, tensor=False)
    flats = of_ranks(unit, 0, run.mesh, run.strategy, ranks)

    def carry_out(flats: dict[int, Settled], mesh: Mesh) -> None:
        Machine(replace(scene_of(line, flats, run.mesh, run.strategy), mesh=mesh)).run()

    carry_out(flats, run.mesh)
    with pytest.raises(Refuted, match=r"microbatch 0 of data rank \d is in it not at all"):
        carry_out(flats, NoTokens(**asdict(run.mesh)))
    whole = {phase: tuple(map(_over_shard, messages)) for phase, messages in flats[0].messages.items()}
    with pytest.raises(Refuted):
        carry_out({rank: flat._replace(messages=whole) for rank, flat in flats.items()}, run.mesh)


class NoTokens(Mesh):
    """A mesh on which no token of a neighbour comes to a rank's experts."""

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        return (rank,) if axes == ("expert",) else super().group(rank, axes)


def _over_shard(message: Message) -> Message:
    return replace(message, axes=tuple("shard" if axis == "expert_shard" else axis for axis in message.axes))


def test_experts_that_a_proof_does_not_cover_are_refused() -> None:
    with pytest.raises(ValueError, match="8 experts: a proof has experts on an expert axis, as many on each of its 3"):
        prove(paper("shard=3 expert=3", decoder=MIXTURE))
    with pytest.raises(ValueError, match="expert=2: the model has no experts: leave expert out"):
        prove(paper("shard=4 expert=2"))


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("mesh", ["shard=4", "pipe=2 replica=2 shard=2 tensor=2"])
def test_a_tied_weight_is_read_twice_and_both_uses_are_added(row: str, mesh: str) -> None:
    """Proved; refuted where the stages of the weight cut it in other places, or the head's pass is left out."""
    run = paper(mesh, row, None if mesh == "shard=4" else "1f1b", replace(SMALL, tied=True))
    assert prove(run).parameters == SMALL.num_parameters - 71 * 32
    laid, last = run.laid(), (run.pipeline.num_stages - 1, 0)
    if run.mesh.pipe > 1:
        longer = replace(laid[last][-1].flats[0], bounds=(0, *laid[last][-1].flats[0].bounds[1:-1], 1 << 20))
        other = {**laid, last: (*laid[last][:-1], replace(laid[last][-1], flats=(longer,)))}
        with pytest.raises(Refuted, match="sums: its two stages do not cut it in the same places"):
            _tied(run, run.pipeline.completed(4, run.strategy), other)
    elif len(laid[last][1].uses) > 1:
        flats = of_ranks(laid[last][1], 0, run.mesh, run.strategy, model_ranks(run.mesh, tensor=False))
        scene = scene_of(run.pipeline.completed(4, run.strategy)[0], flats, run.mesh, run.strategy)
        lost = {rank: tuple(op for op in ops if op.phase != f"B{AGAIN}") for rank, ops in scene.programs.items()}
        with pytest.raises(Refuted, match="has a gradient before its backward"):
            Machine(replace(scene, programs=lost)).run()


def test_settings_without_their_axis_are_refused() -> None:
    shared = replace(MIXTURE, shared_ffn=48)
    with pytest.raises(ValueError, match="sequence_parallel with a shared expert"):
        prove(replace(paper("shard=2 tensor=2 expert=2", decoder=shared), sequence=True))
    assert prove(paper("shard=2 tensor=2 expert=2", decoder=shared)).ranks == 4


# ---- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_norms": True, "family": "qwen3"}, "qwen3 has parameters other than those of llama"),
        ({"biases": True, "family": "gpt2"}, "gpt2 has parameters other than those of llama"),
    ],
)
def test_other_decoders_are_refused(changes: dict[str, Any], says: str) -> None:
    assert Decoder.of(replace(SMALL, qkv_bias=True)).num_tensors == SMALL.num_tensors + 3 * SMALL.layers
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **changes)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="4 heads of 8 cannot be shared by tensor=3"):
        prove(paper("tensor=3"))


def test_a_proof_needs_no_torch() -> None:
    """With the packages alone: ``import plait`` itself brings the engine."""
    root = Path(plait.__file__).parent
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"package = types.ModuleType('plait'); package.__path__ = [{str(root)!r}]; sys.modules['plait'] = package\n"
        "from plait.table.cells import TABLE\nfrom plait.table.mesh import Mesh\n"
        "from plait.referee.prove import Decoder, PaperRun, prove\nfrom plait.schedule.pipeline import Pipeline\n"
        "run = PaperRun(Decoder(3, 32, 43, 4, 2, 71), Mesh(shard=2), TABLE['zero3'], Pipeline(None, 1))\n"
        "assert prove(run).ranks == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
