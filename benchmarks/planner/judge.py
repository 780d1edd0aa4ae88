"""Judges plans against measurements: errors of seconds and bytes, by file and by the kind of a row."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cases import Case, Constants
from fit import times

from plait.predict.footprint import footprints, fullest
from plait.predict.search import RESERVE

CARD = 80e9 * (1 - RESERVE) / 1e9
"""GB of an 80 GB card that a plan may use."""


@dataclass(frozen=True)
class Errors:
    """Relative errors, predicted over measured less one."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(map(abs, self.values))

    @property
    def median(self) -> float:
        return statistics.median(map(abs, self.values))

    @property
    def bias(self) -> float:
        """The median error with its sign."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} | {100 * self.median:.1f} | {100 * self.bias:+.1f}"


def time_errors(cases: Sequence[Case], constants: Constants) -> Errors:
    """Errors of the seconds of a step."""
    measured = np.array([case.seconds for case in cases])
    return Errors(tuple((times(cases, constants) / measured - 1).tolist()))


def predicted_bytes(case: Case) -> float:
    """The bytes that a case is predicted to hold where they were measured."""
    where = footprints(case.plan)[0] if case.first_rank else fullest(case.plan)
    return where.total + case.more_bytes


def memory_errors(cases: Sequence[Case]) -> Errors:
    """Errors of the bytes."""
    return Errors(tuple(predicted_bytes(case) / case.bytes - 1 for case in cases if case.bytes))


def by_kind(cases: Sequence[Case], errors: Errors) -> dict[str, dict[str, Errors]]:
    """The errors of each group of rows, by the kind of group."""
    groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case, error in zip(cases, errors.values, strict=True):
        for kind, name in case.kinds.items():
            groups[kind][name].append(error)
    return {kind: {name: Errors(tuple(of)) for name, of in sorted(names.items())} for kind, names in groups.items()}


def one_efficiency(cases: Sequence[Case]) -> Errors:
    """Errors of a planner that knows one number, the median share of the peak in these very rows."""
    ideal = [case.plan.model.flops(case.plan.length) * case.plan.batch * case.plan.length for case in cases]
    ideal = [f / (c.plan.cluster.size * c.plan.cluster.peak(c.plan.dtype)) for f, c in zip(ideal, cases, strict=True)]
    share = statistics.median(one / (case.seconds or 1) for one, case in zip(ideal, cases, strict=True))
    return Errors(tuple(one / share / (case.seconds or 1) - 1 for one, case in zip(ideal, cases, strict=True)))


def unseen(cases: Sequence[Case], kind: str, one_fit: Callable[[Sequence[Case]], Constants]) -> Errors:
    """Errors on each value of a kind with constants that were fitted without it, on a tenth of the others."""
    found: list[float] = []
    for value in sorted({case.kinds[kind] for case in cases}):
        others = [case for case in cases if case.kinds[kind] != value]
        held = [case for case in cases if case.kinds[kind] == value]
        found += time_errors(held, one_fit(others[::10])).values
    return Errors(tuple(found))


def with_layer_times(cases: Sequence[Case]) -> tuple[int, Errors]:
    """The number of rows that were fitted, and the errors on the others, where the time of a layer is given for each
    of 32 shapes, with that of the rest of a microbatch.

    Both are fitted to a tenth of each shape's rows, two at least, with the first microbatch's way through unequal
    stages, and the gradients' message and the update by their parameters."""
    fitted: list[Case] = []
    for shape in sorted(set(map(shape_of, cases))):
        of_shape = [case for case in cases if shape_of(case) == shape]
        chosen = np.random.default_rng(0).permutation(len(of_shape))[: max(2, len(of_shape) // 10)]
        fitted += [of_shape[k] for k in chosen]
    known = set(map(id, fitted))
    others = [case for case in cases if id(case) not in known]
    shapes = sorted({shape_of(case) for case in cases})
    number = {shape: k for k, shape in enumerate(shapes)}

    def features(case: Case) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        plan, k = case.plan, number[shape_of(case)]
        pipe, m, layers = plan.mesh.pipe, plan.microbatches, plan.model.layers
        x = np.zeros(2 * len(shapes) + 3)
        x[k] = layers + (m - 1) * layers / pipe
        x[len(shapes) + k] = m
        hidden = plan.model.hidden
        elements = layers / pipe * 12 * hidden**2 / plan.mesh.tensor + 51200 * hidden / plan.mesh.tensor
        x[-3] = elements / 1e9 * (plan.mesh.data_size > 1)
        x[-2] = elements / 1e9
        x[-1] = (pipe - 1) * plan.samples * plan.length * hidden / 1e9
        return x / (case.seconds or 1)

    left = np.stack([features(case) for case in fitted])
    weights = np.linalg.lstsq(
        np.vstack([left, 1e-4 * np.eye(left.shape[1])]), np.r_[np.ones(len(left)), np.zeros(left.shape[1])], rcond=None
    )[0]
    return len(fitted), Errors(tuple(float(features(case) @ weights) - 1 for case in others))


def shape_of(case: Case) -> tuple[int, int, int]:
    """Width, tensor ranks and samples of a microbatch: what decides a layer's time in this file."""
    return case.plan.model.hidden, case.plan.mesh.tensor, case.plan.samples


@dataclass(frozen=True)
class Picked:
    """The layout predicted to be fastest, among those measured for one question."""

    runs: int
    first: float
    """Speed of the predicted best, over that of the measured best."""
    of_three: float
    """Speed of the fastest of the three that are predicted to be best."""
    middle: float
    """Speed of the median run."""


def picks(cases: Sequence[Case], constants: Constants, question: Callable[[Case], str]) -> dict[str, Picked]:
    """The picks for each question: a model, a cluster and a batch."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, predicted in zip(cases, times(cases, constants), strict=True):
        groups[question(case)].append((float(predicted), case.seconds or 1.0))
    found = {}
    for name, group in groups.items():
        best = min(seconds for _, seconds in group)
        in_order = [best / seconds for _, seconds in sorted(group)]
        found[name] = Picked(len(group), in_order[0], max(in_order[:3]), statistics.median(in_order))
    return found


@dataclass(frozen=True)
class Fits:
    """Numbers of rows whose memory fits the card, predicted and measured."""

    measured: int
    said_yes: int
    failed: int
    said_no: int


def said_to_fit(case: Case) -> bool:
    """True if a run is predicted to fit an 80 GB card."""
    return fullest(case.plan).total + case.more_bytes <= CARD * 1e9


def does_it_fit(cases: Sequence[Case]) -> Fits:
    """Runs that were measured ran, so they fit; runs that failed may have failed for another reason."""
    ran = [said_to_fit(case) for case in cases if case.fitted]
    failed = [said_to_fit(case) for case in cases if not case.fitted]
    return Fits(len(ran), sum(ran), len(failed), len(failed) - sum(failed))
