"""A pipeline by hand: from one cut in a model to four ranks that send tensors. Run me, read me, break me.

    python lessons/a_pipeline_by_hand.py

Each part states what it expects, prints what it finds, and asserts it.  "Equal" means equal to the bit, against the
whole model in one process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import plait_lessons.script as script
import torch
from plait_lessons.naive import clock, hand_off, microbatcher
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.run.data import SyntheticRegression
from plait.run.models.mlp import MLP, Layer, MLPConfig, sample_count, squared_error_sum
from plait.schedule.actions import Kind
from plait.schedule.orders import gpipe, naive, one_f_one_b
from plait.schedule.partition import even
from plait.zero.state.init import materialise

STAGES, MICROBATCHES, SAMPLES, SEED = 4, 8, 27, 0
CONFIG = MLPConfig(num_layers=10, width=24)
"""Ten layers on four stages: 3, 3, 2 and 2."""
CPU = torch.device("cpu")
Gradients = dict[str, Tensor]


def whole_model() -> MLP:
    with plait.empty_parameters():
        model = MLP(CONFIG)
    materialise(model, SEED, CPU)
    return model


def batch() -> microbatcher.Pair:
    """Input and target; a target has a mask, and some of its rows have no loss."""
    target = SyntheticRegression(CONFIG.width, SEED).samples(0, 0, SAMPLES, SAMPLES)
    return target.pop("x"), target


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def equal(found: Gradients, expected: Gradients) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def by_hand(step: Callable[..., Tensor]) -> tuple[MLP, float]:
    """A fresh model after one step in two parts."""
    model = whole_model()
    part1, part2 = hand_off.cut(model, 2)
    loss = step(part1, part2, *batch(), squared_error_sum)
    return model, loss.item()


def slice_of(stage: int, stages: int) -> nn.Module:
    """A stage's layers under the names of the whole model, from which ``materialise`` draws the same values."""
    with plait.empty_parameters():
        layers = {str(index): Layer(CONFIG, index) for index in even(CONFIG.num_layers, stages)[stage]}
        model = nn.Sequential(OrderedDict(layers))
    materialise(model, SEED, CPU)  # draws these layers and no others
    return model


def four_ranks(comm: Comm, microbatches: list[microbatcher.Pair]) -> tuple[Gradients, int]:
    """This rank's line of 1F1B: its slice of the model, and nothing known of the others but their tensors."""
    world = script.init(comm)
    before, after = world.get_prev_rank(), world.get_next_rank()
    model = slice_of(world.rank, world.world_size)
    total = microbatcher.total_count(microbatches, sample_count)
    held: dict[int, tuple[Tensor, Tensor]] = {}
    most = 0
    for action in one_f_one_b(world.world_size, len(microbatches))[world.rank]:
        m = action.microbatch
        if action.kind is Kind.FORWARD:
            x, target = microbatches[m]
            if before is not None:
                x = hand_off.receive(world.recv_tensor((len(x), CONFIG.width), before))
            y = model(x)
            if after is None:
                y = squared_error_sum(y, target)
            else:
                world.send_tensor(y, after)
            held[m] = x, y
            most = max(most, len(held))
        else:
            x, y = held.pop(m)
            y.backward(torch.full_like(y, 1 / total) if after is None else world.recv_tensor(y.shape, after))
            if before is not None and x.grad is not None:
                world.send_tensor(x.grad, before)
    world.close()
    return gradients(model), most


def part(title: str) -> Callable[..., None]:
    print(f"\n{title}")
    return lambda *words: print("   ", *words)


