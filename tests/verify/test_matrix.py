"""The matrix: the covering set, what its cells are, that a fault turns it red, and the small one itself."""

import io
import json
import math
import random
import shlex
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plait.comm import thread
from plait.comm.ordered_reduce import ordered_sum
from plait.pipeline.tied_weights import TiedWeights
from plait.referee.verify import matrix
from plait.referee.verify.cases import DIMENSIONS, LINKS, RULES, cells, command, config_of, due, points, uneven
from plait.referee.verify.covering import Rule, covering, pairs
from plait.referee.verify.matrix import Outcome, outcome_of, run_cells
from plait.referee.verify.run import Verdict, judge, references
from plait.run.commands.main import main, parse
from plait.run.config.check import validate
from plait.run.config.settings import VerifyConfig
from plait.run.job.job import Job, make_job
from plait.step.norm import Norm
from plait.table.cells import TABLE
from plait.table.mesh import AXES


def allowed(dimensions: Mapping[str, Sequence[Hashable]], rules: Sequence[Rule]) -> list[dict[str, Hashable]]:
    """Every combination of values that keeps the rules."""
    every = (dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values()))
    return [row for row in every if all(rule.holds(*(row[name] for name in rule.over)) for rule in rules)]


def is_covering(dimensions: Mapping[str, Sequence[Hashable]], rules: Sequence[Rule]) -> None:
    rows, every = covering(dimensions, rules), allowed(dimensions, rules)
    assert all(row in every for row in rows), "a row breaks a rule"
    assert all(list(row) == list(dimensions) for row in rows)
    possible = {pair for row in every for pair in pairs(row)}
    assert {pair for row in rows for pair in pairs(row)} == possible
    assert len({tuple(row.values()) for row in rows}) == len(rows) <= len(every)
    assert covering(dimensions, rules) == rows, "the same input gives the same rows"


def never(names: tuple[str, ...], values: tuple[Hashable, ...]) -> Rule:
    """These values do not stand together."""
    return Rule(names, lambda *found: found != values)


@pytest.mark.parametrize("seed", range(60))
def test_any_rules(seed: int) -> None:
    """2 to 5 dimensions of 1 to 4 values; some pairs and triples are forbidden, so that others become impossible."""
    draw = random.Random(seed)
    dimensions = {name: tuple(range(draw.randint(1, 4))) for name in "abcde"[: draw.randint(2, 5)]}
    rules = []
    for size in (2, 3):
        for names in combinations(dimensions, size):
            for values in product(*(dimensions[name] for name in names)):
                if draw.random() < 0.15:
                    rules.append(never(names, values))
    if allowed(dimensions, rules):
        is_covering(dimensions, rules)
    else:
        with pytest.raises(ValueError, match="allow no row"):
            covering(dimensions, rules)


def test_many_dimensions_need_few_rows() -> None:
    """20 dimensions of 4 values: a million million rows, 16 at least, and the greedy way stays near it."""
    dimensions = {f"d{i}": (0, 1, 2, 3) for i in range(20)}
    rows = covering(dimensions)
    assert {pair for row in rows for pair in pairs(row)} >= {("d0", 3, "d19", 2), ("d7", 0, "d8", 0)}
    assert 16 <= len(rows) <= 45


def test_a_dimension_alone_and_none_at_all() -> None:
    assert covering({"a": (1, 2)}) == covering({}) == []


SHARDED = config_of({"model": "gpt", "bucket": 0, "strategy": "zero3", "shard": 3, "microbatches": 2})
PIPED = config_of(
    {"model": "mlp", "bucket": 0, "strategy": "hsdp", "pipe": 2, "replica": 2, "schedule": "zbv", "microbatches": 3}
)
TIED = config_of({"model": "gpt", "strategy": "zero2", "pipe": 3, "schedule": "gpipe", "microbatches": 2})
SPLIT = config_of(
    {"model": "gpt", "bucket": 0, "strategy": "zero1", "tensor": 2, "shard": 2, "sequence_parallel": True}
)

MIXED = ("bf16-mixed", "fp16-mixed")

WHOLE = ("ddp", "zero1", "zero2")
"""Rows that gather nothing."""

ONE_STAGE = {None, "naive", "gpipe", "1f1b", "zb_h1", "zb_h2"}
"""Orders with one stage on a rank."""


@pytest.fixture(scope="module")
def full() -> tuple[VerifyConfig, ...]:
    return cells("full")


# ---- what the cells are ---------------------------------------------------------------------------------------------


