"""A model that cannot be cut, or does not fit, is refused before it trains wrongly."""

from collections.abc import Callable
from typing import Any

import engine_cases as cases
import pytest
import torch
from crossing_cases import Biased, Chain, Tower, chain
from engine_cases import Batch, batches, distinct, loss_sum
from pipeline_cases import build, linear, on, refused, same, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.comm import Comm


class Transposed(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x).t()
        return x


@pytest.mark.parametrize("split", [(1, 2), (2, 1)])
def test_samples_may_change_places_between_links(split: tuple[int, int]) -> None:
    data = [{name: tensor[:5] for name, tensor in batch.items()} for batch in batches(2)]  # square: 5 x 5
    same(distinct(Transposed(linear(), linear(), linear())), data=data, split=split, microbatches=1)


def link_by_link(model: nn.Module, batch: Batch) -> Tensor:
    for link in model.links:
        batch = batch | {"x": link(batch["x"])}
    return batch["x"].sum()


LOSSES: dict[str, Callable[[Any, Batch], Tensor]] = {
    "twice": lambda model, batch: loss_sum(model, batch) + loss_sum(model, batch),
    "never": lambda model, batch: batch["x"].sum(),
    "link by link": link_by_link,
    "regularised": lambda model, batch: loss_sum(model, batch) + sum(p.square().sum() for p in model.parameters()),
    "by name": lambda model, batch: loss_sum(model, batch) + model.l0.weight.square().sum(),
    "recomputed": lambda model, batch: checkpoint(model, batch["x"], use_reentrant=False).square().sum(),
}


@pytest.mark.parametrize("row, mesh", [("ddp", "pipe=2"), ("zero3", "pipe=2 shard=2")])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_no_stage_can_run(name: str, row: str, mesh: str) -> None:
    words = "calls the model once|did not call|loss_fn reads|another stage|is used by|only some links|of two stages"
    with pytest.raises((ValueError, AttributeError), match=words):
        cases.train(chain(), mesh, row, batches(1), loss=LOSSES[name], microbatches=2)


@pytest.mark.parametrize("caught", [BaseException, Exception])
def test_a_loss_that_catches_what_ends_its_call_is_the_loss_of_the_last_stage(caught: Any) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        try:
            return loss_sum(model, batch)
        except caught:
            return torch.zeros(())

    same(chain(), loss=loss)


class Keeping(Chain):
    """Keeps what its first link made, for the loss."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.l0(x)
        return self.l2(self.l1(self.hidden))


@pytest.mark.parametrize("split", [(1, 2), (2, 1)])
def test_a_loss_that_reads_an_earlier_link_is_right_or_refused(split: tuple[int, int]) -> None:
    model = distinct(Keeping(linear(), linear(), linear()))
    early = lambda model, batch: loss_sum(model, batch) + model.hidden.square().sum()  # noqa: E731
    if split == (2, 1):
        refused("another stage", model, loss=early, split=split)
    else:
        same(model, loss=early, split=split)


class Reentrant(Chain):
    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = checkpoint(link, x, use_reentrant=True) if x.requires_grad else link(x)
        return x


class Sometimes(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x[:, : 3 + self.calls % 2]


class Whatever(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand(-1, 5)


class Decaying(nn.Module):
    """Reads a buffer that it writes to in each forward."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.99)
        return self.linear(x) * self.scale


@pytest.mark.parametrize(
    ("words", "model", "settings"),
    [
        ("2 stages, but the model has 1 links", chain(linear()), {}),
        ("use_reentrant=False", distinct(Reentrant(linear(), linear(), linear(), linear())), {}),
        (
            "depend on the shapes of the batch only",
            chain(linear(), Sometimes(), Whatever(), linear()),
            {"split": (2, 2)},
        ),
        (r"writes in place.* under way at once, here with \[1\]: let .*clone", chain(Decaying(), linear()), {}),
        (r"parse_schedule\(text\)", chain(), {"schedule": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"}),
    ],
)
def test_what_no_pipeline_can_run(words: str, model: nn.Module, settings: dict[str, Any]) -> None:
    refused(words, model, **settings)


@torch.no_grad()
def without_gradients(comm: Comm) -> None:
    step(build(chain(), comm), batches(1)[0])


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("split", lambda comm: build(chain(), comm, split=[(1, 3), (2, 2)][comm.rank]) and None),
        (r"under torch\.no_grad", without_gradients),
        ("differ in pipe only", lambda comm: step(build(chain(), comm), batches(2)[comm.rank])),
    ],
)
def test_ranks_and_modes_that_do_not_fit(words: str, body: Any) -> None:
    with pytest.raises(ValueError, match=words):
        on("pipe=2", body)


