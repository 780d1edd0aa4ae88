"""Memory that ranks have in common, and tensors that others read where they lie."""

import copy
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import SPLIT_ROWS, adamw, batches, count, deal, loss_sum, net
from shared_worlds import play
from test_common_memory_order import SlowToRead, comes_to_the_same, engine_of
from torch import Tensor, nn

from plait.comm import ProcessComm
from plait.comm.ordered_reduce import ordered_sum
from plait.shared_memory import common, meeting, segment
from plait.shared_memory.arena import Arena
from plait.shared_memory.bells import Bells
from plait.shared_memory.semaphore import Semaphore
from plait.step import EMA, Engine
from plait.table.mesh import Mesh


@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replica=2 shard=2"])
@pytest.mark.parametrize("axes", [("shard",), ("replica", "shard")])
def test_what_one_writes_all_see(mesh: str, axes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """More tensors than a segment holds, of several dtypes, gathered with and without the rank's own piece."""
    monkeypatch.setattr(common, "FIRST_BYTES", 1)
    monkeypatch.setattr(common, "SPARE", 3)

    def body(comm: ProcessComm) -> None:
        group = comm.mesh.group(comm.rank, axes)
        n, index, made = len(group), group.index(comm.rank), []
        for number, (length, dtype) in enumerate([(7, torch.float32), (5001, torch.float64), (33, torch.bfloat16)] * 4):
            out = comm.common(n * length, dtype, axes)
            assert out is not None
            assert not out[index * length : (index + 1) * length].any()
            mine = torch.full((length,), number + index, dtype=dtype)
            if number % 2:
                out[index * length : (index + 1) * length] = mine
                mine = out[index * length : (index + 1) * length]
            comm.all_gather(out, mine, axes).wait()
            made.append((out, torch.arange(n).repeat_interleave(length).add(number).to(dtype)))
        comm.barrier(axes)
        for out, expected in made:
            assert torch.equal(out, expected)

    assert play(mesh, body) == [None] * Mesh.parse(mesh).size


def test_common_memory_is_one_memory_and_lives_as_long_as_its_tensors() -> None:
    def body(comm: ProcessComm) -> list[float]:
        one, other = (comm.common(comm.world_size * 2, torch.float32, ("shard",)) for _ in range(2))
        assert one is not None and other is not None
        comm.all_gather(one, one[comm.rank * 2 : comm.rank * 2 + 2], ("shard",)).wait()
        if comm.rank == 1:
            one.fill_(5.0)  # also the others' pieces, which no engine does
        comm.barrier(("shard",))
        del other
        comm.close()
        return one.tolist()

    assert play("shard=3", body) == [[5.0] * 6] * 3


def test_common_memory_that_cannot_be_had_is_told_to_those_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make = segment.Segment.make

    def full(size: int, name: str) -> segment.Segment:
        if size >= 2**22:
            raise MemoryError("4.0 MiB of shared memory cannot be had")
        return make(size, name)

    monkeypatch.setattr(segment.Segment, "make", full)
    errors = play("shard=3", lambda comm: comm.common(2**20, torch.float32, ("shard",)))
    assert sorted(type(error).__name__ for error in errors) == ["ConnectionError", "ConnectionError", "MemoryError"]
    assert all("rank 0: 4.0 MiB of shared memory cannot be had" in str(error) for error in errors[1:]), errors


def test_a_group_of_one_and_no_elements_have_nothing_in_common() -> None:
    def body(comm: ProcessComm) -> list[Tensor | None]:
        return [comm.common(4, torch.float32, ("replica",)), comm.common(0, torch.float32, ("shard",))]

    assert play("shard=2", body) == [[None, None]] * 2


def test_what_is_said_is_counted() -> None:
    """A gather that was begun later takes nothing from one that was begun before, whichever is asked first."""
    memory = segment.Segment.make(4096)
    bell = Semaphore(memory.address)
    bell.begin()
    mine, theirs = Bells({}, {1: bell}, [1]), Bells({0: bell}, {}, [0])
    assert list(theirs.tell(1)) == [0] and not list(theirs.tell(1))
    assert mine.silent(2) == [1] and mine.silent(1) == [] and mine.silent(2) == [1]
    assert list(theirs.tell(4)) == [0]  # it has written three times, and says so once
    assert mine.silent(2) == mine.silent(4) == [] and mine.silent(5) == [1]


@pytest.mark.parametrize("what", ["average", "load"])
def test_parameters_are_written_when_nobody_reads_them(what: str) -> None:
    """One rank still evaluates when the others have, and take the weights back or load others."""

    def body(comm: ProcessComm) -> tuple[Tensor, Tensor]:
        net = nn.Sequential(nn.Linear(5, 7), SlowToRead(7, 3))
        model, _, engine = engine_of(comm, net, "zero3", adamw(net.parameters()))
        average, x = EMA(engine, 0.5), torch.linspace(-1, 1, 10).double().view(2, 5)
        for batch in batches(2):
            engine.step([batch])
            average.update()
        state = {name: value + 1 for name, value in engine.full_state_dict().items()}
        model[1].seconds = 0.4 if comm.rank == 1 else 0.0
        with average.swapped() if what == "average" else nullcontext(), torch.no_grad():
            seen = model.eval()(x)
        if what == "load":
            engine.load_full_state_dict(state)
        model[1].seconds = 0.0
        comm.barrier(("shard",))
        return seen, model(x).detach()

    results = play("shard=3", body)
    assert not any(isinstance(result, Exception) for result in results), results
    (seen, after), *others = results  # type: ignore[misc]
    assert not torch.allclose(seen, after)
    for other in others:
        assert torch.equal(other[0], seen) and torch.equal(other[1], after)


@pytest.mark.parametrize("lenders", ["all", "one", "none"])
@pytest.mark.parametrize("mesh", ["shard=2", "shard=3", "replica=2 shard=2"])
@pytest.mark.parametrize("length", [1, 16385, 50003])
def test_tensors_are_reduced_where_they_lie(
    mesh: str, lenders: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any rank lends its memory; several chunks, pieces of other lengths."""
    monkeypatch.setattr(meeting, "CHUNK_BYTES", 2**13)
    shape, axes = Mesh.parse(mesh), ("replica", "shard")
    values = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(shape.size)]
    total = torch.empty(length)
    ordered_sum([values[rank] for rank in shape.group(0, axes)], (shape.replica, shape.shard), "sum", total)

    def body(comm: ProcessComm) -> None:
        lends = lenders == "all" or (lenders == "one" and comm.rank == 1)
        empty = comm.empty if lends else torch.empty
        x = empty(length, dtype=torch.float32).copy_(values[comm.rank])
        y = empty(length * comm.world_size, dtype=torch.float32).copy_(values[comm.rank].repeat(comm.world_size))
        piece = torch.empty(length)
        works = [comm.all_reduce(x, axes), comm.reduce_scatter(piece, y, axes)]
        for work in works:
            work.wait()
        assert torch.equal(x, total) and torch.equal(piece, total)
        index = comm.mesh.index(comm.rank, axes)
        y[index * length : (index + 1) * length] = values[comm.rank]
        comm.all_gather(y, y[index * length : (index + 1) * length], axes).wait()
        assert torch.equal(y, torch.cat([values[rank] for rank in shape.group(comm.rank, axes)]))
        y.zero_()  # it is this rank's again, whatever the others still do

    assert play(mesh, body) == [None] * shape.size


def test_the_memory_of_a_tensor_that_is_gone_is_used_again() -> None:
    arena = Arena("plait-test")
    first = arena.empty(1000, torch.float32)
    part, address = first[10:20], first.data_ptr()
    del first
    gc.collect()
    assert arena.empty(1000, torch.float32).data_ptr() != address, "a view still has it"
    del part
    gc.collect()
    assert arena.empty(1000, torch.float32).data_ptr() == address
    arena.close()


def test_the_files_that_a_container_has_read_are_no_memory_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("990000\n")
    (tmp_path / "memory.stat").write_text("anon 10000\nfile 970000\ninactive_file 600000\nactive_file 300000\n")
    monkeypatch.setattr(segment, "CGROUP", tmp_path)
    assert segment.available() == 910000
    (tmp_path / "memory.max").write_text("max\n")
    assert segment.available() > 1000000


@pytest.mark.parametrize("row", SPLIT_ROWS)
@pytest.mark.parametrize("mesh", ["shard=3", "replica=2 shard=2"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_parameters_that_exist_once_train_as_copies_do(row: str, mesh: str, num_microbatches: int) -> None:
    """With a whole state that stays referenced, and a write between steps, which every rank does."""

    def body(comm: Any) -> Any:
        model, losses = copy.deepcopy(net()), []
        optimizer = adamw(model.parameters())
        engine = Engine(model, comm, strategy=row, optimizer=optimizer, loss_fn=loss_sum, count_fn=count)
        common = any(flat.common is not None for unit in engine.placed.units for flat in unit.flats)
        assert common == isinstance(comm, ProcessComm)
        for number, batch in enumerate(batches(4)):
            losses.append(engine.step(deal(batch, comm.mesh, comm.rank, num_microbatches)).loss)
            if number == 1:
                with engine.gathered():
                    kept, copies = dict(model.state_dict()), copy.deepcopy(model.state_dict())
                with engine.gathered(modify=True), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
        assert all(torch.equal(kept[name], value) for name, value in copies.items()), "what was kept has changed"
        return losses, engine.full_state_dict()

    comes_to_the_same(mesh, body)
