"""Every solution solves its puzzle; the judge says how far an answer is off that misses its target."""

import re
from pathlib import Path

import pytest

from plait.run.commands.main import main
from plait.run.course.lessons import find, numbered

PUZZLES = [puzzle.number for puzzle in numbered("puzzles")]


@pytest.mark.parametrize("number", PUZZLES)
def test_a_solution_solves_and_an_empty_puzzle_does_not(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    solution = str(find(number, "solutions").path)
    assert main(["lesson", "check", str(number), "--file", solution]) == 0
    assert capfd.readouterr().out == "solved\n"
    assert main(["lesson", "check", str(number)]) == 1
    assert "solve is still to be written" in capfd.readouterr().out


ANSWERS = r"""
# 1, through rank 0: rank 0 sends 12,000 bytes, 6,000 more than 6,000
def solve(comm, x):
    if comm.rank:
        comm.send(x, 0)
        comm.recv(x, 0).wait()
        return
    for other in range(1, comm.world_size):
        term = torch.empty_like(x)
        comm.recv(term, other).wait()
        x += term
    for other in range(1, comm.world_size):
        comm.send(x, other)

# 1, all wait first: waited | line 4, in solve
def solve(comm, x):
    comm.recv(x, (comm.rank - 1) % comm.world_size).wait()
    comm.send(x, (comm.rank + 1) % comm.world_size)

# 2, tensor by tensor: rank 0 asks for 8 collectives, 7 more than 1
def solve(comm, gradients):
    for g in gradients:
        comm.all_reduce(g, ("shard",)).wait()

# 2, the first only: rank 0, tensor 1: 4 of 4 elements are wrong, by up to 9.0e+00 | and 16 more
def solve(comm, gradients):
    comm.all_reduce(gradients[0], ("shard",)).wait()

# 3, all of the state: rank 0 keeps 512 numbers of state, 384 more than 128
def solve(comm, parameters, gradient):
    comm.all_reduce(gradient, ("shard",)).wait()
    whole = torch.nn.Parameter(parameters)
    whole.grad = gradient
    optimizer = torch.optim.AdamW([whole], lr=0.01)
    optimizer.step()
    return optimizer

# 3, no state: rank 0 keeps 0 numbers of state in the optimizer, where its quarter has 128
def solve(comm, parameters, gradient):
    comm.all_reduce(gradient, ("shard",)).wait()
    whole = torch.nn.Parameter(parameters)
    whole.grad = gradient
    torch.optim.AdamW([whole], lr=0.01).step()
    return torch.optim.AdamW([whole], lr=0.01)

# 3, a name that is not there: NameError: name 'optimizer' is not defined |   line 4, in solve: return optimizer
def solve(comm, parameters, gradient):
    return optimizer

# 3, nothing returned: AttributeError:  | , when the puzzle used what solve returned
def solve(comm, parameters, gradient):
    pass

# 4, another order of additions: of 250 elements are wrong, by up to 5.0e-01; 23 of 24 bits agree
def solve(comm, x):
    pieces = x.chunk(comm.world_size)
    for other in range(comm.world_size):
        comm.send(pieces[other], other) if other != comm.rank else None
    total = pieces[comm.rank].clone()
    for other in reversed(range(comm.world_size)):
        if other != comm.rank:
            term = torch.empty_like(total)
            comm.recv(term, other).wait()
            total += term
    return total

# 5, owners in turn: rank 0's optimizer looks at 2,048 numbers, 1,024 more than 1,024
def solve(comm, parameters):
    mine = parameters[comm.rank :: comm.world_size]
    for i, p in enumerate(parameters):
        comm.reduce(p.grad, ("shard",), dst=i % comm.world_size).wait()
    optimizer = torch.optim.Adafactor(mine, lr=0.01)
    optimizer.step()
    for i, p in enumerate(parameters):
        comm.broadcast(p.detach(), ("shard",), src=i % comm.world_size).wait()
    return optimizer

# 6, autograd keeps all: rank 0 has 6 weights at once: 12,288 bytes, 10,240 more than 2,048
def solve(gather, reduce, x, y):
    weights, h = [], x
    for i in range(6):
        weights.append(gather(i).requires_grad_())
        h = torch.tanh(h @ weights[i].T)
    for i, g in enumerate(torch.autograd.grad((h - y).square().sum(), weights)):
        reduce(i, g)

# 6, copies of all weights: rank 0, a weight, its gradient and copies of weights: 24,576 bytes, 20,480 more than 4,096
def solve(gather, reduce, x, y):
    weights, h = [gather(i).clone().requires_grad_() for i in range(6)], x
    for w in weights:
        h = torch.tanh(h @ w.T)
    (h - y).square().sum().backward()
    for i, w in enumerate(weights):
        reduce(i, w.grad)

# 6, layer 0 never trains: rank 0, gradient 0: NoneType, where a tensor of shape (4, 16) is expected
def solve(gather, reduce, x, y):
    inputs, h = [], x
    for i in range(6):
        inputs.append(h)
        h = torch.tanh(h @ gather(i).T)
    g = 2 * (h - y)
    for i in range(5, 0, -1):
        g = step(inputs[i].detach().requires_grad_(), gather(i).requires_grad_(), g, i, reduce)

def step(h, w, g, i, reduce):
    g, for_weight = torch.autograd.grad(torch.tanh(h @ w.T), (h, w), g)
    reduce(i, for_weight)
    return g

# 7, no prefetch: rank 0 waits for 6 gathers that nothing hides, 5 more than 1
def solve(start, compute, x):
    for i in range(6):
        x = compute(x, start(i).wait())
    return x

# 7, all at once: rank 0 has 6 weights at once: 6,144 bytes, 4,096 more than 2,048
def solve(start, compute, x):
    for handle in [start(i) for i in range(6)]:
        x = compute(x, handle.wait())
    return x

# 8, over replica each time: rank 0 takes part in 4 messages over replica, 3 more than 1 | over replica 512 bytes
def solve(comm, parameters, gradient, microbatches):
    quarter = torch.zeros_like(parameters).chunk(2)[0]
    for m in range(microbatches):
        whole = parameters.new_empty(2 * len(parameters))
        comm.all_gather(whole, parameters, ("shard",)).wait()
        half, part = torch.empty_like(parameters), torch.empty_like(quarter)
        comm.reduce_scatter(half, gradient(whole, m), ("shard",)).wait()
        comm.reduce_scatter(part, half, ("replica",)).wait()
        quarter = quarter + part
    return quarter

# 9, nothing backward: rank 0, gradient of x: 48 of 48 elements are wrong
def solve(comm, x, w1, w2):
    y = torch.relu(x @ w1.T) @ w2.T
    total = y.detach().clone()
    comm.all_reduce(total, ("tensor",)).wait()
    return y + (total - y.detach())

# 10, the whole logits: rank 0 sends 3,840 bytes, 3,480 more than 360
def solve(comm, logits, targets):
    n, mine = comm.world_size, logits.detach().T.contiguous()
    whole = mine.new_empty(n * mine.size(0), mine.size(1))
    comm.all_gather(whole, mine, ("tensor",)).wait()
    parts = [logits.T if r == comm.rank else part for r, part in enumerate(whole.chunk(n))]
    return torch.nn.functional.cross_entropy(torch.cat(parts).T, targets, reduction="sum")

# 11, stop and wait: ranks are idle for 75 % of the time, 55 more than 20
def solve(ranks):
    return "\n".join(f"{r}F0 {r}B0 {r}F1 {r}B1" for r in range(ranks))

# 11, backwards in reverse: 0.0.weight:  |  of 24 bits agree (rounding, as after additions in another order)
def solve(ranks):
    order = [f"F{m}" for m in range(12)] + [f"B{m}" for m in reversed(range(12))]
    return "\n".join(" ".join(f"{r}{action}" for action in order) for r in range(ranks))

# 11, no order at all: the schedule is refused:
def solve(ranks):
    return "forward, then backward"

# 12, all forwards first: 8 microbatches: rank 0 holds 8 activations at once, 4 more than 4
def solve(ranks, microbatches):
    order = [f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in range(microbatches)]
    return "\n".join(" ".join(f"{r}{action}" for action in order) for r in range(ranks))

# 12, too few microbatches: 2 microbatches: the schedule is refused:
def solve(ranks, microbatches):
    lines = []
    for r in range(ranks):
        ahead = ranks - 1 - r
        line = [f"F{m}" for m in range(ahead)]
        for m in range(microbatches - ahead):
            line += [f"F{ahead + m}", f"B{m}"]
        line += [f"B{m}" for m in range(max(microbatches - ahead, 0), microbatches)]
        lines.append(" ".join(f"{r}{action}" for action in line))
    return "\n".join(lines)

# 13, each weight at once: ranks are idle for | more than 11.11
def solve(ranks, microbatches):
    lines = []
    for r in range(ranks):
        late = {"F": 0, "I": ranks - 1 - r, "W": ranks - 1 - r}
        line = [(k, t - lag) for t in range(microbatches + ranks) for k, lag in late.items()]
        lines.append(" ".join(f"{r}{k}{m}" for k, m in line if 0 <= m < microbatches))
    return "\n".join(lines)
"""
"""Answers that people give: the puzzle, a name, and words of the verdict above the file."""
WRONG = re.findall(r"^# (\d+), (.*?): (.*)\n((?:(?!# ).*\n)*)", ANSWERS, re.MULTILINE)


@pytest.mark.parametrize(("number", "words", "code"), [pytest.param(n, w, c, id=name) for n, name, w, c in WRONG])
def test_a_puzzle_says_how_far_off(
    number: str, words: str, code: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"import torch\n\n{code}")
    assert main(["lesson", "check", number, "--file", str(mine)]) == 1
    shown = capfd.readouterr().out
    assert all(word in shown for word in words.split(" | ")), shown


def test_every_puzzle_has_a_wrong_answer_and_reads_like_one() -> None:
    assert len(WRONG) == 24 and {int(number) for number, *_ in WRONG} == set(PUZZLES) == set(range(1, 14))
    for puzzle in numbered("puzzles"):
        assert puzzle.text.startswith(f"Puzzle {puzzle.number}: ") and "Fill in ``solve``" in puzzle.text
        assert "esson " in puzzle.text and f"plait lesson check {puzzle.number}" in puzzle.text