def main() -> None:
    torch.set_num_threads(1)
    x, target = batch()
    model = whole_model()
    loss = squared_error_sum(model(x), target)
    loss.backward()
    expected = gradients(model)

    say = part("1. Two parts. A message has values and no graph: the gradient has to be handed back by hand.")
    right, found = by_hand(hand_off.two_parts)
    say(f"by hand: loss {found:.4f}, the whole model {loss.item():.4f}, all gradients equal")
    assert found == loss.item() and equal(gradients(right), expected)
    cut_off, found = by_hand(hand_off.without_the_way_back)
    say(f"nothing handed back: the same loss {found:.4f}, gradients for layers", layers_of(gradients(cut_off)))
    assert found == loss.item() and layers_of(gradients(cut_off)) == "5 6 7 8 9"
    try:
        by_hand(hand_off.without_requires_grad)
        raise AssertionError("there was nothing to hand back")
    except RuntimeError as error:
        say(f"requires_grad_() forgotten, so received.grad is None; torch says: {error}")
    ones, _ = by_hand(hand_off.without_the_gradient)
    wrong = [name for name, g in gradients(ones).items() if not torch.equal(g, expected[name])]
    say("ones handed back instead: gradients everywhere, wrong ones in layers", layers_of(wrong))
    assert gradients(ones).keys() == expected.keys() and layers_of(wrong) == "0 1 2 3 4"

    say = part("2. Stop and wait. The whole batch goes through four stages and back: one works, three wait.")
    table = clock.tabulate(naive(STAGES, 1))
    show(say, table)
    say("idle", clock.idle_share(table))
    assert clock.idle_share(table) == 1 - 1 / STAGES
    assert all(sum(action is not None for action in row) == 1 for row in table)

    say = part(
        f"3. Microbatches. {SAMPLES} samples in {MICROBATCHES}: sums of losses, divided once, by the whole count."
    )
    microbatches = microbatcher.split((x, target), MICROBATCHES)
    say("samples", [len(x) for x, _ in microbatches], " with a loss", [sample_count(t) for _, t in microbatches])
    assert torch.equal(microbatcher.join(microbatches)[0], x)
    mean = {name: g / sample_count(target) for name, g in expected.items()}
    reference, means = whole_model(), whole_model()
    losses = microbatcher.accumulate(reference, microbatches, squared_error_sum, sample_count)
    microbatcher.mean_of_means(means, microbatches, squared_error_sum, sample_count)
    for name, found_by, small in (("sum / count", reference, True), ("mean of means", means, False)):
        error = max(((g - mean[n]).abs().max() / mean[n].abs().max()).item() for n, g in gradients(found_by).items())
        say(f"{name:14} relative error {error:.1e}")
        assert error < 1e-5 if small else error > 1e-2

    say = part("4. The clock. In each tick a rank does one forward or backward, as soon as its needs are there.")
    idle = (STAGES - 1) / (MICROBATCHES + STAGES - 1)
    for order, peaks in ((gpipe, [MICROBATCHES] * STAGES), (one_f_one_b, [4, 3, 2, 1])):
        table = clock.tabulate(order(STAGES, MICROBATCHES))
        ticked = whole_model()
        result = clock.run(table, hand_off.cut(ticked, STAGES), microbatches, squared_error_sum, sample_count)
        say(order.__name__)
        show(say, table)
        say(f"idle {clock.idle_share(table):.4f}, (p-1)/(m+p-1) = {idle:.4f}; activations at most", *result.peaks)
        assert abs(clock.idle_share(table) - idle) < 1e-12 and list(result.peaks) == peaks
        assert all(map(torch.equal, result.losses, losses)) and equal(gradients(ticked), gradients(reference))
    say("As much waiting, 10 activations in place of 32, and both equal to the whole model.")

    say = part("5. Four ranks. Each has its slice of the model, and sends activations on and gradients back.")
    ranks = plait.run_threads(f"pipe={STAGES}", lambda comm: four_ranks(comm, microbatches))
    for rank, (found_here, most) in enumerate(ranks):
        say(f"rank {rank}: layers {layers_of(found_here)}, activations at most {most}")
    assert [most for _, most in ranks] == [4, 3, 2, 1]
    together = {name: g for found_here, _ in ranks for name, g in found_here.items()}
    assert equal(together, gradients(reference))
    say("All gradients together are those of the whole model, to the bit.")


def layers_of(names: Gradients | list[str]) -> str:
    return " ".join(dict.fromkeys(name.split(".")[0] for name in names))


def show(say: Callable[..., None], table: clock.Table) -> None:
    for line in clock.draw(table).splitlines():
        say(line)


if __name__ == "__main__":
    main()
