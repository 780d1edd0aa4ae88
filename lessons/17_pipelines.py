"""Lesson 17: pipelines, from stop and wait to zero bubble.

The idea.  Lesson 3 cut a model into stages; while one rank worked, the others waited.  Cut the *batch* too, into
microbatches, and stage 1 works on the first while stage 0 does the second.  The order of a rank's forwards
and backwards is a *schedule*.  Give every pass one tick, and two numbers distinguish schedules: the share of ticks in
which a rank is idle (the *bubble*), and the number of activations that it holds at once.

    naive         one microbatch goes through everything, then the next      idle 1 - 1/p
    GPipe         all forwards, then all backwards                           idle (p-1)/(m+p-1)   holds m
    1F1B          p - 1 - r forwards ahead, then one forward, one backward   the same             holds p - r
    interleaved   v stages on each rank                                      idle shrinks by v
    zero bubble   backward in two halves; weights wait and fill the gaps     less; zb_h2, zbv: no gaps if m >= 2 p

Predict before you run it, with four ranks and eight microbatches:
  1. Is 1F1B faster than GPipe?
  2. A 1F1B is written with ``steady = m - (p - 1 - r)`` and called with two microbatches.  What happens on rank 0?
  3. A program cuts 27 samples with ``batch // chunks``.  How many samples does the model see?

    plait lesson run 17
"""

import copy

import torch
from torch import Tensor, nn

import plait
from plait.schedule.actions import parse_schedule
from plait.schedule.check import check
from plait.schedule.orders import stages_per_rank, write_order
from plait.schedule.simulate import Costs, simulate

MESH = "pipe=4"
RANKS, WHY = range(1, 9), "more than 8 take long"
WIDTH, SAMPLES, MICROBATCHES = 12, 27, 8
torch.manual_seed(0)
MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(10)))
X = torch.randn(SAMPLES, WIDTH)
Y = X.flip(1).sin()
Line = list[tuple[str, int]]  # one rank's passes in order: ("F", microbatch) and ("B", microbatch)


# 1. Three schedules, each a few lines.


def naive(p: int, m: int) -> list[Line]:
    return [[(kind, k) for k in range(m) for kind in "FB"] for _ in range(p)]


def gpipe(p: int, m: int) -> list[Line]:
    return [[("F", k) for k in range(m)] + [("B", k) for k in range(m)] for _ in range(p)]


def one_f_one_b(p: int, m: int) -> list[Line]:
    lines = []
    for r in range(p):
        ahead = min(p - 1 - r, m)  # never more than m: prediction 2
        line = [("F", k) for k in range(ahead)]
        for k in range(m - ahead):
            line += [("F", ahead + k), ("B", k)]
        lines.append(line + [("B", k) for k in range(m - ahead, m)])
    return lines


# 2. The clock: each pass runs in the first tick in which its rank is free and its input is ready.


def tabulate(lines: list[Line]) -> list[list[tuple[str, int] | None]]:
    p, at, made, table = len(lines), [0] * len(lines), set(), []
    while any(at[r] < len(lines[r]) for r in range(p)):
        row = []
        for r in range(p):
            following = lines[r][at[r]] if at[r] < len(lines[r]) else None
            if following is not None:
                kind, k = following
                needed = ("F", r - 1, k) if kind == "F" else ("B", r + 1, k) if r < p - 1 else ("F", r, k)
                if needed[1] >= 0 and needed not in made:
                    following = None
            row.append(following)
        assert any(row), f"a deadlock: no rank can go on after tick {len(table)}"
        for r, done in enumerate(row):
            if done is not None:
                made.add((done[0], r, done[1]))
                at[r] += 1
        table.append(row)
    return table


def idle(lines: list[Line]) -> float:
    table = tabulate(lines)
    return sum(row.count(None) for row in table) / sum(map(len, table))


def most_held(line: Line) -> int:
    return max(sum(1 if kind == "F" else -1 for kind, _ in line[: i + 1]) for i in range(len(line)))


def draw(lines: list[Line]) -> None:
    for r, column in enumerate(zip(*tabulate(lines), strict=True)):
        print(f"    rank {r} | " + " ".join(f"{c[0]}{c[1]}" if c else ". " for c in column))


# 3. Carried out on ranks: values forward, gradients back (lesson 3), each rank by its own line.


def microbatches() -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.tensor_split(MICROBATCHES), Y.tensor_split(MICROBATCHES), strict=True))  # 4, 4, 4, 3, 3, ...


