"""Fault 7: 1F1B with fewer microbatches than stages.

It works with eight microbatches on four ranks.  With two, some of them vanish, without an error.  And a batch of 27 cut
by ``batch // chunks`` loses samples.  Where does the arithmetic go below zero?

    plait lesson find 7
"""

import torch

from plait.schedule.actions import parse_schedule
from plait.schedule.check import check


def one_f_one_b(p: int, m: int, fixed: bool) -> str:
    """The schedule as text, a line per rank."""
    lines = []
    for r in range(p):
        warmup = min(p - 1 - r, m) if fixed else p - 1 - r
        steady = m - warmup  # negative with the fault, and range(-1) is empty
        line = [f"{r}F{k}" for k in range(warmup)]
        for k in range(steady):
            line += [f"{r}F{warmup + k}", f"{r}B{k}"]
        lines.append(" ".join(line + [f"{r}B{k}" for k in range(max(steady, 0), m)]))
    return "\n".join(lines)


def split(x: torch.Tensor, chunks: int, fixed: bool) -> list[torch.Tensor]:
    if fixed:
        return list(x.tensor_split(chunks))
    size = len(x) // chunks
    return [x[k * size : (k + 1) * size] for k in range(chunks)]


def main() -> None:
    for p, m in ((4, 8), (4, 2), (4, 1)):
        check(parse_schedule(one_f_one_b(p, m, fixed=True)))
        steady = m - (p - 1)
        print(f"{p} ranks, {m} microbatches: rank 0 makes {steady} steady steps with the fault; fixed it is proved")
    try:
        check(parse_schedule(one_f_one_b(4, 2, fixed=False)))
        raise AssertionError("a schedule with -1 steady steps was proved")
    except ValueError as error:
        print("verdict, plait's own:", str(error).splitlines()[0][:120])
    seen = [sum(map(len, split(torch.arange(27), 8, fixed))) for fixed in (False, True)]
    print(f"and {27 - seen[0]} of 27 samples are in no microbatch")
    assert seen == [24, 27]
    print("the fix: warm up with min(p - 1 - r, m) forwards; tensor_split; plait schedule check FILE")
