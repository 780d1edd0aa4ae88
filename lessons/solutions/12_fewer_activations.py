"""A solution of puzzle 12: 1F1B.  Rank r makes p - 1 - r forwards ahead, if there are so many microbatches."""


def solve(ranks: int, microbatches: int) -> str:
    lines = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        line = [f"F{m}" for m in range(ahead)]
        for m in range(microbatches - ahead):
            line += [f"F{ahead + m}", f"B{m}"]
        line += [f"B{m}" for m in range(microbatches - ahead, microbatches)]
        lines.append(" ".join(f"{rank}{action}" for action in line))
    return "\n".join(lines)
