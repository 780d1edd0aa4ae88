"""On a GPU: as on the CPU, and no layer makes the host wait."""

import warnings

import pytest
import torch
from rows import CASES, Decoder, plain, train

import plait

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_the_cpu_does(case: str) -> None:
    mesh, settings = CASES[case]
    torch.manual_seed(1)
    template = Decoder(4).double()
    ours, right = (
        plait.run_threads(mesh, lambda comm: train(comm, template, lambda: 0, {**settings}), device=device)[0]
        for device in ("cuda", "cpu")
    )
    assert ours["losses"] == pytest.approx(right["losses"], rel=1e-9)
    assert all(torch.allclose(ours["state"][name], value, atol=1e-6) for name, value in right["state"].items())


def test_no_layer_makes_the_host_wait() -> None:
    def waits(layers: int) -> int:
        comm = plait.join(device="cuda")
        model = Decoder(layers).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine = plait.Engine(model, comm, optimizer=optimizer, loss_fn=plain, count_fn=lambda b: b[1].numel())
        batch = torch.randint(31, (2, 3, 7), device="cuda").unbind()
        engine.step([batch])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            engine.step([batch])
            torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(one.message) for one in told)

    assert waits(2) == waits(5)