def body(comm: plait.Comm, schedule=one_f_one_b) -> dict[str, Tensor]:
    rank, p = comm.rank, comm.world_size
    part = copy.deepcopy(MODEL[len(MODEL) * rank // p : len(MODEL) * (rank + 1) // p])
    held = {}
    for kind, k in schedule(p, MICROBATCHES)[rank]:
        x, y = microbatches()[k]
        if kind == "F":
            if rank > 0:
                x = torch.empty_like(x)
                comm.recv(x, rank - 1).wait()
                x.requires_grad_()
            out = part(x)
            if rank < p - 1:
                comm.send(out.detach(), rank + 1)
            held[k] = x, out
        else:
            x, out = held.pop(k)
            if rank < p - 1:
                gradient = torch.empty_like(out)
                comm.recv(gradient, rank + 1).wait()
                out.backward(gradient)
            else:
                loss = (out - y).square().sum()
                loss.backward(torch.full_like(loss, 1 / SAMPLES))
            if rank > 0:
                comm.send(x.grad, rank - 1)
    return {name: parameter.grad for name, parameter in part.named_parameters()}


def main(ranks: int = 4) -> None:
    torch.set_num_threads(1)
    p, m = ranks, MICROBATCHES
    whole = copy.deepcopy(MODEL)
    for x, y in microbatches():
        loss = (whole(x) - y).square().sum()
        loss.backward(torch.full_like(loss, 1 / SAMPLES))
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

    # Prediction 1: no.  It waits as long, and holds p - r activations instead of m.
    bubble = (p - 1) / (m + p - 1)
    for order, formula in ((naive, 1 - 1 / p), (gpipe, bubble), (one_f_one_b, bubble)):
        lines = order(p, m)
        print(f"{order.__name__}: idle {idle(lines):.4f}, by the formula {formula:.4f}; holds", *map(most_held, lines))
        if order is not naive:
            draw(lines)
        assert abs(idle(lines) - formula) < 1e-12
        found = plait.run_threads(f"pipe={p}", lambda comm, order=order: body(comm, order))
        together = {name: gradient for rank in found for name, gradient in rank.items()}
        assert together.keys() == expected.keys() and all(torch.equal(together[n], g) for n, g in expected.items())
    assert [most_held(line) for line in one_f_one_b(p, m)] == [min(p - r, m) for r in range(p)]
    print(f"all three, on {p} ranks: gradients of the whole model, to the bit")

    # Prediction 2: -1 steady steps, an empty range, so microbatches are lost.
    # Prediction 3: 24 of 27 samples.
    print("find the fault: 2 - (4 - 1 - 0) = -1 steady steps; 27 // 8 * 8 = 24 samples")
    assert (2 - (4 - 1 - 0), 27 // 8 * 8, idle(one_f_one_b(4, 2))) == (-1, 24, 3 / 5)
    assert torch.equal(torch.cat([x for x, _ in microbatches()]), X)

    # The same in plait: orders are text; ``check`` proves one, ``simulate`` times it, an engine runs it.
    shares = {}
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zbv"):
        chunks = stages_per_rank(name)
        schedule = write_order(name, max(p, 2) * chunks, m)
        timeline = simulate(schedule, Costs(*[1 / chunks] * 3))  # forward, and both halves of backward
        shares[name], gap, peaks = timeline.idle_share(), sum(map(timeline.waits, range(p))), check(schedule).peaks
        print(f"  {name:12} idle {shares[name]:.4f}, in gaps {gap:4.1f} ticks, holds", *peaks)
        assert gap < 1e-9 or m < 2 * p or name not in ("zb_h2", "zbv"), "with 2 p microbatches these have no gaps"
        assert all(peak <= m * chunks for peak in peaks) and shares[name] <= shares["gpipe"]
    assert shares["gpipe"] == shares["1f1b"] > shares["interleaved"] and shares["1f1b"] > shares["zb_h1"]
    print("a schedule by hand, proved; it holds", check(parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")).peaks)
    try:
        check(parse_schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
        raise AssertionError("a deadlock was proved")
    except ValueError as error:
        print("another one, refused:", str(error).splitlines()[0][:100])

    def stages(comm: plait.Comm) -> dict[str, Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss = {"loss_fn": lambda net, b: (net(b[0]) - b[1]).square().sum(), "count_fn": lambda b: len(b[0])}
        engine = plait.Engine(model, comm, strategy="ddp", schedule="1f1b", optimizer=optimizer, **loss)
        engine.step(microbatches())
        return engine.full_state_dict()

    for state in plait.run_threads(f"pipe={p}", stages):
        assert all(torch.equal(state[name], MODEL.state_dict()[name] - g) for name, g in expected.items())
    print(f"plait.Engine with 1f1b on pipe={p}: after a step of SGD the parameters of one process, to the bit")


if __name__ == "__main__":
    main()
