"""Threads as ranks: the same checks as processes, and what happens when ranks disagree, fail or stay away."""

import ctypes
import re
import threading
import time
import traceback
from typing import Any

import comm_checks
import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import AbortedError, Comm, MismatchError, ThreadWorld, run
from plait.comm.texts import check_together
from plait.table.collectives import Note
from plait.table.mesh import Mesh

MESHES = ["shard=2", "shard=3", "replica=2 shard=3", "pipe=5"]

FORWARD = Note("f", "blocks.3")
NEVER = 3600.0
"""A deadline that no test lives to see."""


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("check", comm_checks.EVERYTHING, ids=lambda check: check.__name__)
def test_does_what_every_world_does(mesh: str, check) -> None:
    run(Mesh.parse(mesh), check, deadline=20)


def test_alone_nothing_moves_and_nothing_is_written() -> None:
    def alone(comm: Comm) -> None:
        comm_checks.check_collectives(comm)
        check_together(comm, None, ("shard",))
        assert comm.ledger.entries == ()

    run(Mesh(), alone)


def gather(
    comm: Comm,
    size: int = 4,
    axes: tuple[str, ...] = ("shard",),
    note: Note = FORWARD,
    dtype: torch.dtype = torch.float32,
) -> None:
    comm.all_gather(torch.empty(size, dtype=dtype), torch.empty(size // 2, dtype=dtype), axes, note)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        (lambda c: gather(c, note=Note("f", "blocks.4")), "blocks.4"),
        (lambda c: gather(c, size=8), "8 x"),
        (lambda c: c.all_reduce(torch.empty(4), ("shard",), note=FORWARD), "sum all_reduce"),
        (lambda c: gather(c, note=Note("b", "blocks.3")), "phase 'b'"),
        (lambda c: gather(c, dtype=torch.float64), "float64"),
        (lambda c: gather(c, axes=("shard", "replica")), "over shard, replica"),
    ],
    ids=["unit", "size", "kind", "phase", "dtype", "axes"],
)
def test_ranks_that_mean_different_things_are_both_told_at_once(mine, words: str) -> None:
    def disagree(comm: Comm) -> str:
        try:
            mine(comm) if comm.rank == 1 else gather(comm)
        except MismatchError as error:
            return str(error)
        return "no error"

    for text in run(Mesh(shard=2), disagree, deadline=NEVER):
        assert "rank 0" in text and "rank 1" in text and "blocks.3" in text and words in text, text


@pytest.mark.parametrize("how", ["collective", "message"])
def test_time_in_which_nobody_can_run_is_not_waited(how: str) -> None:
    """As a collection of garbage does, a call stops all threads, for longer than the deadline."""
    usleep = ctypes.PyDLL(None).usleep  # unlike CDLL, it holds the interpreter meanwhile

    def stop_all(comm: Comm) -> float:
        x = torch.full((1,), float(comm.rank))
        if comm.rank == 1:
            time.sleep(0.05)
            usleep(700_000)
            for _ in range(20):
                time.sleep(0.001)  # who waits has the first word
        if how == "collective":
            comm.all_reduce(x, ("pipe",)).wait()
        elif comm.rank == 1:
            comm.send(x, 0)
        else:
            comm.recv(x, 1).wait()
        return float(x)

    assert run(Mesh(pipe=2), stop_all, deadline=0.5) == [1.0, 1.0]


def _far_from_here() -> None:
    time.sleep(0.6)


@pytest.mark.parametrize("how", ["collective", "message"])
def test_a_deadline_tells_where_the_others_stand(how: str) -> None:
    """By then it is the only chance to learn it: what holds a rank up may never do so again."""

    def stay_away(comm: Comm) -> str:
        if comm.rank == 1:
            _far_from_here()
            return ""
        with pytest.raises(TimeoutError) as caught:
            if how == "collective":
                comm.barrier(("shard",))
            else:
                comm.recv(torch.empty(1), 1).wait()
        return str(caught.value)

    said, place = run(Mesh(shard=2), stay_away, deadline=0.2)[0].split("\nrank ")
    assert re.search(r"^rank 0 waited 0.2 s in (barrier|recv) .*: rank 1 did not (come|send)$", said), said
    assert place.startswith("1 is at\n") and ", in stay_away\n" in place, place
    assert place.endswith(", in _far_from_here\n    time.sleep(0.6)"), place


def test_a_deadline_tells_which_operation_the_other_is_in() -> None:
    """Rank 0 waits for 1 over shard, and 1 for 3 over replica."""

    def cross(comm: Comm) -> str:
        if comm.rank > 1:
            time.sleep(4 if comm.rank == 3 else 0)
            return ""
        time.sleep(0.3 * comm.rank)
        with pytest.raises(TimeoutError) as caught:
            axes = ("shard",) if comm.rank == 0 else ("replica",)
            comm.all_reduce(torch.ones(3), axes, note=Note("backward", "head"))
        return str(caught.value)

    text = run(Mesh(replica=2, shard=2), cross, deadline=1)[0]
    assert re.search(r"\nrank 1 is in sum all_reduce of unit 'head' over replica .*, at\n", text), text


