"""Tests whose body is run by every rank of a mesh: the test fails if it does on one of them.

@each_rank("shard=2")                          comm is the rank's
def test_...(comm: Comm) -> None:

@each_rank("shard=2", refused="the words")     a rank raises a ValueError of these words
@each_rank()                                   the mesh is the test's parameter ``mesh``
@each_world("zero3")                           the rank's ``World`` of this layout, or of the parameter ``where``
@same_as_plain("zero3")                        each rank returns the result of plain PyTorch
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import Parameter, signature
from typing import Any

import pytest
from programs import check, on_ranks

from plait import run_threads

Test = Callable[..., Any]


def each_rank(mesh: str = "", refused: str = "", deadline: float = 20, **settings: Any) -> Callable[[Test], Test]:
    return spread("mesh", mesh, refused, lambda where, body: run_threads(where, body, deadline=deadline, **settings))


def each_world(where: str = "", refused: str = "", **settings: Any) -> Callable[[Test], Test]:
    return spread("where", where, refused, lambda where, program: on_ranks(program, where, **settings))


def same_as_plain(where: str = "", tolerance: float = 1e-11, **settings: Any) -> Callable[[Test], Test]:
    return spread("where", where, "", lambda where, program: check(program, where, tolerance, **settings))


def spread(name: str, place: str, refused: str, run: Callable[[str, Any], object]) -> Callable[[Test], Test]:
    """The test without its first parameter, which each rank gets; with one for the place, if none is given."""

    def decorate(body: Test) -> Test:
        @wraps(body)
        def test(**given: Any) -> None:
            where = place or given.pop(name)
            with pytest.raises(ValueError, match=refused) if refused else nullcontext():
                run(where, lambda rank: body(rank, **given))

        _, *others = signature(body).parameters.values()
        places = [] if place else [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD)]
        test.__signature__ = signature(body).replace(parameters=[*others, *places])  # type: ignore[attr-defined]
        return test

    return decorate
