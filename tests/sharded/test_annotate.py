"""Modules whose code stays as it is."""

import pytest
import torch
import torch.nn.functional as F
from each_rank import each_rank
from tensor_cases import numbers, values
from torch import Tensor, nn
from trace_world import TraceComm

from plait.comm import Comm
from plait.sharded import ShardedTensor, annotate, auto_redistribute
from plait.table.mesh import Mesh


def filled(module: nn.Module) -> nn.Module:
    """Distinct weights in fp64, equal on all ranks."""
    module = module.double()
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_(values(tuple(p.shape), k))
    return module


@each_rank("tensor=4")
def test_the_classic_case_one_linear_chunked_over_four_ranks(comm: Comm) -> None:
    """The weight is cut by rows; every rank computes its columns; one all_gather puts the output together.

    Its backward: one reduce_scatter brings each rank the gradient of its columns; the weight's gradient is cut like
    the weight, and only the input's gradient is left as a sum over the ranks.
    """
    x_BI = values((4, 6), 9)
    stock = filled(nn.Linear(6, 10))
    y_BO = stock(x_BI)
    y_BO.square().sum().backward()

    fc = annotate(filled(nn.Linear(6, 10)), {"weight": "out/tensor in", "bias": "out/tensor"}, comm)
    assert type(fc) is nn.Linear
    x = ShardedTensor.from_full(x_BI, "batch in", comm)
    columns = fc(x)
    assert str(columns.sharding) == "d0 d1/tensor" and not comm.ledger.entries
    y = columns.redistribute("batch out")
    torch.testing.assert_close(y.local, y_BO.detach())
    y.square().sum().backward()
    padded = 4 * 4 * 3 * 8  # ranks x batch x columns of the largest piece x fp64
    assert [(e.kind, e.axes, e.bytes) for e in comm.ledger.entries] == [
        ("all_gather", ("tensor",), padded),
        ("reduce_scatter", ("tensor",), padded),
    ]
    assert str(fc.weight.grad.sharding) == "d0/tensor d1" and str(x.grad.sharding) == "d0 d1, pending(tensor)"
    torch.testing.assert_close(fc.weight.grad.full(), stock.weight.grad)
    torch.testing.assert_close(fc.bias.grad.full(), stock.bias.grad)
    torch.testing.assert_close(x.grad.full(), x_BI.grad)


class Transformer(nn.Module):
    """Stock code: embedding, norms, attention, residuals, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.RMSNorm(8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT) * self.scale
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (4, 2)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        x = x + self.down(F.silu(self.up(self.norm2(x))))
        return self.head(x)


PLANS = {
    "tensor": {
        **{f"{n}.weight": "out/tensor in" for n in ("query", "key", "value", "up")},
        **{f"{n}.bias": "out/tensor" for n in ("query", "key", "value", "up")},
        **{f"{n}.weight": "out in/tensor" for n in ("out", "down")},
        "embedding.weight": "vocabulary/tensor width",
    },
    "storage only": {
        "up.weight": "out/replica/tensor in",
        "norm1.weight": "width/tensor",
        "embedding.weight": "v w/tensor",
    },
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch", ["batch time", "batch/replica time"])
@pytest.mark.parametrize("mesh", ["tensor=4", "replica=2 tensor=2"])
@each_rank()
def test_a_transformer_in_stock_code(comm: Comm, batch: str, plan: str) -> None:
    tokens, targets = numbers((4, 5), 11), numbers((4, 5), 11, 1)
    stock, model = filled(Transformer()), annotate(filled(Transformer()), PLANS[plan], comm)
    want = F.cross_entropy(stock(tokens).flatten(0, 1), targets.flatten())
    want.backward()
    assert model.head.weight is model.embedding.weight
    with auto_redistribute():
        logits = model(ShardedTensor.from_full(tokens, batch, comm))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    torch.testing.assert_close(loss.full(), want.detach())
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert p.grad is not None and p.grad.sharding == p.sharding.dual(comm.mesh), name
        torch.testing.assert_close(p.grad.full(), q.grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


COMM = TraceComm(Mesh(tensor=2))


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ({"fc1.wieght": "out/tensor in"}, "no parameter is called 'fc1.wieght': did you mean fc1.weight"),
        ({"zzz": "out"}, "there are fc1.weight, fc1.bias"),
        ({"fc1.weight": "out/tensor"}, r"fc1.weight has 2 dims, \[5, 6\], but the layout 'out/tensor' has 1"),
        ({"fc1.weight": "out/tnsr in"}, "'tnsr'"),
        ({"fc1.weight": "out in, pending(tensor)"}, "cannot be pending"),
    ],
)
def test_what_does_not_fit_is_refused(layouts: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        annotate(nn.ModuleDict({"fc1": nn.Linear(6, 5)}), layouts, COMM)


def test_tied_parameters_have_one_layout_and_nothing_is_annotated_twice() -> None:
    with pytest.raises(ValueError, match="are one parameter"):
        annotate(Transformer(), {"embedding.weight": "v/tensor w", "head.weight": "v w/tensor"}, COMM)
    module = annotate(nn.Linear(6, 5), {}, COMM)
    assert str(module.weight.sharding) == "d0 d1"
    with pytest.raises(ValueError, match="already"):
        annotate(module, {}, COMM)


def test_frozen_parameters_stay_frozen_and_modules_can_be_cast() -> None:
    module = nn.Linear(6, 5)
    module.weight.requires_grad_(False)
    annotate(module, {"weight": "out/tensor in"}, COMM)
    assert not module.weight.requires_grad and module.bias.requires_grad
    module.double()
    assert module.weight.dtype == torch.float64 and isinstance(module.weight, nn.Parameter)
    assert list(module.state_dict()) == ["weight", "bias"]
