"""The table in usual terms: where each row keeps its state, in which dtypes, the messages that follow, refusals."""

import re
from itertools import permutations, product

import pytest

from plait.table.cells import FULL, TABLE, UNREDUCED, Cell, Strategy, find_strategy, moves, parse_strategy
from plait.table.flat import lay
from plait.table.precision import LossScale, Precision

AXES = ("shard", "replica")
CELLS = [
    Cell(split, pending)
    for cut in range(3)
    for split in permutations(AXES, cut)
    for sums in range(3 - cut)
    for pending in permutations([a for a in AXES if a not in split], sums)
]
"""All there are."""

# ---- the table -------------------------------------------------------------------------------------------

# Every phase in which a row sends or cuts anything; a phase that is not here does nothing.
MOVES = """
ddp          step         all_reduce(shard, replica)

zero1        step         reduce_scatter(shard, replica)
             publish      all_gather(shard, replica)

zero2        microbatch   reduce_scatter(shard, replica)
             publish      all_gather(shard, replica)

zero3        forward      all_gather(shard, replica)
             keep         slice(shard, replica)
             backward     all_gather(shard, replica)
             microbatch   reduce_scatter(shard, replica)

zero3_keep   forward      all_gather(shard, replica)
             microbatch   reduce_scatter(shard, replica)

hsdp         forward      all_gather(shard)
             keep         slice(shard)
             backward     all_gather(shard)
             microbatch   reduce_scatter(shard)
             step         all_reduce(replica) inside shard

psdp         forward      all_gather(shard)
             keep         slice(shard)
             backward     all_gather(shard)
             microbatch   reduce_scatter(shard)
             step         reduce_scatter(replica) inside shard
             publish      all_gather(replica) inside shard

hpz          forward      all_gather(shard, replica)
             keep         slice(shard)
             backward     all_gather(shard)
             microbatch   reduce_scatter(shard, replica)
"""

PHASES = ("forward", "keep", "backward", "microbatch", "step", "publish")


def phases_of(row: Strategy) -> dict[str, str]:
    plan = moves(row)
    found = {phase: ", then ".join(map(str, getattr(plan, phase))) for phase in PHASES}
    return {phase: text for phase, text in found.items() if text}


def test_the_rows_send_this() -> None:
    expected: dict[str, dict[str, str]] = {}
    for block in MOVES.strip().split("\n\n"):
        name, lines = block.split(maxsplit=1)
        expected[name] = dict(re.split(r" +", line.strip(), maxsplit=1) for line in lines.splitlines())
    assert {name: phases_of(row) for name, row in TABLE.items()} == expected


# ---- text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_reads_what_it_prints(cell: Cell) -> None:
    assert Cell.parse(str(cell)) == cell


