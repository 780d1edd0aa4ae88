"""The tensor axis seen from one rank, and embedding and cross-entropy over a cut vocabulary: torch's on the whole."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from parallel_cases import is_close, lines, on_ranks, part_of, together, values
from torch import Tensor

import plait
from plait.anymodel.tensor.functions import Share, split, unsplit
from plait.comm import Comm
from plait.sharded import ShardedTensor
from plait.sharded.layout import Layout
from plait.table.collectives import Note
from plait.table.tensor_cut import TensorCut
from plait.table.tensor_plan import BACKWARD, FORWARD
from plait.tensor import TensorAxis, cross_entropy_sum
from plait.tensor.axis import Divide, Gather, Leave
from plait.tensor.pieces import assemble, piece_of
from plait.tensor.vocabulary import embedding

WAYS = [1, 2, 3, 4]
NOTE = Note(FORWARD, "here")


def test_a_sum_takes_a_tensor_that_is_not_contiguous() -> None:
    shares = [values(5, 2, seed=rank).t() for rank in range(3)]
    for ours in on_ranks(3, lambda axis: axis.start_sum(shares[axis.index], NOTE)()):
        is_close(ours, shares[0] + shares[1] + shares[2])


@each_rank("tensor=3")
def test_unequal_parts_travel_padded_to_the_largest(comm: Comm) -> None:
    """7 steps of time over 3 ranks are 3, 3, 1 and travel as 3, 3, 3: 2 x 9 x 5 elements of 8 bytes."""
    axis = TensorAxis(comm, sequence=True)
    axis.length = 7
    piece = axis.start_scatter(values(2, 7, 5), NOTE)()
    axis.start_gather(piece, 1, 7, NOTE)()
    assert [entry.bytes for entry in comm.ledger.entries] == [720, 720]


class Travel(NamedTuple):
    """A way of an activation [2, time, 5]: how a rank has it before and after, and what is sent."""

    apply: Callable[[Tensor, TensorAxis], Tensor]
    before: int | str
    """The dim in which a rank has its part; ``"whole"``, or ``"share"`` of a sum."""
    after: int | str
    sent: list[tuple[str, str]]
    sequence: bool = False


TRAVELS = {
    "leave": Travel(lambda x, a: Leave.apply(x, a, "here", False), "share", "whole", [("all_reduce", FORWARD)]),
    "leave in time": Travel(
        lambda x, a: Leave.apply(x, a, "here", True),
        "share",
        1,
        [("reduce_scatter", FORWARD), ("all_gather", BACKWARD)],
        sequence=True,
    ),
    "gather": Travel(lambda x, a: Gather.apply(x, a, 2, 5, "here"), 2, "whole", [("all_gather", FORWARD)]),
    "divide": Travel(lambda x, a: Divide.apply(x, a, 2, "here"), "whole", 2, [("all_gather", BACKWARD)]),
    "split": Travel(lambda x, a: split(x, a, "here"), "whole", 1, [("all_gather", BACKWARD)], sequence=True),
    "unsplit": Travel(lambda x, a: unsplit(x, a, "here"), 1, "whole", [("all_gather", FORWARD)], sequence=True),
}


@pytest.mark.parametrize("time", [1, 7, 8])
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("name", TRAVELS)
def test_an_activation_and_its_gradient_travel(name: str, ways: int, time: int) -> None:
    """The gradient of a part is a part of the whole gradient, that of a share is the whole one."""
    apply, before, after, sent, sequence = TRAVELS[name]
    shares, probe = [values(2, time, 5, seed=rank) for rank in range(ways)], values(2, time, 5, seed=9)
    whole = sum(shares, torch.zeros(2, time, 5, dtype=torch.float64))

    def here(tensor: Tensor, how: int | str, axis: TensorAxis) -> Tensor:
        return part_of(tensor, how, axis) if isinstance(how, int) else tensor.clone()

    def body(axis: TensorAxis) -> tuple[Tensor, ...]:
        x = (shares[axis.index].clone() if before == "share" else here(whole, before, axis)).requires_grad_()
        y = apply(x * 1, axis)
        (y * here(probe, after, axis)).sum().backward()
        assert lines(axis) == ([] if ways == 1 else [(*message, "here") for message in sent])
        assert name != "split" or axis.length == time, "what follows knows how long the stream is"
        return y.detach(), here(whole, after, axis), x.grad, here(probe, before, axis)

    for y, wanted, gradient, due in on_ranks(ways, body, sequence=sequence, length=time):
        is_close(y, wanted)
        assert torch.equal(gradient, due)


@pytest.mark.parametrize("last", [None, 2, 5])
@pytest.mark.parametrize("ways", WAYS)
def test_what_cut_computation_reads_sums_its_gradient(ways: int, last: int | None) -> None:
    """Only that of the ``last`` features: the others' is whole on each rank.  Nothing is sent for what does not train,
    and a gradient that others hold too is left alone."""
    probes = [values(2, 3, 5, seed=rank) for rank in range(ways)]
    total = sum(probes, torch.zeros(2, 3, 5, dtype=torch.float64))

    def body(axis: TensorAxis) -> tuple[Tensor | None, ...]:
        x, fixed = values(2, 3, 5, seed=7).requires_grad_(), values(4)
        shared, other = Share.apply(axis, "experts", last, x * 1, fixed)
        given = probes[axis.index].clone()
        shared.backward(given)
        assert not other.requires_grad and torch.equal(shared, x)
        assert torch.equal(given, probes[axis.index])
        assert lines(axis) == ([] if ways == 1 else [("all_reduce", BACKWARD, "experts")])
        wanted = probes[axis.index].clone()
        wanted[..., -(last or 5) :] = total[..., -(last or 5) :]
        return x.grad, wanted

    for gradient, wanted in on_ranks(ways, body):
        is_close(gradient, wanted)


@pytest.mark.parametrize("given", [torch.arange(4), (torch.ones(2, 4, 3),)])
def test_only_a_stream_is_cut_in_time(given: object) -> None:
    """Position ids, say, that a module gets as its first argument."""
    with pytest.raises(ValueError, match=r"'pos', whose stream .* not \[batch, time, width\]: say 'split'"):
        on_ranks(2, lambda axis: split(given, axis, "pos"), sequence=True)


@pytest.mark.parametrize("ways", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "parts", "grain"),
    [
        ((5, 3), 0, (5,), 1),
        ((3, 7), 1, (7,), 1),
        ((11,), 0, (11,), 1),
        ((11,), 0, (4, 7), 1),
        ((9, 2), 0, (2, 3, 4), 1),
        ((96, 2), 0, (48, 24, 24), 2),
        ((2, 3, 5), 2, (5,), 1),
        ((3, 2), 0, (3,), 1),
    ],
)
def test_the_whole_comes_back_from_its_pieces(
    shape: tuple[int, ...], dim: int, parts: tuple[int, ...], grain: int, ways: int
) -> None:
    whole, cut = values(*shape), TensorCut(shape, dim, ways, parts, grain)
    pieces = [piece_of(whole, cut, index) for index in range(ways)]
    assert [tuple(piece.shape) for piece in pieces] == [cut.local_shape(index) for index in range(ways)]
    assert torch.equal(assemble(pieces, cut), whole)


def test_a_piece_of_one_part_shares_the_memory_of_the_whole() -> None:
    whole = values(5, 3)
    piece_of(whole, TensorCut((5, 3), 0, 2, (5,)), 1).zero_()
    assert whole[3:].count_nonzero() == 0 and whole[:3].count_nonzero() == 9


ROWS = 11
"""Over 2 ranks 6, 5, over 3 ranks 4, 4, 3, over 4 ranks 3, 3, 3, 2."""

TOKENS_BT = torch.tensor([[0, 10, 3, 3, 5, 6, 2], [9, 4, 8, 7, 1, 10, 3]])


@pytest.mark.parametrize("shape", [(14,), (2, 7), (7, 2, 1)])
def test_tokens_of_any_shape(shape: tuple[int, ...]) -> None:
    table, tokens = values(ROWS, 3), TOKENS_BT.reshape(shape)
    found = on_ranks(3, lambda axis: embedding(tokens, part_of(table, 0, axis), ROWS, None, axis, "embed"))
    assert all(torch.equal(x, F.embedding(tokens, table)) for x in found)


def test_a_rank_whose_rows_are_not_asked_for_gets_zeros_as_gradient() -> None:
    tokens = torch.tensor([[0, 1, 1]])

    def body(axis: TensorAxis) -> Tensor | None:
        mine = part_of(values(ROWS, 3), 0, axis).requires_grad_()
        embedding(tokens, mine, ROWS, None, axis, "embed").sum().backward()
        return mine.grad

    first, second = on_ranks(2, body)
    assert torch.equal(second, torch.zeros(5, 3, dtype=torch.float64))
    assert torch.equal(first[:3, 0], torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("token", [-1, ROWS, ROWS + 3])
def test_a_token_outside_the_table_is_an_error_as_everywhere(token: int) -> None:
    with pytest.raises(IndexError, match="the vocabulary is 0 to 10"):
        on_ranks(2, lambda axis: embedding(torch.tensor([[token]]), values(6 - axis.index, 3), ROWS, None, axis, "e"))


def cut_loss(logits: Tensor, targets: Tensor, ways: int, scale: float = 1.0, **settings: Any) -> list[Any]:
    """Loss, this rank's gradient and ledger, on every rank."""

    def body(axis: TensorAxis) -> Any:
        local = part_of(logits, logits.dim() - 1, axis).requires_grad_()
        layout = Layout(((),) * (logits.dim() - 1) + (("tensor",),))
        loss = cross_entropy_sum(ShardedTensor(local * 1, layout, axis.comm, logits.shape), targets, **settings)
        assert type(loss) is Tensor
        loss.backward(torch.full_like(loss, scale))
        return loss.detach(), local.grad, [(e.kind, e.bytes, e.note) for e in axis.comm.ledger.entries]

    return on_ranks(ways, body)


