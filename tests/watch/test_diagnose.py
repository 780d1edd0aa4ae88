"""The cause, not its echoes, from the last words of the ranks and from the kernel; and who is slow."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from plait.run.watch import stacks
from plait.run.watch.diagnose import ENDED, Diagnosis, Kind, block, diagnose
from plait.run.watch.page import State, Status
from plait.run.watch.processes import ProcessState
from plait.run.watch.rank import RECENT
from plait.run.watch.straggler import SPAN, WINDOW, stragglers
from plait.table.mesh import Mesh

NOW = 1000.0
GATHER, REDUCE = "all_gather of unit 'b' over shard", "sum all_reduce over shard"


def rank(number: int, state: State = "waiting", since: float = 0.5, **said: Any) -> Status:
    given = {"operation": GATHER, "step": 7, "host": "h", "pid": 100 + number, "peers": [0, 1, 2], **said}
    return Status(number, state=state, since=NOW - since, heartbeat=NOW, **given)


def is_(state: str = "running", code: int | None = None, **more: Any) -> ProcessState:
    return ProcessState(0, state, code, **more)  # type: ignore[arg-type]


def found(statuses: list[Status], processes: list[ProcessState], **how: Any) -> list[tuple[str, int, str]]:
    return [(f.kind, f.rank, f.what) for f in diagnose(statuses, processes, NOW, **how)]


RUNS = is_()
THREE = [rank(0), rank(1, "running"), rank(2)]


def test_nothing_is_wrong_with_a_run_that_goes_on() -> None:
    assert found(THREE, [RUNS] * 3, mesh=Mesh(shard=3)) == []
    assert found([rank(0, "done"), rank(1, "running"), rank(2, "done")], [is_("gone", 0), RUNS, is_("gone")]) == []
    assert found([rank(0, "done"), rank(1, since=0.1), rank(2, "done")], [is_("gone", 0), RUNS, RUNS]) == []
    assert found([Status(0), Status(1), rank(2)], [is_("gone"), is_("gone"), RUNS]) == []  # of other hosts
    assert block([]) == ""


def test_a_killed_rank_is_the_cause_whatever_the_others_say() -> None:
    lost = rank(0, "failed", error="ConnectionError: rank 0 lost its connections")
    ended = rank(2, "failed", error="ValueError: because of that")
    processes = [is_("gone", 1), is_("gone", -signal.SIGKILL), RUNS]
    assert found([lost, rank(1), ended], processes) == [("killed", 1, "was killed by SIGKILL")]
    stopped_by_agent = [is_("gone", -signal.SIGTERM), is_("gone", -signal.SIGSEGV), is_("gone", -signal.SIGTERM)]
    assert found(THREE, stopped_by_agent) == [("killed", 1, "was killed by SIGSEGV")]
    killed = is_("gone", -signal.SIGKILL, out_of_memory=True)
    assert found(THREE, [RUNS, killed, RUNS])[0][2] == "was killed by SIGKILL: the kernel says that memory ran out"


def test_a_rank_that_nobody_saw_die_is_gone_without_a_word() -> None:
    assert found(THREE, [RUNS, is_("gone"), RUNS])[0][2] == "is gone without a word: killed, or ended by os._exit"
    heeded = [rank(0), rank(1), rank(2, signal=signal.SIGTERM)]
    assert [f[1] for f in found(heeded, [RUNS, is_("gone"), is_("gone")])] == [1]
    assert found(heeded, [RUNS, RUNS, is_("gone")]) == [("killed", 2, "was ended by SIGTERM")]


def test_an_exception_comes_before_what_follows_from_it() -> None:
    cause, echo = rank(2, "failed", 3.0, error="KeyError: 'x'"), rank(0, "failed", 1.0, error="TimeoutError: late")
    assert found([echo, rank(1), cause], [is_("gone", 1), RUNS, RUNS]) == [("failed", 2, "failed: KeyError: 'x'")]
    assert found([echo, rank(1), rank(2)], [RUNS, RUNS, RUNS]) == [("failed", 0, "failed: TimeoutError: late")]
    assert found(THREE, [RUNS, is_("gone", 3), RUNS]) == [("failed", 1, "ended with exit code 3")]


def test_an_early_exit_is_the_one_that_left() -> None:
    lost = rank(2, "failed", error="ConnectionError: rank 2 lost its connections")
    assert found([rank(0), rank(1, "done"), lost], [RUNS, is_("gone", 0), is_("gone", 1)]) == [
        ("left", 1, "left before the others, with exit code 0")
    ]
    assert found([rank(0, since=2), rank(1, "done"), rank(2)], [RUNS] * 3) == [("left", 1, "left before the others")]


def test_a_stopped_rank_is_stopped_and_nothing_else() -> None:
    late = [rank(0, since=60), rank(1, "running", 60), rank(2, "failed", error="TimeoutError: rank 2 waited 60 s")]
    (what,) = found(late, [RUNS, is_("stopped"), RUNS])
    assert what == ("stopped", 1, "is stopped (SIGSTOP): `kill -CONT 101` on its host lets it go on")


def test_who_is_waited_for_and_does_not_move_stands_still() -> None:
    still = [rank(0, since=30), rank(1, "running", 31), rank(2, since=30)]
    assert found(still, [RUNS] * 3) == [("stands still", 1, "has stood still for 31 s")]
    assert found(still, [RUNS] * 3, long=60) == []
    busy = [rank(0, since=30), rank(1, "running", 0.2), rank(2, since=30)]  # late, but it gets on
    assert found(busy, [RUNS] * 3) == []


def test_a_wait_begins_anew_where_the_watcher_itself_was_stopped() -> None:
    still = [rank(0, since=30), rank(1, "running", 31), rank(2, since=30)]
    crossed = [rank(0, since=20), rank(1, since=19, operation=REDUCE), rank(2, since=20)]
    for statuses in (still, crossed):
        assert found(statuses, [RUNS] * 3, awake=NOW - 9) == []
        assert found(statuses, [RUNS] * 3, awake=NOW - 11)
    ended = [rank(0, "failed", 30, error="ValueError: no"), rank(1, "failed", 20, error="ValueError: later"), rank(2)]
    assert found(ended, [RUNS] * 3, awake=NOW)[0] == ("failed", 0, "failed: ValueError: no")


def test_a_chain_of_waits_ends_at_the_one_that_does_not_wait() -> None:
    chain = [
        rank(0, since=30, peers=[1, 0], operation="recv"),
        rank(1, since=30, peers=[2, 1], operation="recv"),
        rank(2, "running", 32),
    ]
    assert [f[:2] for f in found(chain, [RUNS] * 3)] == [("stands still", 2)]


def test_ranks_in_different_operations_are_crossed() -> None:
    crossed = [rank(0, since=20), rank(1, since=19, operation=REDUCE), rank(2, since=20)]
    assert found(crossed, [RUNS] * 3) == [
        ("crossed", 1, "waits in a different operation from the others: the program took different paths")
    ]
    assert found([rank(0, since=20), rank(1, since=20), rank(2, since=20)], [RUNS] * 3) == []  # a slow link


def test_a_straggler_is_told_where_nothing_else_is_wrong() -> None:
    slow = [rank(r, steps=[[1.0 + (r == 2), 0.0]] * 20, finished=20) for r in range(3)]
    assert found(slow, [RUNS] * 3) == []
    (told,) = diagnose(slow, [RUNS] * 3, NOW, Mesh(shard=3))
    assert (told.kind, told.rank, told.others) == ("straggler", 2, ())
    assert "straggler" not in ENDED
    assert found(slow, [RUNS, is_("stopped"), RUNS], mesh=Mesh(shard=3))[0][0] == "stopped"


def test_the_block_says_who_where_and_what_the_others_wait_for() -> None:
    statuses = [rank(0), rank(1, "running", 0.6, host="node-a"), rank(2, "running", 0.25, step=-1, operation="")]
    text = block(diagnose(statuses, [RUNS, is_("gone", -9), RUNS], NOW))
    assert text.splitlines() == [
        "plait: rank 1 was killed by SIGKILL",
        "  on host node-a (pid 101), in step 7 (counted from 0), "
        "computing after all_gather of unit 'b' over shard, 0.6 s ago",
        "  rank 0: waits for rank 1, 2 in step 7, in all_gather of unit 'b' over shard, for 0.5 s",
        "  rank 2: before its first step, for 0.2 s",
    ]


@pytest.mark.parametrize("text", ["\x1b[2J", "a\r\nplait: all is well", "\x9b31m", "\u202e"])
def test_no_text_reaches_the_screen_as_it_came(text: str) -> None:
    failed = rank(1, "failed", error=text, host=text, operation=text)
    (diagnosis,) = diagnose([failed], [RUNS], NOW)
    shown = block([diagnosis])
    assert text not in shown
    assert [line[:5] for line in shown.splitlines()] == ["plait", "  on "]


def test_only_those_that_stand_still_are_asked_for_their_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ask", lambda folder, rank, pid: f"stack of {pid}")
    kinds: tuple[Kind, ...] = ("stands still", "crossed", "straggler", "stopped")
    given = [Diagnosis(kind, rank, "", "") for rank, kind in enumerate(kinds)]
    asked = stacks.with_stacks(given, tmp_path, {0: 100, 2: 102, 3: 103})
    assert [one.stack for one in asked] == ["stack of 100", "", "", ""], "rank 1 has no process here"


Times = list[list[float]]
"""Seconds computed, by rank and step."""


def statuses(times: Times, last: int) -> list[Status]:
    return [
        Status(rank, pid=1, finished=last, steps=[[t, 0.0] for t in mine[max(0, last - RECENT) : last]])
        for rank, mine in enumerate(times)
    ]


def noisy(draw: random.Random, ranks: int, steps: int, spread: float) -> Times:
    """Steps of one second with log-normal noise, which partly lasts (a busy machine), and now and then one that takes
    five times as long (a checkpoint, an evaluation)."""
    times = []
    for _ in range(ranks):
        mine, lasting = [], 0.0
        for _ in range(steps):
            lasting = 0.8 * lasting + draw.gauss(0, spread / 2)
            long = 5.0 if draw.random() < 0.02 else 1.0
            mine.append(long * 2.718281828 ** (lasting + draw.gauss(0, spread)))
        times.append(mine)
    return times


def false_alarms(runs: int, steps: int, ranks: int, spread: float) -> int:
    """In how many of so many runs without a slow rank one is called slow."""
    draw, mesh, alarms = random.Random(1), Mesh(shard=ranks), 0
    for _ in range(runs):
        times = noisy(draw, ranks, steps, spread)
        alarms += any(stragglers(statuses(times, last), mesh) for last in range(WINDOW, steps + 1, WINDOW // 2))
    return alarms


@pytest.mark.parametrize("ranks", [2, 3])
def test_noise_is_no_straggler(ranks: int) -> None:
    assert false_alarms(100, 100, ranks, 0.1) == 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_false_alarms_in_a_thousand_runs(ranks: int) -> None:
    alarms = false_alarms(1000, 200, ranks, 0.1)
    print(f"{ranks} ranks: {alarms} of 1000 runs; {false_alarms(1000, 200, ranks, 0.2)} where noise is twice as wide")
    assert alarms < 10


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_twice_as_slow_is_seen_within_twenty_steps(ranks: int) -> None:
    draw, seen = random.Random(2), 0
    for _ in range(40):
        times = noisy(draw, ranks, 60, 0.1)
        slow = draw.randrange(ranks)
        times[slow] = [t * (2 if step >= 30 else 1) for step, t in enumerate(times[slow])]
        looks = [statuses(times, last) for last in range(30, 51)]
        found = [rank for look in looks for rank, _ in stragglers(look, Mesh(shard=ranks))]
        assert set(found) <= {slow}
        seen += bool(found)
    print(f"{ranks} ranks: {seen} of 40")
    assert seen >= 37


def test_a_moment_of_a_busy_machine_is_no_straggler() -> None:
    for milliseconds in (8, 40):
        step = milliseconds / 1000
        times = [[step] * 400 for _ in range(3)]
        times[0][200 : 200 + int(0.7 / 4 / step)] = [4 * step] * int(0.7 / 4 / step)  # for 0.7 s
        assert not any(stragglers(statuses(times, last), Mesh(shard=3)) for last in range(1, 400))
        times[0][200:] = [2 * step] * 200
        looks = [last for last in range(200, 400) if stragglers(statuses(times, last), Mesh(shard=3))]
        assert looks[0] - 200 <= max(WINDOW, SPAN / (2 * step))


def test_steps_of_which_the_page_has_too_few_are_not_compared() -> None:
    times = [[SPAN / RECENT / 4] * 400, [SPAN / RECENT / 2] * 400]
    assert stragglers(statuses(times, 400), Mesh(shard=2)) == []


def test_a_straggler_is_half_again_as_slow_but_for_one_step_in_eight() -> None:
    within, beyond = [(0, 1.0, 1.49), (3, 1.0, 2.0), (3, 1.35, 2.0)], [(0, 1.0, 1.5), (2, 1.0, 2.0), (3, 1.36, 2.0)]
    for fast, step, slow in within + beyond:
        times = [[1.0] * 16, [step] * fast + [slow] * (16 - fast)]
        assert bool(stragglers(statuses(times, 16), Mesh(shard=2))) == ((fast, step, slow) in beyond)


def test_stages_are_compared_with_their_own_kind_only() -> None:
    stage = [[1.0] * 20, [1.0] * 20, [3.0] * 20, [3.0] * 20]
    assert stragglers(statuses(stage, 20), Mesh(pipe=2, shard=2)) == []
    stage[3] = [6.0] * 20
    text = "computes 2.0 times as long as its peers: 6 s a step against 3 s, over 16 steps"
    assert stragglers(statuses(stage, 20), Mesh(pipe=2, shard=2)) == [(3, text)]
    assert stragglers(statuses(stage, 20), Mesh(pipe=4)) == []


def test_ranks_that_are_a_step_apart_are_compared_step_by_step() -> None:
    long = [5.0 if step % 2 else 1.0 for step in range(40)]
    ahead, behind = statuses([long], 30)[0], statuses([long, long], 29)[1]
    assert stragglers([ahead, behind], Mesh(shard=2)) == []