class Deciding(Tower):
    """Asks the embedding whether to go on."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scale = 2.0 if x.sum() > 0 else 1.0
        for block in self.blocks:
            x = block(x) * scale
        return self.head(self.norm(x))


class Noting(Tower):
    """Blocks write into a list of the model's."""

    class Block(Biased):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            seen.append(x.square().mean())
            return super().forward(x)

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x, seen = self.embed(x), list[Tensor]()
        for block in self.blocks:
            x = block(x, seen)
        return self.head(self.norm(x)) + torch.stack(seen).sum()


class Hooked(Tower):
    """Collects from its blocks by hooks that the first forward adds, as transformers does for router logits."""

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for _, child in self.blocks.named_children():
            for _ in child.named_children():
                child.register_forward_hook(lambda module, args, out: seen.append(out))
        return super().forward(x) + sum(one.square().mean() for one in seen)


class Hidden(Tower):
    """Returns a thing that only this process knows."""

    class Block(Biased):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), object()

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


class Overwriting(Tower):
    """Writes to the embedding's output, and reads it again after the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.embed(x)
        first *= 2
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


class Elsewhere(Tower):
    """Calls its norm by a name that its source does not show."""

    def forward(self, x: Tensor) -> Tensor:
        x = getattr(self, "nor" + "m")(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting(Tower):
    """A module before the blocks returns something besides its tensor, which is read after them."""

    class Embed(nn.Module):
        calls = 0

        def __init__(self, made: Callable[[Tensor, int], Any]) -> None:
            super().__init__()
            self.inner, self.made = linear(), made

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.inner(x), self.made(x, self.calls)

    def __init__(self, made: Callable[[Tensor, int], Any], read: Callable[[Any], Any] = lambda found: found) -> None:
        super().__init__()
        self.embed, self.read = self.Embed(made), read

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.read(found)


class Numbers:
    """A thing that only this process knows."""

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * 3


def number() -> nn.Module:
    return Counting(lambda x, calls: 0.5 if x[0, 0] > 0 else 0.25)


def once() -> nn.Module:
    """It becomes another thing after microbatches of two sizes."""
    return Counting(lambda x, calls: 2 if calls < 3 else Numbers())


def kept() -> nn.Module:
    """It is a tensor, of which the length is read."""
    return Counting(lambda x, calls: x[x[:, 0] > 0], len)


class SparseBias(Tower):
    """A sparse tensor that is made between blocks is given to all."""

    class Block(Biased):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return super().forward(x, bias.to_dense())

    block = Block

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        bias = x.detach().to_sparse()
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    "kind, words",
    [
        (Deciding, "'__bool__' reads a value of another stage"),
        (Noting, r"'blocks\.\d' writes into a list or a dict"),
        (Hooked, r"the modules inside of 'blocks\.\d' belongs to another stage"),
        (Hidden, "stage 0 ends with 'blocks.2', which returns object"),
        (number, r"'embed' returns .*0\.2?5.* where it returned .* for an earlier batch .*, or return .* as a tensor"),
        (once, "'embed', whose earlier result later stages know, returns Numbers: from stage to stage go"),
        (kept, r"'embed' returns .*float64 \[\d, 5\].* where it returned .*float64 \[\d, 5\].* pad what varies"),
        (SparseBias, r"an argument of 'blocks\.\d' is read after .*, and is a sparse_coo tensor"),
        (Overwriting, "loss_fn, or the model after its links, uses a value of another stage"),
        (Elsewhere, "'norm' belongs to no link of the pipeline and was taken to run elsewhere, but stage 0 calls it"),
    ],
)
@pytest.mark.parametrize("mesh", ["pipe=2", "pipe=3"])
def test_what_cannot_cross_is_refused_by_name(kind: Callable[[], nn.Module], words: str, mesh: str) -> None:
    refused(words.replace("blocks.2", "blocks." + ("2" if mesh == "pipe=2" else "1")), distinct(kind()), mesh)
