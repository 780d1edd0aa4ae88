"""Faults on purpose: read from text, happening once, where they are meant to, and on no other rank."""

import math
import re
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import nn

from plait.comm import Comm, run
from plait.comm.operation import Operation
from plait.run.injection import FAULTS, Fault, inject, parse_fault
from plait.run.injection.injected import Slowed
from plait.step import Engine
from plait.table.mesh import Mesh

MESH = Mesh(shard=3)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@rank=2,step=20", Fault("kill", 2, 20)),
        (" stop@rank=0,step=1 ", Fault("stop", 0, 1)),
        ("slow=2.5x@rank=1,step=3", Fault("slow", 1, 3, value=2.5)),
        ("signal=usr1@rank=1,step=3", Fault("signal", 1, 3, value=10)),
        ("slow=60x@rank=1,step=3", Fault("slow", 1, 3, value=60.0)),
        ("exception@step=4,rank=1,operation=7,always", Fault("exception", 1, 4, operation=7, always=True)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert parse_fault(text, 3) == fault
    assert str(fault).startswith(fault.kind)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "cannot read the fault .*: give KIND.*; the kinds are kill, stop") for text in (
            "", "kill", "burn@rank=1,step=2", "kill@rank=1", "kill@step=1", "kill@rank=-1,step=1", "kill@rank=1,step=0",
            "kill@rank=1,step=99999999999999999999", "kill@rank=1,step=1,colour=red", "kill@rank=1,step=1,always=no",
        )),
        ("kill@rank=3,step=1", "ranks 0 to 2"),
        ("kill=2@rank=1,step=1", "only slow has a value"),
        ("slow=0.5@rank=1,step=1", "a factor from 1"),
        ("slow=@rank=1,step=1", "a factor from 1"),
        ("signal@rank=1,step=1", "'' .* is not a signal"),
        ("signal=9@rank=1,step=1", "'9' .* is not a signal"),
    ],
)  # fmt: skip
def test_what_is_no_fault_is_one_message(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        parse_fault(text, 3)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["kill", "stop", "signal=SIGTERM", "exit", "disk-full"])
def test_threads_have_no_fault_of_a_process(kind: str) -> None:
    with pytest.raises(ValueError, match="give --world process"):
        parse_fault(f"{kind}@rank=0,step=1", 3, threads=True)