def test_the_ways_to_write_a_cell() -> None:
    assert Cell.parse("full") == FULL == Cell()
    assert Cell.parse("full, pending(shard, replica)") == UNREDUCED
    assert Cell.parse("  shard ,pending( replica ) ") == Cell(("shard",), ("replica",))
    assert Cell.parse("full,pending(shard replica)") == UNREDUCED
    assert Cell.parse("full, pending()") == FULL


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("data", "shard, replica.*not 'data'"),
        ("tensor", "shard, replica.*not 'tensor'"),
        ("full, pending(tensor)", "not 'tensor'"),
        ("shard/shard", "'shard/shard' names an axis twice"),
        ("shard, pending(shard)", "names an axis twice"),
        ("full, pending(shard, shard)", "names an axis twice"),
        ("", "cannot read the cell ''.*write full, shard, shard/replica"),
        ("shard replica", "cannot read the cell 'shard replica'"),
        ("shard, later(replica)", "cannot read the cell"),
        ("full/shard", "not 'full'"),
        ("shard/", "not ''"),
    ],
)
def test_a_cell_that_cannot_be_is_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Cell.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "mine",
        "mine: full | full",
        "mine: full | full | full | full | full",
        "a | b | c",
        ": full | full | shard/replica | shard/replica",
    ],
)
def test_a_row_is_a_name_and_four_cells(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read the strategy.*'name: params \| kept \| grads \| optimizer"):
        parse_strategy(text)


# ---- finding ---------------------------------------------------------------------------------------------


def test_a_row_is_found_by_name_by_text_or_is_one() -> None:
    mine = "mine: shard | full | shard, pending(replica) | shard/replica"
    assert find_strategy("zero3") is TABLE["zero3"]
    assert find_strategy(TABLE["hpz"]) is TABLE["hpz"]
    assert find_strategy(mine) == parse_strategy(mine)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("zero4", "'zero4'.*did you mean .*zero"),
        ("zero_3", "'zero_3'.*did you mean .*zero3"),
        ("hdsp", "'hdsp'.*did you mean .*hsdp"),
        ("dpp", "'dpp'.*did you mean .*ddp"),
        ("pipeline", f"^(?!.*did you mean).*{'.*'.join(TABLE)}"),  # near to none: it lists all
    ],
)
def test_an_unknown_name_gives_the_nearest(wrong: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_strategy(wrong)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            "full, pending(shard) | full | full, pending(shard, replica) | full",
            "params cannot be pending: only gradients are sums",
        ),
        ("full | full, pending(shard) | full, pending(shard, replica) | full", "kept cannot be pending"),
        ("full | full | shard/replica | full, pending(shard)", "optim cannot be pending"),
        (
            "full | full | full | full",
            r"neither split nor pending over shard, replica.*write pending\(shard, replica\)",
        ),
        ("full | full | shard | shard", r"neither split nor pending over replica.*write pending\(replica\)"),
        ("full | full | full, pending(replica) | full", r"neither split nor pending over shard.*pending\(shard\)"),
        (
            "shard | shard | shard, pending(replica) | full",
            "params are cut over shard, .*optimizer.* only over nothing.*cut the optimizer over shard as well",
        ),
        (
            "shard/replica | shard | shard, pending(replica) | shard",
            "params are cut over shard/replica, .*optimizer.* only over shard",
        ),
        (
            "shard | shard | shard/replica | shard",
            "grads are cut over shard/replica, .*optimizer.* only over shard.*"
            "cut the optimizer over shard/replica as well",
        ),
        (
            "shard | shard | shard, pending(replica) | replica/shard",
            "optimizer is cut over replica/shard and params over shard.*full reshuffle.*nest them.*shard, then",
        ),
        (
            "full | full | shard, pending(replica) | replica/shard",
            "optimizer is cut over replica/shard and grads over shard.*full reshuffle",
        ),
        ("full | full | replica/shard | shard/replica", "full reshuffle"),
        (
            "shard/replica | replica | shard/replica | shard/replica",
            r"kept is cut over replica, which is no beginning of params at rest \(shard/replica\): keep full",
        ),
        ("full | shard | shard/replica | shard/replica", "kept is cut over shard, which is no beginning"),
        ("shard | shard/replica | shard/replica | shard/replica", "kept is cut over shard/replica, which is no"),
    ],
)
def test_a_refused_row_is_told_why(row: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        parse_strategy(f"mine: {row}")
    assert str(error.value).startswith(f"strategy 'mine' ({row})")


def begins(short: Cell, long: Cell) -> bool:
    return long.split[: len(short.split)] == short.split


def test_exactly_these_rows_are_accepted() -> None:
    """All 11**4 rows: the rule in one line, and a row that is accepted has all its moves."""
    num_accepted = 0
    for params, kept, grads, optim in product(CELLS, repeat=4):
        sums = not params.pending and not kept.pending and not optim.pending
        covered = {*grads.split, *grads.pending} == set(AXES)
        nested = begins(params, optim) and begins(grads, optim) and begins(kept, params)
        try:
            row = Strategy("mine", params, kept, grads, optim)
        except ValueError:
            assert not (sums and covered and nested)
        else:
            assert sums and covered and nested
            assert moves(parse_strategy(str(row))) == moves(row)
            num_accepted += 1
    # optimizer full 2, over one axis 2 * 3 * 3, over both 2 * 6 * 4
    assert num_accepted == 2 + 18 + 48


@pytest.mark.parametrize("row", TABLE)
def test_a_mixed_row_reads_what_it_writes(row: str) -> None:
    mixed = TABLE[row].mixed("bf16").offloaded()
    again = parse_strategy(str(mixed))
    assert again == mixed
    assert (again.params.dtype, again.kept.dtype, again.grads.dtype, again.optim.dtype) == (
        *("bf16", "bf16"),
        *("fp32", "fp32"),
    )
    assert again.optim.device == "cpu" and again.grads.pending == TABLE[row].grads.pending


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x: full bf16 | full | full bf16, pending(shard, replica) | full", "same dtype"),
        ("x: full fp32 | full fp32 | full bf16, pending(shard, replica) | full", "no wider"),
        ("x: full | full | full fp16, pending(shard, replica) | full", "no wider"),
        ("x: full @cpu | full | full, pending(shard, replica) | full", "device"),
        ("x: full int8 | full int8 | full, pending(shard, replica) | full", "dtype is one of"),
        ("x: full | full | full, pending(shard, replica) | full @disk", "device is cpu"),
    ],
)
def test_a_row_that_cannot_be_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        find_strategy(text)


def test_who_has_master_weights() -> None:
    row = TABLE["zero2"]
    full, half, whole = (lay([("p", (3,))], size, 2, real=size < 8) for size in (4, 2, 8))
    assert not full.has_master(row) and not half.has_master(row.mixed("bf16", "bf16"))
    assert full.has_master(row.mixed("bf16")) and full.has_master(row.offloaded())
    assert not whole.has_master(row.mixed("bf16")), "integers and complex numbers stay what they are"
    assert whole.itemsize_in(row.mixed("bf16").params) == 8 and half.itemsize_in(row.mixed("bf16").grads) == 4


def test_a_precision_is_a_row_without_places() -> None:
    one, other = (Precision.of(TABLE[name].mixed("fp16"), 8.0) for name in ("ddp", "hpz"))
    assert one == other and one.params.split == () and one.optim.dtype == "fp32"
    scale = one.loss_scale()
    assert scale is not None and scale.scale == 8.0 and scale is not one.loss_scale()


def test_a_loss_scale_halves_at_once_and_doubles_after_good_steps() -> None:
    scale = LossScale(8.0, interval=3)
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scale.update(finite=finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 4, 4, 4, 8, 8]


def test_a_loss_scale_gives_up_where_no_factor_is_small_enough() -> None:
    scale = LossScale(4.0)
    with pytest.raises(ValueError, match="not finite"):
        for _ in range(100):
            scale.update(finite=False)


@pytest.mark.parametrize(
    "settings", [{"scale": 0.0}, {"scale": float("inf")}, {"growth": 0.5}, {"backoff": 1.0}, {"interval": 0}]
)
def test_a_loss_scale_that_cannot_move_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        LossScale(**settings)  # type: ignore[arg-type]
