"""Activations and gradients on channels, and a stage that raises: its own traceback first, the others end at once."""

import os
import sys
import threading
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import engine_cases as cases
import pytest
import torch
from engine_cases import Batch, batches, loss_sum
from pipeline_cases import build, chain, linear, on, step
from torch import Tensor, nn

from plait.comm import Comm, run
from plait.comm.thread import ThreadComm
from plait.pipeline.message import Handed, MessageForm, pack, shape_of, unpack
from plait.pipeline.p2p import PipelineP2P
from plait.schedule.actions import parse_action
from plait.table.collectives import Note
from plait.table.mesh import Mesh

Channel = dict[tuple[int, int], list[tuple[Any, ...]]]

HEADER = "setup"


def record(monkeypatch: pytest.MonkeyPatch) -> tuple[Channel, Channel]:
    """Messages of every channel in their order: those that are sent, and those that are asked for."""
    sent, asked = defaultdict(list), defaultdict(list)
    send, recv = ThreadComm.send, ThreadComm.recv

    def sending(comm: Comm, tensor: Tensor, dst: int, note: Note) -> Any:
        sent[comm.rank, dst].append((note, tuple(tensor.shape), tensor.dtype))
        return send(comm, tensor, dst, note)

    def receiving(comm: Comm, tensor: Tensor, src: int, note: Note) -> Any:
        asked[src, comm.rank].append((note, tuple(tensor.shape), tensor.dtype))
        return recv(comm, tensor, src, note)

    monkeypatch.setattr(ThreadComm, "send", sending)
    monkeypatch.setattr(ThreadComm, "recv", receiving)
    return sent, asked