def impossible(most: int) -> set[tuple[str, Any, str, Any]]:
    """The pairs that no cell can hold, said again without the rules."""
    found: set[tuple[str, Any, str, Any]] = {("pipe", p, "schedule", None) for p in (2, 3, 4)}
    found |= {("schedule", o, "chunks", 3) for o in DIMENSIONS["schedule"] if o != "interleaved"}
    found |= {("pipe", 4, "chunks", 3), ("tensor", 1, "sequence_parallel", True)}
    found |= {("model", "mlp", "sequence_parallel", True), ("schedule", None, "split", "uneven")}
    for hold in (0, 2, None):
        found |= {("schedule", None, "hold", hold)}
        found |= {("strategy", row, "hold", hold) for row in WHOLE} | {("bucket", 0, "hold", hold)}
    found |= {("strategy", row, "bucket", 0) for row in TABLE.keys() - {*WHOLE}}
    for a, b in combinations(AXES, 2):
        found |= {(a, m, b, n) for m, n in product((1, 2, 3, 4), repeat=2) if m * n > most}
    several = "hosts", "each replica"
    found |= {("replica", 1, *several), ("shard", 1, *several)}
    found |= {(axis, n, *several) for axis in ("pipe", "tensor") for n in (2, 3, 4) if 4 * n > most}
    split: list[tuple[str, Any]] = [("sequence_parallel", True), *(("tensor", t) for t in (2, 3, 4))]
    found |= {(*there, "dtype", d) for there in split for d in MIXED}
    return found


@pytest.mark.parametrize("most", [8, 16])
def test_every_two_settings_meet_unless_they_cannot(most: int) -> None:
    rows = points(most)
    every = {(a, m, b, n) for a, b in combinations(DIMENSIONS, 2) for m, n in product(DIMENSIONS[a], DIMENSIONS[b])}
    assert every - {pair for row in rows for pair in pairs(row)} == impossible(most)
    for row in rows:
        assert math.prod(row[axis] for axis in AXES) <= most
        assert all(rule.holds(*(row[name] for name in rule.over)) for rule in RULES)
        assert row["split"] == "even" or row["pipe"] > 1 or row["schedule"] not in ONE_STAGE
    assert len(rows) < 100, "the small matrix has to run in two minutes"


def test_full_has_every_row_on_every_mesh(full: tuple[VerifyConfig, ...]) -> None:
    counts = [c for c in product((1, 2, 3, 4), repeat=4) if math.prod(c) <= 8]
    assert len(counts) == 47
    twice = {(c.machine.parsed_mesh, c.layout.strategy) for c in full if c.layout.microbatches == 2}
    assert {tuple(map(mesh.axis, AXES)) for mesh, _ in twice} >= set(counts)
    for row in TABLE:
        assert sum(1 for mesh, strategy in twice if strategy == row and mesh.size <= 8) == 47
    assert 47 * 8 < len(set(full)) == len(full) <= 530


def test_dtypes_go_with_what_the_verdict_can_say(full: tuple[VerifyConfig, ...]) -> None:
    """16 bits only where bits are due, fp64 where products are split."""
    found = {(c.machine.parsed_mesh.tensor > 1, c.task.network.dtype) for c in full}
    assert found == {(False, "fp32"), *((False, dtype) for dtype in MIXED), (True, "fp64")}


def test_no_cell_of_full_is_refused(full: tuple[VerifyConfig, ...]) -> None:
    for config in full[::40]:
        validate(config)


def test_an_uneven_split_has_all_links() -> None:
    for stages in range(2, LINKS + 1):
        sizes = list(map(int, uneven(stages).split()))
        assert len(sizes) == stages and sum(sizes) == LINKS and min(sizes) == 1


def test_the_command_of_a_cell_is_its_config(full: tuple[VerifyConfig, ...]) -> None:
    shown = [command(config) for config in full]
    assert len(set(shown)) == len(shown)
    for config in (*full[:88:11], *full[90::60], replace(SHARDED, clip=None, ragged=False)):
        words = shlex.split(command(config))
        assert words[:2] == ["plait", "verify"]
        assert parse(words[1:]) == config


# ---- verdicts -------------------------------------------------------------------------------------------------------


def test_what_is_due() -> None:
    assert (due(SHARDED), due(PIPED), due(SPLIT)) == ("bitwise", "bitwise", "equal")
    failed = {
        (config.machine.mesh, word): Outcome(config, word).failed
        for config in (SHARDED, SPLIT)
        for word in ("bitwise", "equal", "DIFFERENT", "error")
    }
    assert [where for where, bad in failed.items() if not bad] == [
        *[("shard=3", "bitwise"), ("shard=2 tensor=2", "bitwise"), ("shard=2 tensor=2", "equal")]
    ]