def whole_loss(
    logits: Tensor, targets: Tensor, scale: float = 1.0, ignored: int = -100
) -> tuple[Tensor, Tensor | None]:
    mine = logits.clone().requires_grad_()
    loss = F.cross_entropy(mine.flatten(0, -2), targets.flatten(), ignore_index=ignored, reduction="sum")
    loss.backward(torch.full_like(loss, scale))
    return loss.detach(), mine.grad


def agrees(logits: Tensor, targets: Tensor, ways: int, **settings: Any) -> None:
    loss, gradient = whole_loss(logits, targets, **settings)
    ranks = cut_loss(logits, targets, ways, **settings)
    for ours, _, _ in ranks:
        is_close(ours, loss, "loss")
        assert torch.equal(ours, ranks[0][0]), "ranks agree to the bit"
    is_close(together([r[1] for r in ranks], logits.dim() - 1), gradient, "gradient")


IGNORING = TOKENS_BT.masked_fill(TOKENS_BT.remainder(3) == 0, -100)
TARGETS = {
    "all": TOKENS_BT,
    "some ignored": IGNORING,
    "all but one ignored": torch.full((2, 7), -100).index_put((torch.tensor(1), torch.tensor(6)), torch.tensor(10)),
    "all of the first rank": TOKENS_BT.clamp(max=2),
    "all of the last rank": TOKENS_BT.clamp(min=9),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("ways", WAYS)
def test_the_loss_over_cut_classes_is_torchs(ways: int, targets: str, dtype: torch.dtype) -> None:
    agrees(values(2, 7, ROWS, dtype=dtype) * 3, TARGETS[targets], ways)


def extreme(size: float, dtype: torch.dtype) -> Tensor:
    logits = values(2, 7, ROWS, dtype=dtype)
    logits[0, :, 0] = size
    logits[1, :, 10] = -size
    logits[1, 3] = size
    return logits


WITHOUT = values(2, 7, ROWS).index_fill(2, torch.arange(4, 8), -torch.inf)
"""On three ranks the whole second one is, on four a piece of two."""
UNUSUAL: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
    "another seed of backward and ignored number": (values(2, 7, ROWS), TOKENS_BT, {"scale": 0.37, "ignored": 3}),
    "classes at minus infinity": (WITHOUT, TOKENS_BT.masked_fill((TOKENS_BT >= 4) & (TOKENS_BT < 8), -100), {}),
    "fewer classes than ranks": (values(2, 7, 3), TOKENS_BT.remainder(3), {}),
    "one leading dim": (values(14, ROWS), TOKENS_BT.flatten(), {}),
    "three leading dims": (values(7, 1, 2, ROWS), TOKENS_BT.view(7, 1, 2), {}),
} | {
    f"extreme, {size} of {dtype}": (extreme(size, dtype), TOKENS_BT, {})
    for size in (1e4, -1e4)
    for dtype in (torch.float32, torch.float64)
}


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_logits_and_targets_too(case: str, ways: int) -> None:
    logits, targets, settings = UNUSUAL[case]
    agrees(logits, targets, ways, **settings)


