"""A thousand layouts with one mistake each: none that changes a sum, an owner or a read is proved.

``naive`` carries out each mutant with numbers and decides whether it changes anything.  So the proof can err on
neither side: accepted mutants have the same last bits, and refused ones do not, except for one kind of mutant: a
gradient that is made before its backward from unread values, and overwritten afterwards.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from mutants import CASES, Case, make, of_programs, of_schedules, of_tables, stages_of
from naive import exact, ordered, simulate

from plait.referee.prove.machine import Machine
from plait.referee.prove.scenes import Refuted
from plait.referee.prove.sums import ANOTHER_ORDER

EACH = 64
"""Mutants of each case, at least: a thousand in all."""

EARLY = "has a gradient before its backward"


def ids(case: tuple[object, ...]) -> str:
    return "-".join(map(str, case)).replace(" ", "_")


def verdict(case: Case, programs: dict) -> str:
    try:
        Machine(replace(case.scene, programs=programs)).run()
    except Refuted as refuted:
        return str(refuted.example)
    return ""


def judged(case: Case, seed: int, number: int) -> Counter[str]:
    """Every mutant by what the proof and the numbers say of it; fails where they do not agree."""
    draw = random.Random(seed)

    def result(programs: dict, add: object) -> object:
        return simulate(programs, case.scene.flats, case.mesh, add)

    right = {add: result(dict(case.programs), add) for add in (exact, ordered)}
    assert not any(isinstance(one, str) for one in right.values()), right
    assert verdict(case, dict(case.programs)) == ""
    found: Counter[str] = Counter()
    for mutants in (of_programs(case, draw, number), of_schedules(case, draw, number // 2), of_tables(case)):
        for what, programs in mutants:
            refused = verdict(case, programs)
            same_sums = result(programs, exact) == right[exact]
            same = same_sums and result(programs, ordered) == right[ordered]
            if not refused:
                assert same, f"proved, and wrong: {what}"
                found["harmless"] += 1
            elif same:
                assert EARLY in refused, f"refused ({refused}), and right: {what}"
                found["early"] += 1
            else:
                assert not same_sums or ANOTHER_ORDER in refused, f"{refused}: {what}"
                found["another order" if same_sums else "harmful"] += 1
    return found


@pytest.mark.parametrize("number", range(len(CASES)), ids=[ids(case) for case in CASES])
def test_no_slip_is_proved(number: int) -> None:
    found: Counter[str] = Counter()
    for case in (stages := stages_of(*CASES[number])):
        found += judged(case, number, 44 // min(2, len(stages)))
    assert found.total() >= EACH, found
    assert found["harmful"] > found["harmless"], found


@pytest.mark.parametrize("seed", range(100, 106))
def test_ten_thousand_slips(seed: int) -> None:
    total: Counter[str] = Counter()
    for case in (case for layout in CASES for case in stages_of(*layout)):
        total += judged(case, seed, 90)
    assert total.total() > 1_700, total


def test_an_exchange_of_two_microbatches_changes_bits_and_no_sum() -> None:
    case = make("ddp", "shard=3", None)
    places = [i for i, op in enumerate(case.programs[1]) if op.kind == "gradient"]
    ops = list(case.programs[1])
    ops[places[0]], ops[places[1]] = ops[places[1]]._replace(microbatch=0), ops[places[0]]._replace(microbatch=1)
    programs = {**case.programs, 1: tuple(ops)}
    assert verdict(case, programs) == ""  # that was nothing: the same two again
    reads = [i for i, op in enumerate(ops) if op.kind in ("read", "gradient") and op.microbatch >= 0]
    for i in reads:
        ops[i] = ops[i]._replace(microbatch=1 - ops[i].microbatch)
    assert ANOTHER_ORDER in verdict(case, {**case.programs, 1: tuple(ops)})


@pytest.mark.parametrize("row", ["zero3", "hpz"])
def test_no_sum_is_taken_for_a_parameter(row: str) -> None:
    """Both are numbers to the machine."""
    case = make(row, "shard=2 replica=2", None)
    for place, op in enumerate(case.programs[0]):
        for buffer in {"open": ("whole", "sum"), "all_gather": ("sum",), "read": ("sum", "whole")}.get(op.kind, ()):
            changed = {rank: list(program) for rank, program in case.programs.items()}
            for ops in changed.values():
                ops[place] = ops[place]._replace(buffer=buffer)
            assert verdict(case, {rank: tuple(ops) for rank, ops in changed.items()}) != "", (op, buffer)


def test_the_counterexample_names_rank_element_and_microbatch() -> None:
    case = make("zero3", "shard=3", None)
    place = next(i for i, op in enumerate(case.programs[2]) if op.kind == "add" and op.microbatch == 1)
    program = case.programs[2]
    says = verdict(case, {**case.programs, 2: (*program[:place], *program[place + 1 :])})
    assert says.startswith(
        "sums: the gradient that is used for an update is wrong: microbatch 1 of data rank 0 is in it"
    )
    assert "not at all (due: once)" in says and "rank 2, step 0, parameter b, element 4 of the flat buffer" in says
