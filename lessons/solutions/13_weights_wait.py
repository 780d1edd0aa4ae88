"""A solution of puzzle 13: on rank r, I follows F after p - 1 - r turns, and W follows F after p - 1 turns."""


def solve(ranks: int, microbatches: int) -> str:
    lines = []
    for rank in range(ranks):
        late = {"F": 0, "I": ranks - 1 - rank, "W": ranks - 1}
        turns = range(microbatches + ranks - 1)
        line = [(kind, turn - lag) for turn in turns for kind, lag in late.items()]
        lines.append(" ".join(f"{rank}{kind}{m}" for kind, m in line if 0 <= m < microbatches))
    return "\n".join(lines)