def text(run: Any) -> str:
    console = Console(file=io.StringIO(), width=120, soft_wrap=True)
    run(console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


OTHERS: tuple[dict[str, Any], ...] = (
    *({"dtype": dtype} for dtype in MIXED),
    {"dtype": "fp16-mixed", "loss_scale": 64.0},
    {"strategy": "mine: shard bf16 | full bf16 | shard fp32, pending(replica) | shard/replica fp64"},
)


@pytest.mark.parametrize("changes", OTHERS, ids=lambda changes: " ".join(map(str, changes.values())))
def test_a_reference_of_another_cell_is_seen(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is that of plain fp32: every one of these settings shows in the bits."""
    plain, config = make_job(PIPED.task, PIPED.dtypes), replace(PIPED, **{"strategy": "zero3", **changes})
    assert outcome_of(config).word == "bitwise"
    monkeypatch.setattr(matrix, "references", lambda job, *rest: references(plain, *rest))
    outcome = outcome_of(config)
    assert outcome.word == "DIFFERENT", outcome.told


# ---- faults ---------------------------------------------------------------------------------------------------------


def test_a_fault_is_told_with_the_command_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that counts what several ranks hold more than once; the cells after it run, and none holds twice."""
    wrong = replace(PIPED, strategy="ddp")
    outcomes: list[Outcome] = []
    monkeypatch.setattr(Norm, "counts", lambda self, owned: True)
    shown = text(lambda console: outcomes.extend(run_cells([wrong, SHARDED], console)))
    assert [outcome.word for outcome in outcomes] == ["DIFFERENT", "bitwise"]
    assert any(line.startswith("norm step 1") for line in outcomes[0].told)
    assert f"DIFFERENT, bitwise is due: {command(wrong)}" in shown


def judge_within(rounding: float, job: Job, config: VerifyConfig, *rest: Any) -> Verdict:
    """The verdict with the tolerances of split products."""
    verdict = judge(job, config, *rest)
    return replace(verdict, tree=tuple(replace(finding, tolerance=rounding) for finding in verdict.tree))


def test_the_same_bits_are_due_where_no_product_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of ranks in another order: equal to rounding, and a failure all the same."""
    monkeypatch.setattr(thread, "ordered_sum", lambda terms, sizes, op, out: ordered_sum(terms[::-1], sizes, op, out))
    monkeypatch.setattr(matrix, "judge", lambda *given: judge_within(1e-3, *given))
    outcome = outcome_of(replace(SHARDED, strategy="ddp"))
    assert (outcome.word, outcome.failed) == ("equal", True)
    assert "not bitwise" in outcome.told[0]


def test_what_a_cell_raises_is_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: TiedWeights) -> None:
        if self.edges:
            raise RuntimeError("no way from [here] to there")

    outcomes: list[Outcome] = []
    monkeypatch.setattr(TiedWeights, "add_uses", broken)
    shown = text(lambda console: outcomes.extend(run_cells([TIED, PIPED], console)))
    assert [outcome.word for outcome in outcomes] == ["error", "bitwise"]
    assert outcomes[0].told[0] == "RuntimeError: no way from [here] to there"
    assert outcomes[0].told[1].startswith("in broken, ")
    assert command(TIED) in shown


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_failing_cell_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "matrix.json"
    good = config_of({"model": "mlp", "bucket": 0, "strategy": "zero3", "shard": 2, "microbatches": 2})
    monkeypatch.setattr(matrix, "cells", lambda size: (good, good))
    assert main(["verify", "--matrix", "full", "--seed", "3"]) == 0
    monkeypatch.setattr(TiedWeights, "add_uses", lambda self: None)
    monkeypatch.setattr(matrix, "cells", lambda size: (good, TIED))
    assert main(["verify", "--matrix", "small", "--json", str(file)]) == 1
    shown = capsys.readouterr().out.split("\n")
    assert sum("2 cells in" in line for line in shown) == 2 and "1 failed" in shown[-2]
    told = json.loads(file.read_text())
    assert (told["matrix"], told["failed"], len(told["cells"])) == ("small", 1, 2)
    right, bad = told["cells"]
    assert (right["verdict"], right["due"], right["told"]) == ("bitwise", "bitwise", [])
    assert bad["verdict"] == "DIFFERENT" and any(line.startswith("ledger") for line in bad["told"])
    assert bad["command"] in "".join(shown)


# ---- the matrix itself ----------------------------------------------------------------------------------------------


def of_small(count: int) -> list[dict[str, Any]]:
    """Points of the small matrix, each with the most values and then the most pairs that none before it has."""
    left, taken = points(8), list[dict[str, Any]]()
    for _ in range(count):
        values = {item for point in taken for item in point.items()}
        held = {pair for point in taken for pair in pairs(point)}
        taken.append(max(left, key=lambda point: (len(point.items() - values), len(set(pairs(point)) - held))))
    return taken


def test_twelve_cells_of_the_small_matrix() -> None:
    """Every value of every dimension."""
    taken = of_small(12)
    assert {item for point in taken for item in point.items()} == {(d, v) for d in DIMENSIONS for v in DIMENSIONS[d]}
    outcomes = run_cells(list(map(config_of, taken)), Console(file=io.StringIO()))
    assert len(outcomes) == 12
    assert not [(o.config, o.told) for o in outcomes if o.failed or o.told]


@pytest.mark.timeout(1800)
def test_the_small_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row, order, size of each axis and number of microbatches, each with each other: two minutes."""
    code = main(["verify", "--matrix", "small"])
    assert code == 0, capsys.readouterr().out


@pytest.mark.timeout(4 * 3600)
def test_the_full_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    """Every row on every mesh of at most 8 ranks too."""
    code = main(["verify", "--matrix", "full"])
    assert code == 0, capsys.readouterr().out
