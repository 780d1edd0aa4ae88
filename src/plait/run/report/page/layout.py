"""The ranks of a mesh, and the part of each kind of state that each of them holds, from the row's cells."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from plait.table.cells import Strategy
from plait.table.mesh import AXES, Mesh

MOST_SHOWN = 64
"""The largest number of ranks on the page.  For a larger mesh, they are the first along each axis."""


def layout_facts(mesh: Mesh, row: Strategy) -> dict[str, Any]:
    """Describes the mesh, the row's cells, and the parts that each shown rank holds as (index, number of parts)."""
    axes = [axis for axis in AXES if mesh.axis(axis) > 1]
    cells = {"parameters": row.params, "kept": row.kept, "gradients": row.grads, "optimizer": row.optim}
    ranks = []
    for rank in shown_ranks(mesh):
        at = mesh.coordinates(rank)
        parts = {name: (mesh.index(rank, cell.split), mesh.count(cell.split)) for name, cell in cells.items()}
        ranks.append({"rank": rank, "at": {axis: at[axis] for axis in axes}, "parts": parts})
    return {
        "mesh": str(mesh),
        "size": mesh.size,
        "axes": {axis: mesh.axis(axis) for axis in axes},
        "crossing": list(mesh.crossing),
        "row": row.name,
        "cells": {name: str(cell) for name, cell in cells.items()},
        "ranks": ranks,
    }


def shown_ranks(mesh: Mesh) -> list[int]:
    """The first ranks along each axis, at most ``MOST_SHOWN`` together: the longest axis is halved until they are."""
    sizes = {axis: mesh.axis(axis) for axis in AXES}
    while (longest := max(sizes, key=lambda axis: sizes[axis])) and math.prod(sizes.values()) > MOST_SHOWN:
        sizes[longest] = -(-sizes[longest] // 2)
    places = product(*(range(sizes[axis]) for axis in AXES))
    return [mesh.rank(**dict(zip(AXES, place, strict=True))) for place in places]