def test_the_last_rank_may_end_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two checks for running ranks."""
    looks = iter([True, False])
    real = threading.Thread.is_alive
    monkeypatch.setattr(threading.Thread, "is_alive", lambda t: next(looks, False) if t.name == "rank 0" else real(t))
    assert run(Mesh(), lambda comm: comm.rank) == [0]


@pytest.mark.parametrize("how", ["collective", "message"])
def test_a_rank_that_has_returned_is_not_waited_for(how: str) -> None:
    def one_leaves(comm: Comm) -> None:
        if comm.rank == 0 and how == "collective":
            comm.barrier(("pipe",))
        elif comm.rank == 0:
            comm.recv(torch.empty(1), 1).wait()

    with pytest.raises(RuntimeError, match="rank 1 returned without"):
        run(Mesh(pipe=2), one_leaves, deadline=NEVER)


@pytest.mark.parametrize("where", ["collective", "message", "other group"])
def test_when_a_rank_raises_the_others_stop_and_its_own_error_comes_out(where: str) -> None:
    def bad_luck(comm: Comm) -> None:
        if comm.rank == 3:
            time.sleep(0.05)
            raise ZeroDivisionError("of rank 3")
        if where == "collective":
            comm.all_reduce(torch.ones(2), ("shard", "replica"))
        elif where == "message":
            comm.recv(torch.ones(2), 3).wait()
        elif comm.rank in (0, 2):
            comm.all_reduce(torch.ones(2), ("replica",))  # 0 and 2 meet; 1 waits for 3
        else:
            comm.all_reduce(torch.ones(2), ("replica",))

    with pytest.raises(ZeroDivisionError, match="of rank 3") as caught:
        run(Mesh(shard=2, replica=2), bad_luck, deadline=NEVER)
    assert any(f.name == "bad_luck" for f in traceback.extract_tb(caught.value.__traceback__))
    assert "rank 3" in caught.value.__notes__[0]


def test_when_a_rank_fails_inside_an_operation_the_others_do_not_go_on() -> None:
    def complex_minimum(comm: Comm) -> str:  # the rank that comes last computes, and it cannot
        with pytest.raises((RuntimeError, TypeError)) as caught:
            comm.reduce(torch.ones(2, dtype=torch.complex64), ("shard",), 0, "min")
        return f"{type(caught.value).__name__}: {caught.value}"

    errors = run(Mesh(shard=2), complex_minimum, deadline=20)
    last = next(rank for rank, error in enumerate(errors) if not error.startswith("AbortedError"))
    assert errors[1 - last].startswith(f"AbortedError: rank {last} failed in min reduce over shard")


@pytest.mark.parametrize("given", [(print, "shard=2"), (2, print), ("shard=2", None)])
def test_arguments_of_other_kinds_are_shown(given: Any) -> None:
    with pytest.raises(
        TypeError, match=r"a mesh, as in 'shard=2', then a function of a rank's comm; it was given .*, "
    ):
        plait.run_threads(*given)


def test_the_abort_reaches_ranks_that_come_later() -> None:
    world = ThreadWorld(Mesh(shard=2), deadline=5)
    world.abort("rank 1 failed")
    with pytest.raises(AbortedError, match=r"rank 0 stopped in sum all_reduce .* rank 1 failed"):
        world.comm(0).all_reduce(torch.ones(1), ("shard",))
    with pytest.raises(AbortedError):
        world.comm(0).send(torch.ones(1), 1)


def test_a_tensor_that_others_still_read_does_not_change() -> None:
    def race(comm: Comm) -> None:
        for turn in range(200):
            x = torch.full((300,), float(comm.rank + turn))
            out = torch.empty(900)
            comm.all_gather(out, x, ("shard",)).wait()
            x.fill_(-1)  # as soon as wait() is over, it is mine
            assert out.view(3, 300)[:, 0].tolist() == [turn, turn + 1.0, turn + 2.0]
            assert torch.equal(out.view(3, 300).amin(1), out.view(3, 300).amax(1))

    run(Mesh(shard=3), race)


def test_a_rank_is_gone_with_all_that_torch_kept_in_its_thread() -> None:
    """A backward that raised leaves nodes to a thread, which are destroyed when Python has done with it already.

    They may need the interpreter: its end would take the process down ("terminate called without an active exception").
    """
    destroyed: list[int] = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.1)
            destroyed.append(1)

    class Left(torch.autograd.Function):
        """Waits in the queue while ``Fails`` runs, and keeps something."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.keeps = Slow()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    def body(comm: Comm) -> None:
        x = torch.ones(1, requires_grad=True)
        with pytest.raises(ZeroDivisionError):
            (Left.apply(x) + Fails.apply(x)).sum().backward()  # type: ignore[no-untyped-call]

    run(Mesh(shard=2), body)
    assert len(destroyed) == 2


def test_a_ranks_products_have_the_same_bits_before_and_after_torch_sets_its_threads() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
    x = torch.linspace(-1, 1, 6 * 32).view(6, 32)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        before = model(x)
        assert torch.get_num_threads() == 1  # which tells MKL
        return before, model(x)

    assert torch.equal(*run(Mesh(), body)[0])
