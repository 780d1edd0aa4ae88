"""What shows that an optimizer is not element-wise only in some steps, or for some gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.engine.data_parallel.probe import probe_apart, probe_elementwise


class Projects(torch.optim.SGD):
    """As AdamP and SGDP do: of a gradient orthogonal to the weights, what the buffer has along them is left out."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                rows = p.view(p.shape[0], -1)
                along = F.cosine_similarity(rows, p.grad.view_as(rows), dim=1).abs().max()
                if p.dim() > 1 and along < 0.1 / rows.shape[1] ** 0.5:
                    unit = rows / rows.norm(dim=1, keepdim=True)
                    buffer = buffer - (unit * (unit * buffer.view_as(rows)).sum(1, keepdim=True)).view_as(p)
                p.add_(buffer, alpha=-group["lr"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_looks_at_rows_for_some_gradients_only_is_refused(dtype: torch.dtype) -> None:
    optimizer = Projects(nn.Linear(4, 4, dtype=dtype).parameters(), lr=0.01)
    assert "differ" in (probe_elementwise(optimizer, None) or "") and probe_apart(optimizer, None) is None
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam, torch.optim.Rprop):
        assert probe_elementwise(kind(nn.Linear(4, 4, dtype=dtype).parameters(), lr=0.01), None) is None


class Late(torch.optim.SGD):
    """As AdaShift and AdaNorm do: gradients are given out ten steps later, or larger where their norm falls."""

    delay = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                gradients, norm = self.state[p].setdefault("seen", []), p.grad.norm()
                mean = torch.stack([gradient.norm() for gradient in gradients[-3:]] or [norm]).mean()
                gradients.append(p.grad.clone())
                if self.delay and len(gradients) > 10:
                    p.add_(gradients[-11] / gradients[-1].abs().max(), alpha=-group["lr"])
                if not self.delay:
                    p.add_(p.grad * (mean / norm if mean > 1.3 * norm else 1), alpha=-group["lr"])


@pytest.mark.parametrize("delay", [True, False])
def test_what_acts_in_late_or_in_some_steps_only_is_refused(monkeypatch: pytest.MonkeyPatch, delay: bool) -> None:
    monkeypatch.setattr(Late, "delay", delay)
    optimizer = Late(nn.Linear(4, 4).parameters(), lr=0.01)
    assert "differ" in (probe_elementwise(optimizer, None) or "") and probe_apart(optimizer, None) is None


class Nearly(Projects):
    """As SGDP without a momentum: what the gradient itself has along the weights is left out, where it is little."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["buffer"] = torch.zeros_like(p)
        super().step()


def test_what_projects_a_small_part_of_the_gradient_is_refused() -> None:
    assert "differ" in (probe_elementwise(Nearly(nn.Linear(4, 4).parameters(), lr=0.01), None) or "")
