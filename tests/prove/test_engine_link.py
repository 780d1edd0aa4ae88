"""The engine does what is proved: its buffers, and every message of a step, byte for byte.

Worlds of many ranks are traced: one process plays a rank, and an echo replaces the others.  If stages send to each
other, ranks are threads.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trace_world import TraceComm

from plait.anymodel import plan_of
from plait.anymodel.context import use_context_axis
from plait.anymodel.experts import use_expert_axis
from plait.comm import Comm, run
from plait.comm.base import DONE, Operation, Work
from plait.predict.context import predict_context
from plait.predict.cost import differences
from plait.predict.experts import predict_experts
from plait.predict.model import Latent
from plait.predict.tensor import predict_tensor
from plait.referee.prove import Decoder, PaperRun, prove
from plait.referee.prove.program import COLLECTIVES, Program, write_program
from plait.referee.prove.scenes import of_ranks
from plait.run.models import hf
from plait.schedule.actions import ACTIVATION, GRADIENT, MESSAGES, SENDS, Line, carries
from plait.schedule.pipeline import Pipeline
from plait.step import Engine, empty_parameters
from plait.table.agreement import COUNTS, NUMBER_BYTES, num_reported
from plait.table.cells import TABLE, Strategy
from plait.table.collectives import Entry, Note, bytes_sent
from plait.table.flat import Cut
from plait.table.mesh import AXES, Mesh
from plait.table.parallelism import Recompute
from plait.zero.planned import layouts_of

pytest.importorskip("transformers")

SIZES = hf.HFConfig(
    vocabulary=71, num_layers=5, width=32, num_heads=4, num_kv_heads=2, hidden=43, max_length=8, dropout=0
)
DECODER = Decoder(layers=5, hidden=32, ffn=43, heads=4, kv_heads=2, vocab=71)
BATCH, LENGTH, MICROBATCHES = 2, 6, 3


class Echo(TraceComm):
    """The others bring what this rank brings."""

    def _all_gather(self, operation: Operation, out: Tensor, piece: Tensor) -> Work:
        out.view(len(operation.group.ranks), -1).copy_(piece.detach().clone())
        return DONE

    def _broadcast(self, operation: Operation, tensor: Tensor) -> Work:
        if operation.root != operation.group.index:
            tensor.zero_()
        return DONE

    def _reduce_scatter(self, operation: Operation, out: Tensor, whole: Tensor) -> Work:
        out.copy_(whole.view(len(operation.group.ranks), -1)[operation.group.index].clone())
        return DONE


def measured(
    comm: Comm,
    row: str,
    order: str | None,
    cut: Cut,
    hold: int | None,
    recompute: Recompute | None = None,
    ring: bool = False,
    sequence: bool = False,
    all_to_all: bool = False,
    build: Callable[[], nn.Module] = lambda: use_context_axis(hf.build(SIZES)),
) -> tuple[object, tuple[Entry, ...]]:
    """The engine's buffers on a rank, and the ledger of its second step."""
    with empty_parameters():
        model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"strategy": row, "schedule": order, "cut": cut, "hold": hold, "optimizer": optimizer}
    settings |= {"recompute": recompute, "ring_attention": ring}
    settings |= {"sequence_parallel": sequence, "all_to_all": all_to_all}
    if comm.mesh.tensor > 1:
        settings |= {"tensor_plan": plan_of(model, sequence=sequence)}
    engine = Engine(model, comm, loss_fn=hf.loss_sum, count_fn=hf.token_count, **settings)
    tokens = torch.arange(BATCH * (LENGTH + 1)).view(BATCH, -1) % 71
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    engine.step([batch] * MICROBATCHES)
    mark = len(comm.ledger)
    engine.step([batch] * MICROBATCHES)
    layouts = {number: layouts_of(stage.unsharding) for number, stage in engine.placed.stages.items()}
    checks = "setup"  # what the engine compares in its first steps, and no part of a step
    return layouts, tuple(entry for entry in comm.ledger.since(mark) if entry.note.phase != checks)