def filled(model: nn.Module) -> nn.Module:
    """Threads share torch's generator, so nothing is drawn."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters(), 1):
            parameter.copy_(torch.linspace(-0.5, 0.1 * i, parameter.numel()).view(parameter.shape))
    return model


def trained(comm: Comm, *faults: str, steps: int = 4, strategy: str = "zero2") -> list[float]:
    model = filled(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
    engine = Engine(
        model,
        comm,
        strategy=strategy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, x: model(x).square().sum(),
        count_fn=len,
        nonfinite="skip",
    )
    inject(engine, faults)
    x = torch.linspace(-1, 1, 10).view(2, 5) + comm.rank
    results = [engine.step([x]) for _ in range(steps)]
    weights = torch.cat([p.detach().view(-1).double() for p in engine.full_state_dict().values()])
    return [*(float(r.made) for r in results), *(r.loss for r in results), float(weights.sum())]


def test_a_fault_of_a_process_is_refused_where_it_would_end_all_ranks() -> None:
    with pytest.raises(ValueError, match="give --world process"):
        run(Mesh(shard=2), lambda comm: trained(comm, "exit@rank=0,step=1"))


def test_without_its_moment_nothing_happens() -> None:
    assert run(MESH, trained) == run(MESH, lambda comm: trained(comm, "nan@rank=1,step=9", "slow=3x@rank=2,step=9"))


def test_an_exception_is_that_ranks_in_that_step(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="injected: exception on rank 2 in step 3") as raised:
        run(MESH, lambda comm: trained(comm, "exception@rank=2,step=3"))
    assert any("raised on rank 2" in note for note in raised.value.__notes__)
    assert re.fullmatch(
        r"plait: injected exception on rank 2 in step 3 \(process \d+\), in .*\(.*\)\n", capfd.readouterr().err
    ), "it says what it does, once"


def test_it_is_at_the_operation_that_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="injected"):
        run(MESH, lambda comm: trained(comm, "exception@rank=1,step=2,operation=3", strategy="ddp"))
    said = re.search(r"in step 2 \(process \d+\), in (.*)", capfd.readouterr().err)
    assert said and "phase 'count'" not in said[1]


def test_what_never_came_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    def body(comm: Comm) -> None:
        trained(comm, "exception@rank=1,step=4,operation=999")
        comm.close()

    run(MESH, body)
    assert capfd.readouterr().err == (
        "plait: exception on rank 1 in step 4 was not injected: the run reached no such place\n"
    )


@dataclass
class Clock:
    now: float = 100.0
    slept: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.slept = self.now + seconds, self.slept + seconds


def test_a_slow_rank_takes_longer_to_compute_and_not_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, operation = Clock(), cast(Operation, None)
    monkeypatch.setattr("plait.run.injection.injected.time", clock)
    slow = Slowed(Fault("slow", 0, 2, value=3.0))
    slow.begin_step(0)
    clock.now += 1
    slow.asked(operation)
    assert clock.slept == 0, "its step has not come"
    slow.begin_step(1)
    clock.now += 1
    slow.asked(operation)
    assert clock.slept == 2
    slow.waits(operation)
    clock.now += 5
    slow.waited(operation, clock.now - 5, clock.now)
    clock.now += 1
    slow.begin_step(2)
    assert clock.slept == 4
    later = Slowed(Fault("slow", 0, 2, value=3.0))
    later.begin_step(7)
    clock.now += 1
    later.asked(operation)
    assert clock.slept == 6, "also where a run goes on behind its step"


def test_a_bit_of_a_rank_without_any_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    def body(comm: Comm) -> float:
        model = filled(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizer)
        inject(engine, ["flip@rank=2,step=1"])
        engine.backward(engine.model(torch.ones(2, 1)).square().sum(), 2)
        optimizer.step()
        return engine.last.loss

    assert len(set(run(MESH, body))) == 1
    assert "could not be injected" in capfd.readouterr().err


def test_nan_is_one_loss_in_one_step() -> None:
    for made in run(MESH, lambda comm: trained(comm, "nan@rank=0,step=2")):
        assert made[:4] == [1, 0, 1, 1]
        assert [math.isnan(loss) for loss in made[4:8]] == [False, True, False, False]


def test_a_loss_of_a_loop_of_ones_own_is_nan_too() -> None:
    def body(comm: Comm) -> list[bool]:
        model = filled(nn.Linear(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, comm, strategy="zero3", optimizer=optimizer, nonfinite="skip")
        inject(engine, ["nan@rank=1,step=2"])
        made = []
        for _ in range(3):
            engine.backward(engine.model(torch.ones(2, 5)).square().sum(), 2)
            optimizer.step()
            made.append(engine.last.made)
        return made

    assert run(MESH, body) == [[True, False, True]] * 3


def test_a_collective_that_is_left_out_is_noticed() -> None:
    with pytest.raises(Exception, match=r"(?s)all_gather|reduce_scatter|all_reduce"):
        run(MESH, lambda comm: trained(comm, "skip-collective@rank=1,step=2"), deadline=3)


def test_a_bit_is_turned_over_on_one_rank() -> None:
    plain, flipped = run(MESH, trained), run(MESH, lambda comm: trained(comm, "flip@rank=1,step=2"))
    assert plain[0][4] == flipped[0][4] and plain[0][7:] != flipped[0][7:]


def test_a_restarted_run_is_not_hit_again_unless_always() -> None:
    def again(comm: Comm, fault: str) -> list[float]:
        comm.attempt = 1
        return trained(comm, fault)

    assert run(MESH, trained) == run(MESH, lambda comm: again(comm, "exception@rank=2,step=3"))
    with pytest.raises(RuntimeError, match="injected"):
        run(MESH, lambda comm: again(comm, "exception@rank=2,step=3,always"))


def test_the_table_is_what_can_be_read() -> None:
    assert [parse_fault(f"{kind}{'=SIGHUP' * (kind == 'signal')}@rank=0,step=1", 1).kind for kind in FAULTS] == list(
        FAULTS
    )