def test_all_targets_ignored_is_zero_with_zero_gradients() -> None:
    for loss, gradient, _ in cut_loss(values(2, 7, ROWS), torch.full((2, 7), -100), 3):
        assert loss == 0 and gradient.count_nonzero() == 0


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = values(2, 7, ROWS).bfloat16()
    wanted, _ = whole_loss(logits.float(), TOKENS_BT)
    for loss, gradient, _ in cut_loss(logits, TOKENS_BT, 3):
        is_close(loss, wanted)
        assert gradient.dtype == torch.bfloat16


def test_three_numbers_are_sent_per_target() -> None:
    for _, _, sent in cut_loss(values(2, 7, ROWS), IGNORING, 3):
        assert [(kind, size, note.unit) for kind, size, note in sent] == [("all_gather", 3 * 3 * 14 * 8, "loss")]


def test_plain_logits_take_the_plain_way() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        logits = values(2, 7, ROWS).to(dtype)
        wide = logits if dtype == torch.float64 else logits.float()
        assert torch.equal(cross_entropy_sum(logits, IGNORING), whole_loss(wide, IGNORING)[0])


@pytest.mark.parametrize("target", [-1, ROWS, ROWS + 3])
def test_a_target_outside_the_classes_is_an_error_as_everywhere(target: int) -> None:
    with pytest.raises(IndexError, match="targets from"):
        cut_loss(values(1, 1, ROWS), torch.tensor([[target]]), 2)


@each_rank("tensor=2", refused="only the classes, the last dim, may be cut")
def test_logits_cut_in_another_dim_are_refused(comm: Comm) -> None:
    logits = ShardedTensor.from_full(values(2, 7, ROWS), "batch/tensor time class", comm)
    cross_entropy_sum(logits, TOKENS_BT)


def test_it_is_one_of_plaits_own_words() -> None:
    assert plait.cross_entropy_sum is cross_entropy_sum, "messages of the library tell users to call it"