@pytest.mark.parametrize("order", ["1f1b", "zbv", "interleaved"])
def test_both_sides_of_a_channel_mean_the_same_messages_in_one_order(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over batches of several sizes, some of which come late: a header that no rank takes, or that never comes."""
    sent, asked = record(monkeypatch)

    def body(comm: Comm) -> None:
        engine = build(chain(*(linear() for _ in range(4))), comm, schedule=order)
        for samples in (8, 12, 11, 12):  # microbatches of 2, of 3, of both
            step(engine, batches(1, samples=samples)[0], 4)
            engine.evaluate([batches(1, samples=4)[0]])

    on("pipe=2", body)
    assert sent == asked
    headers = Counter(note.unit for line in sent.values() for note, *_ in line if note.phase == HEADER)
    boundaries = [0, 1, 2] if order != "1f1b" else [0]
    if order == "zbv":
        boundaries = [0, 2]  # stages 1 and 2 are on one rank
    assert headers == {f"stage {s}": 2 * 3 for s in boundaries}, "one for 2 samples, for 3, and for 4 in evaluations"
    for line in sent.values():
        ahead = [(shape, dtype) for note, shape, dtype in line if note.phase == HEADER]
        assert set(ahead[::2]) <= {((16,), torch.int64)}
        assert {dtype for _, dtype in ahead[1::2]} <= {torch.uint8}


def test_headers_stand_in_the_ledger_of_the_step_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Comm) -> list[tuple[bool, list[int], int]]:
        engine, steps = build(chain(linear(), linear()), comm), []
        for samples in (8, 8, 12, 8):
            batch = batches(1, samples=samples)[0]
            parts = [{name: tensor[i::4] for name, tensor in batch.items()} for i in range(4)]
            learns, mark = engine.placed.p2p.learns_from(parts), len(comm.ledger)
            engine.step(parts)
            lines = [e for e in comm.ledger.since(mark) if e.note.phase == HEADER and e.kind in ("send", "recv")]
            steps.append((learns, [line.bytes for line in lines][:1], len(lines)))
        return steps

    once, nothing = (True, [128], 2), (False, [], 0)
    assert on("pipe=2", body) == [[once, nothing, once, nothing]] * 2
    assert on("pipe=1", body) == [[nothing] * 4]


def handed(*tensors: Tensor) -> Handed:
    return Handed([*tensors], MessageForm(tuple(map(shape_of, tensors))))


def both_ends(body: Any, num_microbatches: int, sizes: list[int]) -> list[Any]:
    """``body(comm, p2p)`` on two ranks with a stage each; microbatches of so many samples."""

    def rank(comm: Comm) -> Any:
        p2p = PipelineP2P(comm, {0: 0, 1: 1})
        p2p.begin([{"x": torch.zeros(size, 5)} for size in sizes], {})
        return body(comm, p2p)

    assert len(sizes) == num_microbatches
    return on("pipe=2", rank)


def test_receives_are_posted_in_order_as_far_as_shapes_are_known() -> None:
    """Microbatches 0 and 2 are of one size, 1 and 3 of another; the pass of 3 asks first for nothing but its own."""
    sizes = [2, 3, 2, 3]

    def body(comm: Comm, p2p: PipelineP2P) -> Any:
        for m, size in enumerate(sizes if comm.rank == 0 else []):
            p2p.put("F", 0, m, handed(torch.full((size, 7), float(m), dtype=torch.float64)))
            p2p.start(parse_action(f"0SEND_F{m}"))
        if comm.rank == 0:
            return None
        posted, got = [], []
        for m in range(4):
            p2p.start(parse_action(f"1RECV_F{m}"))
        for m in range(4):
            posted.append(sorted(key[2] for key in p2p._coming))
            got.extend(p2p.get("F", 1, m).tensors)
        return posted, got

    posted, got = both_ends(body, 4, sizes)[1]
    assert posted == [[], [], [2, 3], [3]], "nothing, then 0 alone; with the second header all"
    for m, size in enumerate(sizes):
        assert torch.equal(got[m], torch.full((size, 7), float(m), dtype=torch.float64))


@pytest.mark.parametrize("way", ["F", "B"])
@pytest.mark.parametrize("other", [torch.ones(2, 8), torch.ones(2, 7).double()], ids=["shape", "dtype"])
def test_another_shape_than_before_is_refused_by_the_sender(way: str, other: Tensor) -> None:
    def body(comm: Comm, p2p: PipelineP2P) -> None:
        if way == "F" and comm.rank == 0:
            p2p.put("F", 0, 0, handed(torch.ones(2, 7)))
            p2p.put("F", 0, 1, handed(other))
        if way == "B" and comm.rank == 0:
            p2p.put("F", 0, 0, handed(torch.ones(2, 7)))
            p2p.start(parse_action("0SEND_F0"))
        if way == "B" and comm.rank == 1:
            p2p.start(parse_action("1RECV_F0"))
            p2p.get("F", 1, 0)
            p2p.put("B", 1, 0, handed(other))

    words = "stage 0 hands over" if way == "F" else "stage 1 gives back a gradient"
    with pytest.raises(ValueError, match=rf"{words} float.* microbatch {int(way == 'F')}, .* it was float32 \[2, 7\]"):
        both_ends(body, 2, [2, 2])


def test_several_tensors_are_one_message_and_come_back_as_they_were() -> None:
    mine = [torch.arange(5.0).double(), torch.ones(3, 0), torch.tensor(True), torch.arange(7).view(1, 7).t()]
    form = MessageForm(tuple(map(shape_of, mine)), "how", "more")
    assert MessageForm.read(form.text) == form and MessageForm.read(form.text).more == "more"
    packed = pack(mine)
    assert (tuple(packed.shape), packed.dtype) == form.packed == ((48 + 0 + 16 + 64,), torch.uint8)
    for tensor, again in zip(mine, unpack(packed, form), strict=True):
        assert torch.equal(tensor, again) and tensor.dtype == again.dtype


@pytest.mark.parametrize("others", [(), (torch.ones(3),)], ids=["alone", "packed"])
def test_a_view_that_stands_for_other_values_goes_as_these(others: tuple[Tensor, ...]) -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    for view in (values.conj(), values.conj().imag):
        mine = [view, *others]
        packed = pack(mine)
        assert not packed.is_conj() and not packed.is_neg()
        assert torch.equal(unpack(packed, MessageForm(tuple(map(shape_of, mine))))[0], view)


RANKS = Path(__file__).with_name("pipeline_ranks.py")


class Failing(nn.Module):
    """Raises in the third forward, or in the backward of what came third, on one stage."""

    how = ""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def fail(self, *_: object) -> None:
        raise ArithmeticError("of the user's own")

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and self.how == "forward":
            self.fail()
        if self.calls == 3 and self.how == "backward":
            x = x * 1
            x.register_hook(self.fail)
        return x


@pytest.mark.parametrize("order", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_one_stage_that_fails_ends_all_with_its_own_traceback(how: str, stage: int, order: str) -> None:
    def body(comm: Comm) -> None:
        model = chain(*(nn.Sequential(linear(), Failing()) for _ in range(3)))
        model.links[stage][1].how = how
        step(build(model, comm, schedule=order), batches(1)[0], 6)

    with pytest.raises(ArithmeticError, match="of the user's own") as caught:
        run(Mesh.parse("pipe=3"), body, deadline=3600)  # the test would end before this wait does
    lines = "".join(traceback.format_exception(caught.value))
    assert "test_p2p.py" in lines and f"rank {stage} of 3" in lines


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_a_step_after_one_that_failed_in_a_pipeline_is_refused_at_once(order: str) -> None:
    """Every rank raises and catches: what is left of the messages must not be taken for the next step's."""
    together = threading.Barrier(2)
    data = batches(2, samples=12)

    def body(comm: Comm) -> int:
        bad = [True, False, False, False] if comm.rank == 0 else [True]  # in which microbatch, from the last

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            if bad and bad.pop():
                raise ArithmeticError("a bad batch")
            return loss_sum(model, batch)

        engine = build(chain(), comm, loss_fn=loss, schedule=order)
        with pytest.raises((ArithmeticError, TimeoutError)):
            step(engine, data[0])
        together.wait(20)
        bad.clear()
        sent = len(comm.ledger.entries)
        with pytest.raises(ValueError, match="failed inside a pipeline"):
            step(engine, data[1])
        return len(comm.ledger.entries) - sent

    assert on("pipe=2", body, deadline=2) == [0, 0], "nothing is sent, and nothing waited for"


def test_processes_keep_few_messages_and_train_as_one(start: Any) -> None:
    """Microbatches without samples among them, so also messages without content."""
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the cases that the ranks import
    out, err = start(sys.executable, "-W", "ignore", str(RANKS), env=paths).communicate(timeout=90)
    assert not err
    losses, messages = (line.split() for line in out.splitlines())
    truth = cases.plain(chain(*(linear() for _ in range(3))), batches(2, samples=10), clip=1.0)
    assert [float(loss) for loss in losses] == pytest.approx(truth.losses, abs=1e-11)
    at_most, in_the_end = [int(n) for n in messages[::2]], [int(n) for n in messages[1::2]]
    assert in_the_end == [0, 0, 0]
    assert max(at_most) <= 6, f"of 12 microbatches, {at_most} messages are under way on the three ranks"
