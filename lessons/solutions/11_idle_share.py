"""A solution of puzzle 11: GPipe.  (p - 1) / (m + p - 1) is 1/5 for four ranks and twelve microbatches."""


def solve(ranks: int) -> str:
    order = [f"F{m}" for m in range(12)] + [f"B{m}" for m in range(12)]
    return "\n".join(" ".join(f"{rank}{action}" for action in order) for rank in range(ranks))
