"""Optimizers of 2026 and one process: element-wise under any row, the others on whole tensors, on a tensor axis too."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import tensor_models as models
import torch
from engine_cases import Made, agree, batches, net, plain, train
from optimizer_cases import AdEMAMix, Lion, Orthogonal, Shampoo
from torch import nn
from torch.optim import AdamW, Optimizer

import plait
from plait import run_threads as run
from plait.comm import Comm
from plait.predict.tensor import predict_update
from plait.step import Engine
from plait.table.collectives import UPDATE

CELLS = [("shard=3", "zero1"), ("shard=2", "zero2"), ("shard=3", "zero3")]


def outside(package: str, name: str, **options: Any) -> Any:
    """A class of another package, in its training mode where it has modes."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        made = getattr(pytest.importorskip(package), name)(parameters, lr=0.01, **options)
        if callable(mode := getattr(made, "train", None)):
            mode()
        return made

    return make


ELEMENTWISE: dict[str, Any] = {
    "lion": Lion,
    "ademamix": AdEMAMix,
    "pytorch_optimizer Lion": outside("pytorch_optimizer", "Lion"),
    "pytorch_optimizer AdEMAMix": outside("pytorch_optimizer", "AdEMAMix"),
    "schedulefree": outside("schedulefree", "AdamWScheduleFree"),
}
WHOLE: dict[str, Any] = {
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "orthogonal": Orthogonal,
    "shampoo": Shampoo,
    "pytorch_optimizer ScalableShampoo": outside(
        "pytorch_optimizer", "ScalableShampoo", start_preconditioning_step=1, skip_preconditioning_rank_lt=2
    ),
}


def declared(make: Any, parameters: Any) -> torch.optim.Optimizer:
    return plait.elementwise(make(parameters))


@pytest.mark.parametrize(("mesh", "row"), CELLS)
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_what_is_elementwise_is_declared_and_right_under_any_row(kind: str, mesh: str, row: str) -> None:
    make, data = ELEMENTWISE[kind], batches(3)
    truth = plain(net(), data, optimizer=make)
    with pytest.raises(
        ValueError, match=r'(?s)not one of torch.s .*cut="tensor".*ddp.*plait\.elementwise\(optimizer\)'
    ):
        train(net(), mesh, row, data, optimizer=make)
    if kind == "schedulefree" and row != "zero3":
        with pytest.raises(ValueError, match=r"changes parameters between steps.*use ddp or zero3"):
            train(net(), mesh, row, data, optimizer=partial(declared, make))
    else:
        agree(train(net(), mesh, row, data, optimizer=partial(declared, make)), truth, 1e-12)


@pytest.mark.parametrize(("mesh", "row"), CELLS)
@pytest.mark.parametrize("kind", WHOLE)
def test_what_looks_at_matrices_is_named_on_pieces_and_right_on_whole_tensors(kind: str, mesh: str, row: str) -> None:
    make, data = WHOLE[kind], batches(3)
    truth = plain(net(), data, optimizer=make)
    if mesh == "shard=3" and not kind.endswith("ScalableShampoo"):  # which a probe builds anew to begin in step 25
        with pytest.raises(ValueError, match="though it was declared element-wise: steps on a tensor of shape"):
            train(net(), mesh, row, data, optimizer=partial(declared, make))
    agree(train(net(), mesh, row, data, optimizer=make, cut="tensor"), truth, 1e-12)


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_soap_on_whole_tensors_has_the_bits_of_ddp(row: str) -> None:
    """Its bases are eigenvectors of sums that are singular at first: rounding turns them, so bits are compared."""
    make = outside("pytorch_optimizer", "SOAP", precondition_frequency=1)
    right, cut = (train(net(), "shard=3", name, batches(3), make, cut="tensor")[0] for name in ("ddp", row))
    assert all(torch.equal(cut.state[name], value) for name, value in right.state.items())
    with pytest.raises(ValueError, match="though it was declared element-wise"):
        train(net(), "shard=3", row, batches(3), optimizer=partial(declared, make))


def test_an_optimizer_that_keeps_gradients_is_named() -> None:
    """Its first momentum is the gradient itself, in whose memory the next step's sums are made."""
    with pytest.raises(ValueError, match=r"Shampoo keeps a gradient beyond its step \('momentum_buffer'\)"):
        train(net(), "shard=2", "zero1", batches(), outside("pytorch_optimizer", "Shampoo"), cut="tensor")