def proved(paper: PaperRun, rank: int) -> tuple[object, tuple[Entry, ...]]:
    """The same of the programs that are proved."""
    mesh, row, here = paper.mesh, paper.strategy, paper.mesh.coordinates(rank)
    laid, links, owner = paper.laid(), paper.links(), paper.pipeline.owner
    line = paper.pipeline.completed(paper.microbatches, row)[here["pipe"]]
    stages = {s: laid[s, here["tensor"]] for s in owner if owner[s] == here["pipe"]}
    found = list(agreements(line, paper))
    for s in stages:
        own = tuple(action for action in line if action.stage == s)
        for unit in stages[s]:
            flats = (of_ranks(unit, index, mesh, row, [rank])[rank] for index in range(len(unit.flats)))
            found += (
                entry for flat in flats for entry in entries(write_program(own, flat, mesh), unit.name, mesh, rank)
            )
        shapes = [(BATCH, LENGTH // mesh.context)] * MICROBATCHES
        found += predict_tensor(
            paper.decoder.sites(links[s], sequence=paper.cuts_time), shapes, mesh, 4, sequence=paper.cuts_time
        )
        gathered, tokens = paper.decoder.gathered(links[s], mesh.tensor), [math.prod(one) for one in shapes]
        found += predict_context(gathered, mesh, tokens, 4, ring=paper.ring)
        layers = {
            link: (paper.decoder.hidden, paper.decoder.chosen) for link in links[s] if paper.decoder.experts_of(link)
        }
        found += predict_experts(layers, mesh, tokens, 4, all_to_all=paper.all_to_all)
    return stages, tuple(found)


def entries(program: Program, unit: str, mesh: Mesh, rank: int) -> Iterator[Entry]:
    """The lines of a ledger that a program writes."""
    for op in (op for op in program if op.kind in COLLECTIVES):
        size, root = (op.stop - op.start) * 4, mesh.index(rank, op.axes) == op.root
        sent = bytes_sent(op.kind, size, mesh.count(op.axes), root=root)
        yield Entry(op.kind, op.axes, size, sent, Note(op.phase, unit, op.microbatch))


def agreements(line: Line, paper: PaperRun) -> Iterator[Entry]:
    """The lines of the messages between stages, and of what all ranks agree on."""
    mesh = paper.mesh
    for action in (action for action in line if action.kind in MESSAGES):
        value, size = carries(action), BATCH * LENGTH // mesh.context * DECODER.hidden * 4
        note = Note(ACTIVATION if value.way == "F" else GRADIENT, f"stage {value.stage}", value.microbatch)
        kind = "send" if action.kind in SENDS else "recv"
        yield Entry(kind, ("pipe",), size, bytes_sent(kind, size, 2), note)
    for word, numbers in (("count", COUNTS), ("report", num_reported(MICROBATCHES, paper.decoder.num_tensors))):
        size = NUMBER_BYTES * numbers * mesh.size
        if mesh.size > 1:
            yield Entry("all_gather", AXES, size, bytes_sent("all_gather", size, mesh.size), Note(word))


def by_name(stages: Any) -> dict[int, Any]:
    """The buffers of each stage."""
    return {s: {unit.name: unit for unit in units} for s, units in stages.items()}


def paper_run(mesh: Mesh, row: Strategy, order: str | None, cut: Cut = "element", hold: int | None = 1) -> PaperRun:
    pipeline = Pipeline(order, mesh.pipe, hold=hold)
    return PaperRun(DECODER, mesh, row, pipeline, MICROBATCHES, cut=cut, batch=BATCH, length=LENGTH)


TRACED = (
    ("ddp", "shard=64", 37, "element"),
    ("zero1", "replica=4 shard=16", 63, "element"),
    ("zero1", "shard=3", 1, "tensor"),
    ("zero2", "shard=16 tensor=2", 9, "element"),
    ("zero3", "replica=2 shard=32", 40, "element"),
    ("zero3", "replica=3", 2, "tensor"),
    ("zero3_keep", "shard=64", 0, "element"),
    ("hsdp", "replica=16 shard=2 tensor=2", 31, "element"),
    ("psdp", "replica=8 shard=8", 50, "element"),
    ("hpz", "replica=8 shard=4 tensor=2", 13, "element"),
    ("ddp", "replica=8 shard=8 hosts=8", 21, "element"),
    ("zero1", "replica=3 shard=2 hosts=3", 4, "tensor"),
    ("zero3", "replica=4 shard=6 tensor=2 hosts=4", 25, "element"),
    ("zero3", "shard=48 context=3", 40, "element"),
    ("zero1", "replica=2 shard=6 tensor=2 context=3", 11, "tensor"),
)


@pytest.mark.parametrize(("row", "mesh", "rank", "cut"), TRACED)
def test_a_traced_rank_sends_what_was_proved(row: str, mesh: str, rank: int, cut: Cut) -> None:
    on = Mesh.parse(mesh)
    paper = paper_run(on, TABLE[row], None, cut)
    layouts, sent = measured(Echo(on, rank), row, None, cut, 1)
    stages, program = proved(paper, rank)
    assert layouts == stages
    assert differences(program, sent) == []
    assert prove(paper).ranks == on.size


DEEPSEEK = Decoder(
    layers=3, hidden=32, ffn=24, heads=4, kv_heads=4, vocab=71, experts=8, chosen=2, family="deepseek_v3",
    shared_ffn=24, dense_layers=1, dense_ffn=43, head_dim=7, latent=Latent(10, 12, 4, 4, 6),
)  # fmt: skip


MIXTRAL = Decoder(layers=3, hidden=32, ffn=24, heads=4, kv_heads=2, vocab=71, experts=8, chosen=2, family="mixtral")


def stock(kind: str, **sizes: Any) -> nn.Module:
    """A model of transformers; its experts, if it has any, are on the expert axis."""
    import transformers

    with hf.BUILDING:
        usual = {"vocab_size": 71, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 8}
        config = getattr(transformers, f"{kind}Config")(**usual, **sizes)
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model if kind == "Llama" else use_expert_axis(model)


deepseek = partial(
    stock, "DeepseekV3", num_hidden_layers=3, intermediate_size=43, moe_intermediate_size=24, first_k_dense_replace=1,
    n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=10,
    kv_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6,
)  # fmt: skip
mixtral = partial(stock, "Mixtral", num_hidden_layers=3, num_key_value_heads=2, intermediate_size=24)
tied = partial(stock, "Llama", num_hidden_layers=5, num_key_value_heads=2, intermediate_size=43)

MODELS: dict[str, tuple[Decoder, Callable[[], nn.Module]]] = {
    "llama": (DECODER, lambda: use_context_axis(hf.build(SIZES))),
    "tied": (replace(DECODER, tied=True), partial(tied, tie_word_embeddings=True)),
    "mixtral": (MIXTRAL, partial(mixtral, num_local_experts=8, num_experts_per_tok=2)),
    "balanced": (replace(MIXTRAL, chosen=8), partial(mixtral, num_local_experts=8, num_experts_per_tok=8)),
    "deepseek": (DEEPSEEK, deepseek),
}
LAYOUTS: list[tuple[str, str, str, str | None, dict[str, Any]]] = [
    # model, row, mesh, order, settings
    ("llama", "zero3", "pipe=2 shard=2", "1f1b", {"hold": None}),
    ("mixtral", "zero1", "shard=4 expert=2", None, {"cut": "tensor"}),
    ("llama", "ddp", "pipe=3 shard=2", "1f1b", {}),
    ("llama", "zero2", "pipe=2 tensor=2 shard=2", "zb_h1", {}),
    ("llama", "zero3", "pipe=2 shard=3", "interleaved", {}),
    ("llama", "zero3_keep", "pipe=2 replica=2", "zbv", {"hold": 0}),
    ("llama", "hsdp", "pipe=2 replica=2 shard=2", "dualpipe_v", {}),
    ("llama", "hpz", "pipe=2 replica=2 shard=2", "interleaved", {"hold": None}),
    ("llama", "psdp", "pipe=2 replica=2 shard=2 tensor=2", "gpipe", {}),
    ("llama", "zero2", "pipe=2 replica=2 shard=2 hosts=4", "1f1b", {}),
    ("llama", "zero1", "pipe=2 shard=3 context=3", "interleaved", {}),
    ("llama", "zero3", "pipe=2 shard=3 tensor=2 context=3", "1f1b", {}),
    ("deepseek", "zero1", "pipe=2 shard=2 expert=2", "1f1b", {}),
    ("deepseek", "zero3", "shard=4 expert=4", None, {}),
    ("mixtral", "ddp", "shard=4 expert=4", None, {}),
    ("mixtral", "zero3", "shard=4 expert=2", None, {}),
    ("mixtral", "psdp", "replica=2 shard=2 expert=2", None, {}),
    ("mixtral", "zero3", "pipe=2 shard=2 expert=2", "1f1b", {}),
    *(("llama", "zero3", "tensor=2 shard=2", None, {"recompute": again}) for again in ("full", "selective")),
    *(("llama", "zero3", "shard=3 context=3", None, {"recompute": again}) for again in ("full", "selective")),
    ("llama", "zero3", "shard=3 context=3", None, {"recompute": "full", "ring": True}),
    ("llama", "zero3", "shard=2 tensor=2", None, {"sequence": True}),
    ("llama", "zero1", "pipe=2 shard=2 tensor=2", "1f1b", {"sequence": True}),
    ("llama", "zero2", "shard=3 tensor=2 context=3", None, {"sequence": True}),
    ("balanced", "zero3", "shard=2 tensor=2 expert=2", None, {"sequence": True}),
    ("balanced", "zero1", "shard=4 expert=2", None, {"all_to_all": True}),
    ("balanced", "zero3", "shard=2 tensor=2 expert=2", None, {"all_to_all": True}),
    ("tied", "ddp", "shard=3", None, {}),
    ("tied", "zero3", "shard=3", None, {}),
    ("tied", "hpz", "replica=2 shard=2", None, {}),
    ("tied", "zero3_keep", "shard=2 tensor=2", None, {}),
    ("tied", "zero1", "pipe=2 shard=2", "1f1b", {}),
    ("tied", "zero3", "pipe=2 shard=3", "interleaved", {}),
    ("tied", "zero2", "pipe=2 shard=2", "zbv", {}),
]
NOT_WRITTEN = ("tied", "recompute", "sequence", "all_to_all")
"""The programs here have no lines for these; the proof counts them all the same."""


@pytest.mark.parametrize(("model", "row", "mesh", "order", "how"), LAYOUTS)
def test_ranks_send_what_was_proved(model: str, row: str, mesh: str, order: str | None, how: dict[str, Any]) -> None:
    on, (decoder, build) = Mesh.parse(mesh), MODELS[model]
    cut, hold = how.get("cut", "element"), how.get("hold", 1)
    more = {name: value for name, value in how.items() if name not in ("cut", "hold")}
    paper = replace(paper_run(on, TABLE[row], order, cut, hold), decoder=decoder, **more)
    found = run(on, lambda comm: measured(comm, row, order, cut, hold, build=build, **more))
    for rank, (layouts, ledger) in enumerate(found):
        stages, program = proved(paper, rank)
        assert by_name(layouts) == by_name(stages) and (model != "llama" or layouts == stages), rank
        assert {model, *how} & {*NOT_WRITTEN} or differences(program, ledger) == [], rank
    total, lines = prove(paper).traffic, [entry for _, ledger in found for entry in ledger]
    assert (total.messages, total.bytes) == (len(lines), sum(entry.sent for entry in lines))
