"""Plans: bytes against the published tables, seconds against closed forms, and the search."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from waiting import calls_of

from plait.predict.activations import MEGATRON
from plait.predict.cluster import Link, Reached, preset
from plait.predict.duration import duration, pipe_seconds, product_seconds, rank_passes, share_of_turns, slowest_path
from plait.predict.footprint import footprints, fullest
from plait.predict.memory import held
from plait.predict.model import Transformer
from plait.predict.plan import Plan
from plait.predict.search import Candidate, Question, candidates, ranked, rows_in, smallest_change
from plait.predict.sent import members_on_host, message_seconds, messages
from plait.referee.prove import Decoder, PaperRun, prove
from plait.referee.prove.program import Settled, _Writer
from plait.referee.prove.scenes import of_ranks
from plait.schedule.actions import Kind, Line
from plait.schedule.pipeline import Pipeline
from plait.schedule.simulate import Costs, simulate
from plait.table.cells import TABLE, Strategy
from plait.table.mesh import Mesh

LLAMA = Transformer(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
GIB = 1 << 30

KORTHIKANTI = {  # hidden, layers, heads, pipe, chunks, samples of a microbatch -> GiB without, with both
    "22B": (6144, 48, 64, 1, None, 4, 59.25, 9.5625),
    "175B": (12288, 96, 96, 8, 3, 1, 66.84375, 12.3515625),
    "530B": (20480, 105, 128, 35, 3, 1, 114.0234375, 23.076171875),
    "1T": (25600, 128, 160, 64, None, 1, 131.25, 26.5625),
}


@pytest.mark.parametrize("name", KORTHIKANTI)
@pytest.mark.parametrize("lean", [False, True])
def test_bytes_of_the_first_stage_are_those_of_korthikanti(name: str, *, lean: bool) -> None:
    """Figure 1 of arXiv:2205.05198, for t = 8: bytes kept between passes of blocks, and states."""
    hidden, layers, heads, pipe, chunks, samples, plain, saved = KORTHIKANTI[name]
    model = Transformer(layers, hidden, 4 * hidden, heads, heads, 51200, gated=False, dropout=True)
    split = [layers // pipe // (chunks or 1)] * pipe * (chunks or 1)
    split[0], split[-1] = split[0] + 1, split[-1] + 2
    m, row = 4 * pipe, TABLE["ddp"].mixed("fp16")
    plan = Plan(model, preset("8xa100-80", pipe), Mesh(pipe=pipe, tensor=8), row, samples * m, 2048, m)
    plan = replace(plan, dtype="fp16", kernels=MEGATRON, chunks=chunks, schedule="interleaved" if chunks else None)
    plan = replace(plan, split=tuple(split) if pipe > 1 else None)
    plan = replace(plan, recompute="selective" if lean else None, sequence_parallel=lean)
    found = footprints(plan)[0].activations / GIB
    if pipe == 1:
        found -= footprints(replace(plan, model=replace(model, layers=1)))[0].activations / GIB * 1
        found *= layers / (layers - 1)
    assert found == pytest.approx(saved if lean else plain, rel=0.03)


def plan(**changed: object) -> Plan:
    base = Plan(LLAMA, preset("h100", 2), Mesh(shard=16, hosts=2), TABLE["zero3"].mixed("bf16"), 64, 4096, 4)
    return replace(base, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mesh": Mesh(shard=8)}, "has 8 ranks, the cluster 2 hosts x 8 devices = 16: give as many"),
        ({"microbatches": 3}, "over 16 data ranks x 3 microbatches = 48 parts: give a multiple of 48"),
        ({"mesh": Mesh(tensor=16)}, "tensor=16 does not divide 8 key and value heads"),
        ({"mesh": Mesh(pipe=16), "model": replace(LLAMA, layers=3)}, "6 links"),
        ({"mesh": Mesh(shard=16, context=16), "length": 4112}, "length 4112 is cut in 32 blocks .* as 4128"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(**changed)


def test_a_group_and_the_hosts() -> None:
    mesh = Mesh(pipe=2, shard=4, tensor=4)
    assert [members_on_host((axis,), mesh, 8) for axis in ("pipe", "shard", "tensor")] == [1, 2, 4]
    assert members_on_host(("shard", "replica"), Mesh(replica=4, shard=8), 8) == 8
    assert members_on_host(("replica",), Mesh(replica=4, shard=8), 8) == 1
    cut = [Mesh(shard=16, tensor=tensor, context=context) for tensor, context in ((1, 16), (2, 2), (4, 4), (8, 2))]
    assert [members_on_host(("context",), mesh, 8) for mesh in cut] == [8, 2, 2, 1]


def test_a_message_takes_its_link() -> None:
    cluster = replace(preset("h100", 2), inside=Link(100e9, 0), between=Link(80e9, 0), reached=Reached(network=1.0))
    inside = plan(cluster=cluster, mesh=Mesh(replica=2, shard=8, hosts=2))
    assert message_seconds("all_gather", 8e9, ("shard",), inside) == pytest.approx(7e9 / 100e9)
    # Eight groups over replicas share a host's network.
    assert message_seconds("all_reduce", 8e9, ("replica",), inside) == pytest.approx(8e9 / 10e9)
    whole = plan(cluster=cluster, mesh=Mesh(shard=16))
    assert message_seconds("all_gather", 16e9, ("shard",), whole) == pytest.approx(15e9 / 80e9)


MESHES = (
    Mesh(shard=4),
    Mesh(replica=2, shard=2),
    Mesh(shard=2, tensor=2),
    Mesh(pipe=4, shard=2),
    Mesh(pipe=2, shard=2, tensor=2),
    Mesh(shard=4, context=2),
    Mesh(pipe=2, shard=2, tensor=2, context=2),
)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("recompute", [None, "full"])
def test_bytes_are_those_that_a_proof_counts(mesh: Mesh, row: str, recompute: str | None) -> None:
    """Compares bytes sent by all ranks and held by the fullest with the proof of every message and buffer."""
    sizes = {"layers": 13, "ffn": 352, "heads": 8, "kv_heads": 4, "vocab": 512}
    strategy = TABLE[row].mixed("bf16")
    pipeline = Pipeline("1f1b" if mesh.pipe > 1 else None, mesh.pipe)
    paper = PaperRun(
        Decoder(hidden=128, **sizes), mesh, strategy, pipeline, 8, batch=2, length=64, bucket=0, recompute=recompute
    )
    proved = prove(paper)
    cluster = replace(preset("h100"), devices=mesh.size)
    found = Plan(Transformer(hidden=128, **sizes), cluster, mesh, strategy, 16 * mesh.data_size, 64, 8)
    found = replace(found, recompute=recompute)
    ranks = mesh.size / mesh.pipe
    sent = sum(one.bytes for share in found.shares for one in messages(found, share)) * ranks
    assert sent == pytest.approx(proved.traffic.bytes, rel=2e-3)
    state, reduced, gathered = 0, 0, 0
    lines = pipeline.completed(8, strategy)
    for (stage, tensor), units in paper.laid().items():
        rank = mesh.rank(pipe=stage, tensor=tensor)
        sizes_of = sorted(flat.numel * flat.itemsize_in(strategy.grads) for unit in units for flat in unit.flats)
        state = max(state, held(units, mesh, strategy, rank).total)
        reduced = max(reduced, sum(sizes_of[-2:]) if mesh.count(strategy.grads.split) > 1 else 0)
        line = tuple(action for action in lines[stage] if action.stage == stage)
        flats = [of_ranks(unit, i, mesh, strategy, [rank])[rank] for unit in units for i in range(len(unit.flats))]
        gathered = max(gathered, open_at_once(line, flats, strategy, ahead=mesh.pipe == 1))
    most = fullest(found)
    assert (most.state, most.reduced) == (pytest.approx(state, rel=1e-3), pytest.approx(reduced, rel=1e-3))
    assert most.gathered == pytest.approx(gathered, rel=0.1)


def open_at_once(line: Line, flats: Sequence[Settled], row: Strategy, *, ahead: bool) -> int:
    """The most bytes of whole parameters that are open or kept in a stage, and of the largest buffer where one is
    gathered ahead."""
    writers = [_Writer(flat, holds=any(action.kind is Kind.UNSHARD for action in line)) for flat in flats]
    here, most = dict[object, int](), 0
    for one, op in ((writer, op) for action in line for writer in writers for op in writer.action(action)):
        flat = one.flat.layout
        if op.kind in ("open", "keep"):
            numel = flat.numel if op.kind == "open" else op.stop - op.start
            here[op.kind, one] = numel * flat.itemsize_in(row.params)
        elif op.kind in ("close", "forget"):
            here.pop(("open" if op.kind == "close" else "keep", one), None)
        most = max(most, sum(here.values()))
    return most + max(own.layout.numel * own.layout.itemsize_in(row.params) for own in flats) * (ahead and most > 0)


def test_a_stage_hands_on_the_part_of_the_stream_that_it_has() -> None:
    one = plan(mesh=Mesh(pipe=4, shard=2, tensor=2), microbatches=4, schedule="1f1b")

    def handed(of: Plan) -> float:
        return next(sent.bytes for sent in messages(of, of.shares[1]) if sent.kind == "send")

    assert handed(one) == 2 * 4 * one.samples * one.length * one.model.hidden * 2
    assert handed(replace(one, sequence_parallel=True)) == handed(one) / 2
    links = {"between": Link(1e9, 0), "inside": Link(1e12, 0)}
    one = replace(one, cluster=replace(one.cluster, hosts=8, devices=2, **links))
    assert pipe_seconds(replace(one, scatters=True)) == pytest.approx(pipe_seconds(one) / 2, rel=0.01)


def test_a_tied_head_gathers_the_embedding_again_and_stages_add_their_gradients() -> None:
    tied = replace(LLAMA, tied=True)
    embedding = LLAMA.vocab * LLAMA.hidden

    def bytes_of(phase: str, of: Plan, rank: int = 0) -> float:
        return sum(sent.bytes for sent in messages(of, of.shares[rank]) if sent.phase == phase)

    one, two = plan(model=tied), plan()
    assert bytes_of("forward", one) == pytest.approx(bytes_of("forward", two), rel=1e-9)  # as an untied head's
    assert bytes_of("microbatch", one) < bytes_of("microbatch", two)
    staged = plan(model=tied, mesh=Mesh(pipe=4, shard=4), microbatches=4)
    assert [bytes_of("tied", staged, rank) for rank in range(4)] == [4 * embedding, 0, 0, 4 * embedding]


def test_a_pipeline_waits_as_its_formula_says() -> None:
    even = Transformer(layers=28, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=256)
    for m in (4, 8, 16):
        one = plan(model=even, mesh=Mesh(pipe=4, tensor=4), microbatches=m, batch=m, split=(8, 7, 7, 9))
        found = duration(one)
        busy = found.products + found.attention + found.traffic + found.tensor + found.launch
        assert found.bubble / (busy + found.bubble) == pytest.approx(3 / (m + 3), rel=0.05)


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    "ranks",  # forward and backward of each
    [((3, 6), (1, 2)), ((1, 2), (3, 6)), ((4, 4), (4, 2)), ((1, 2), (3, 6), (1, 2), (1, 2)), ((2, 4),) * 3 + ((1, 2),)],
)
def test_unequal_stages_wait_as_the_simulator_says(order: str, ranks: tuple[tuple[float, float], ...]) -> None:
    p = len(ranks)
    for m in (1, 2, 4, 16):
        one = plan(mesh=Mesh(pipe=p, tensor=16 // p), microbatches=m, batch=m, schedule=order)
        half = tuple(backward / 2 for _, backward in ranks)
        costs = Costs(forward=tuple(forward for forward, _ in ranks), input=half, weight=half)
        due = simulate(Pipeline(order, p).written(m), costs).makespan
        assert slowest_path(one, ranks, 0.0)[1] == pytest.approx(due, rel=1e-9)


def test_ranks_that_share_cores_use_the_time_in_which_others_wait() -> None:
    shared = replace(preset("h100"), devices=4, turns=2.0)
    assert share_of_turns(shared, 1.0, 1.0, 1.0) == 1  # no rank waits
    assert share_of_turns(shared, 0.25, 1.0, 1.0) == 0.5  # all the others do
    assert share_of_turns(shared, 0.5, 1.0, 1.0) == pytest.approx(0.5 * 20 / 27 + 0.75 * 6 / 27 + 1 / 27)
    assert share_of_turns(replace(shared, turns=1.0), 0.25, 1.0, 1.0) == 1


def test_recomputation_costs_time_and_saves_bytes() -> None:
    kept = [fullest(plan(recompute=mode)).total for mode in (None, "selective", "full")]
    took = [duration(plan(recompute=mode)).total for mode in (None, "selective", "full")]
    assert kept[0] >= kept[1] > kept[2] and took[0] < took[1] < took[2]
    whole = LLAMA.flops(4096) * 64 * 4096 / (16 * 989.4e12)
    assert Candidate.of(plan()).mfu == pytest.approx(whole / duration(plan()).total)


def test_a_context_axis_is_proposed_where_samples_are_long() -> None:
    """The fastest layout cuts samples of 131,072 tokens in time, and none of 4,096."""
    rows = [TABLE["zero3"].mixed("bf16")]
    for length, tried, best in ((4096, {1}, 1), (131_072, {1, 2, 4, 8, 16}, 8)):
        found = ranked(candidates(Question(LLAMA, preset("h100", 2), 16, length), rows, everything=False))
        assert {one.plan.mesh.context for one in found} == tried
        assert found[0].fits and found[0].plan.mesh.context == best
    assert found[0].duration.context > 0 and found[0].plan.sizes.tokens == 131_072 / 8
    assert 0 < found[0].plan.sizes.masks < found[0].fullest.working


def test_what_other_engines_do_costs_what_they_move() -> None:
    """Operators that run one by one, a recomputation by operators, and gradients that are added to those before."""
    share, base = plan().shares[0], plan(recompute=None)
    there, back = rank_passes(base, share)
    eager, _ = rank_passes(replace(base, kernels=replace(base.kernels, eager=True)), share)
    rate = base.cluster.device.bandwidth * base.cluster.reached.memory
    moved = 2 * 32 * 4096 + 4 * 14336 + 16 * (32 + 8) * 128  # bytes of a token: two norms, silu, the rotated heads
    more = 32 * base.samples * base.length * moved * base.cluster.reached.passes / rate
    assert eager.traffic - there.traffic == pytest.approx(more)
    _, again = rank_passes(replace(base, repeats=(0.5, 0.0, 1.0, 0.0)), share)
    blocks, _ = rank_passes(base, share._replace(embed=False, norm=False, head=False))
    assert again.products - back.products == pytest.approx(blocks.products / 2)
    assert again.traffic - back.traffic == pytest.approx(blocks.traffic) and again.attention == back.attention
    _, alone = rank_passes(replace(base, batch=16, microbatches=1), share)
    _, fused = rank_passes(replace(base, kernels=replace(base.kernels, fused_sums=True)), share)
    assert fused.traffic == alone.traffic
    assert back.traffic - alone.traffic == pytest.approx(
        LLAMA.num_parameters * (2 + 4) / rate
    )  # zero3: shards are added
    _, ddp = rank_passes(replace(base, strategy=TABLE["ddp"].mixed("bf16")), share)
    assert ddp.traffic - alone.traffic == pytest.approx(LLAMA.num_parameters * (2 + 2 * 4) / rate)


def test_one_change_makes_it_fit_or_two() -> None:
    small = preset("8xa100-40", 2)
    found = smallest_change(plan(cluster=small), rows_in("bf16", mixed=True))
    assert found is not None and found[0] == "--recompute full" and found[1].fits
    assert smallest_change(plan(cluster=preset("8xrtx4090", 2), strategy=TABLE["ddp"]), [TABLE["ddp"]]) is None
    found = smallest_change(plan(cluster=small, strategy=TABLE["ddp"].mixed("bf16")), rows_in("bf16", mixed=True))
    assert found is not None and found[0].startswith("--recompute full --strategy ")


def test_the_search_calls_little_and_ranks_what_fits_first() -> None:
    asked = Question(Transformer(126, 16384, 53248, 128, 8, 128256), preset("h100", 2048), 16384, 8192)
    plans = islice(candidates(asked, rows_in("bf16", mixed=True)), 300)
    found = list[Candidate]()
    assert calls_of(lambda: found.extend(ranked(plans))) < 4000 * 300  # 10,000 plans in ten seconds
    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    fitting = [one.duration.total for one in found if one.fits]
    assert fitting == sorted(fitting)


def test_columns_that_are_no_multiple_of_8_leave_the_tensor_cores() -> None:
    gpu = preset("a100-80")
    took = {k: product_seconds(8192, 2048, k, gpu, "fp16") for k in (50256, 50257)}
    assert took[50257] == pytest.approx(2 * 8192 * 2048 * 50257 / 78e12) and took[50257] > 2.5 * took[50256]
    assert product_seconds(8192, 2048, 50257, replace(gpu, kind="cpu"), "fp16") < 1.01 * took[50256]
