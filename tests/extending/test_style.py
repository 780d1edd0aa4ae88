"""A style of tensor parallelism from outside: the numbers of one process, and the messages that its rows predict."""

import pytest
import torch
from guide import run_section
from torch import Tensor, nn

import plait
from plait.comm import Comm
from plait.predict.tensor import predict_tensor

PLAN = {"up": "column", "mid": "mixed", "down": "row"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.up, self.mid, self.down = nn.Linear(6, 8), nn.Linear(8, 12, bias=False), nn.Linear(12, 6)

    def forward(self, x_BC: Tensor) -> Tensor:
        hidden = torch.tanh(self.mid(torch.tanh(self.up(self.first(x_BC)))))
        out: Tensor = self.down(hidden)
        return out


def train(comm: Comm, row: str, plan: dict[str, str] | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of three steps in fp64; the messages of the first are those that are predicted."""
    with plait.empty_parameters():
        model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = plait.Engine(model, comm, strategy=row, optimizer=optimizer, tensor_plan=plan)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    losses, mark = [], len(comm.ledger)
    for step in range(3):
        engine.backward((model(x) - x).square().sum(), count=4)
        optimizer.step()
        losses.append(engine.last.loss)
        if not step and comm.mesh.tensor > 1:
            sent = [e for e in comm.ledger.since(mark) if e.note.unit == "mid" and e.axes == ("tensor",)]
            sites = [site for site in next(iter(engine.placed.stages.values())).parallel.sites if site.name == "mid"]
            predicted = predict_tensor(sites, [(4,)], comm.mesh, 8, sequence=False)
            shown = [sorted((e.kind, e.bytes, e.note.phase) for e in entries) for entries in (sent, predicted)]
            assert shown[0] == shown[1] and len(sent) == 2
    return losses, engine.full_state_dict()


@pytest.mark.parametrize(("mesh", "row"), [("tensor=2", "ddp"), ("shard=2 tensor=2", "zero3"), ("tensor=4", "ddp")])
def test_training_is_that_of_one_process(mesh: str, row: str) -> None:
    run_section("A style of tensor parallelism")
    truth, whole = plait.run_threads("shard=1", lambda comm: train(comm, "ddp", None))[0]
    for losses, state in plait.run_threads(mesh, lambda comm: train(comm, row, PLAN)):
        assert losses == pytest.approx(truth, rel=1e-12) and truth[2] < truth[0]
        for name, tensor in whole.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-14)


def test_before_it_is_added_it_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown style 'mixed'"):
        plait.run_threads("tensor=2", lambda comm: train(comm, "ddp", PLAN))