TENSOR_CELLS = [
    ("tensor=2", "ddp"),
    ("tensor=3", "ddp"),
    ("shard=2 tensor=2", "zero1"),
    ("shard=3 tensor=2", "zero2"),
    ("shard=2 tensor=3", "zero3"),
    ("pipe=2 tensor=2", "ddp"),
]


def matrices(kind: Any, parameters: Any) -> list[Optimizer]:
    """An optimizer for matrices, and AdamW for the rest: 4 rows leave a rank of three none."""
    given = list(parameters)
    others = [p for p in given if p.ndim != 2 or len(p) == 4]
    return [kind([p for p in given if p.ndim == 2 and len(p) != 4]), AdamW(others, lr=0.01, eps=1e-4)]


@pytest.mark.parametrize(("mesh", "row"), TENSOR_CELLS)
@pytest.mark.parametrize("kind", [Orthogonal, Shampoo, torch.optim.Adafactor])
def test_it_is_the_run_of_one_process(kind: Any, mesh: str, row: str) -> None:
    data, settings = models.token_batches(3), {"optimizer": partial(matrices, kind), "clip": 1.0}
    ranks = models.train(models.model(), mesh, row, list(data), cut="tensor", microbatches=2, **settings)
    models.same_run(ranks, models.alone(models.model(), data, **settings))


@pytest.mark.parametrize(("mesh", "row"), TENSOR_CELLS[:-1])
def test_messages_are_predicted_and_state_exists_once(mesh: str, row: str) -> None:
    """Every rank's messages, byte for byte; over the ranks of a data rank the state is that of one process."""

    def look(engine: Engine) -> Any:
        owner, index = engine.placed.owned_optimizer, engine.placed.stages[0].axis.index
        assert owner is not None
        made = owner.whole_updates[owner.optimizers[0]]
        predicted = [
            entry
            for one in made
            for entry in predict_update(one.piece.name, one.cut, ("tensor",), index, 8, owner=one.owner)
        ]
        measured = [entry for entry in engine.comm.ledger if entry.note.phase == UPDATE]
        assert predicted and Counter(measured) == Counter(predicted)
        assert all(one.whole is None or not one.whole.view.untyped_storage().nbytes() > 8 for one in made)
        regions = [(p.name, p.region) for p in engine.placed.pieces() if p.key == "m" and p.first]
        return regions, [(one.piece.name, one.owner) for one in made]

    make = partial(matrices, Orthogonal)
    ranks = models.train(models.model(), mesh, row, models.token_batches(1), optimizer=make, cut="tensor", look=look)
    regions = [region for record in ranks for region in record.seen[0]]
    assert len(regions) == len(set(regions)) == len({name for name, _ in regions}) == 11
    owners = dict(pair for record in ranks for pair in record.seen[1])
    assert set(owners.values()) == set(range(plait.Mesh.parse(mesh).tensor)), "work for everyone"


class Modes(Orthogonal):
    """Changes parameters while the model is evaluated."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def clips(engine: Engine) -> None:
    engine.backward(engine.model(torch.ones(2, 6)).sum(), 2)
    nn.utils.clip_grad_norm_(engine.optimizers[0].param_groups[0]["params"], 1.0)


@pytest.mark.parametrize(
    ("mesh", "kind", "then", "words"),
    [
        ("tensor=5", Orthogonal, None, r"dim 0 of 'product.weight', \[7, 6\], leaves a rank of 5 no piece"),
        ("tensor=2", Modes, None, r"train\(\) and eval\(\).*plait\.elementwise\(optimizer\)"),
        ("tensor=2", Orthogonal, clips, "reads p.grad"),
    ],
)
def test_what_cannot_be_is_refused_in_words(mesh: str, kind: Any, then: Any, words: str) -> None:
    def body(comm: Comm) -> None:
        product = nn.Linear(6, 7, bias=False)
        model = Made(lambda m, x: m.product(x), product=product, tensor_plan={"product": "gathered"})
        nn.init.ones_(model.product.weight)
        engine = Engine(model, comm, strategy="ddp", optimizer=kind(model.parameters()))
        if then is not None:
            then(engine)

    with pytest.raises(ValueError, match=words):
        run(mesh, body, deadline=20)
