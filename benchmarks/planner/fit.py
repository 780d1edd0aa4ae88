"""Fits the constants of ``Reached`` to some cases: least absolute logarithms of predicted over measured times.

Each constant stays between its bounds and near its start, as strongly as ``PULL`` says: constants known from a data
sheet or a kernel's own benchmark are held, those that only runs show are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from cases import Case, Constants, with_constants
from numpy.typing import NDArray

from plait.predict.cluster import Reached
from plait.predict.duration import duration

BOUNDS = {
    # least, most, pull to the start
    "product": (0.4, 0.95, 1.0),
    "depth": (5.0, 1500.0, 1.0),
    "wave": (0.05, 1.0, 1.0),
    "attention": (0.1, 0.9, 1.0),
    "passes": (0.4, 4.0, 0.01),
    "kernels": (10.0, 400.0, 0.01),
    "starts": (0.02, 0.95, 0.01),
    "network": (0.3, 1.0, 1.0),
    "fixed": (1e-4, 0.02, 0.01),
}
START = Reached(
    product=0.8, depth=100, wave=0.7, attention=0.35, memory=0.8, passes=1.0, kernels=130, calls=6, starts=0.4,
    network=0.8, fixed=1e-3,
)  # fmt: skip
ROUNDS, STEP, NEAR = 40, 1e-3, 0.02

Vector = NDArray[np.float64]


def times(cases: Sequence[Case], constants: Constants) -> Vector:
    """The predicted seconds."""
    return np.array([duration(with_constants(case.plan, constants)).total for case in cases])


def fit(cases: Sequence[Case], start: Reached = START, names: Sequence[str] = tuple(BOUNDS)) -> Reached:
    """The constants with which these cases are predicted best.

    Levenberg and Marquardt's steps on weights that turn squares into absolute values, in logits between the bounds.
    """
    measured = np.array([case.seconds for case in cases])
    low, high, pull = (np.array([BOUNDS[name][k] for name in names]) for k in range(3))
    share = np.log(np.array([getattr(start, name) for name in names]) / low) / np.log(high / low)
    at = origin = np.log(share / (1 - share))

    def constants(x: Vector) -> Reached:
        values = low * (high / low) ** (1 / (1 + np.exp(-x)))
        return replace(start, **{name: float(value) for name, value in zip(names, values, strict=True)})

    def errors(x: Vector) -> Vector:
        return np.log(times(cases, {"": constants(x)}) / measured)

    def cost(r: Vector, x: Vector) -> float:
        return float(np.abs(r).sum() + (pull * (x - origin) ** 2).sum())

    r, damping = errors(at), 1e-2
    for _ in range(ROUNDS):
        weights = 1 / np.maximum(np.abs(r), NEAR)
        slopes = np.stack([(errors(at + STEP * one) - r) / STEP for one in np.eye(len(at))], 1)
        curve = (slopes * weights[:, None]).T @ slopes + np.diag(pull)
        down = (slopes * weights[:, None]).T @ r + pull * (at - origin)
        before = cost(r, at)
        for _ in range(8):
            step = -np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down)
            trial = at + np.clip(step, -1.5, 1.5)
            found = errors(trial)
            if cost(found, trial) < before:
                at, r, damping = trial, found, max(damping / 3, 1e-7)
                break
            damping *= 4
        if before - cost(r, at) < 1e-3 * before:
            break
    return constants(at)


def tenth(cases: Sequence[Case], seed: int = 0) -> tuple[list[Case], list[Case]]:
    """A tenth of the cases, drawn with a seed, and the others."""
    order = np.random.default_rng(seed).permutation(len(cases))
    count = len(cases) // 10
    return [cases[i] for i in order[:count]], [cases[i] for i in order[count:]]
