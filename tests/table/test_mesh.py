"""A mesh is a grid of ranks: every rank has one place, and the groups over any axes deal all ranks out."""

import ast
import re
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plait.table.mesh as mesh_module
from plait.table.mesh import AXES, Mesh

SIZES = st.integers(1, 3)
MESHES = st.builds(Mesh, pipe=SIZES, replica=SIZES, shard=SIZES, tensor=SIZES)
SUBSETS = st.sampled_from([axes for n in range(5) for axes in permutations(AXES, n)])


# ---- text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("replica=2 shard=3", Mesh(replica=2, shard=3)),
        ("shard=3,replica=2", Mesh(replica=2, shard=3)),
        ("  tensor=4 ,  pipe=2 ", Mesh(pipe=2, tensor=4)),
        ("shard=1", Mesh()),
        ("", Mesh()),
        ("replica=2 shard=3 hosts=2", Mesh(replica=2, shard=3, hosts=2)),
    ],
)
def test_a_mesh_is_written_as_axes_and_sizes_in_any_order(text: str, mesh: Mesh) -> None:
    assert Mesh.parse(text) == mesh


def on_hosts(mesh: Mesh) -> st.SearchStrategy[Mesh]:
    return st.sampled_from([replace(mesh, hosts=n) for n in range(1, mesh.size + 1) if mesh.size % n == 0])


@given(mesh=MESHES.flatmap(on_hosts))
def test_what_a_mesh_prints_it_reads(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4", ["'4'", "pipe, replica, shard, tensor", "write shard=4"]),
        ("shard", ["'shard'", "shard=2"]),
        ("shard=2 shard=3", ["'shard'", "twice"]),
        ("shard=0", ["'shard=0'", "from 1", "shard=2"]),
        ("replica=2 shard=-1", ["'shard=-1'", "from 1"]),
        ("shard=two", ["'shard=two'", "from 1"]),
        ("shard=²", ["'shard=²'", "from 1"]),
        ("shard = 2", ["'shard'", "from 1"]),
        ("shard=2 host=2", ["'host'", "hosts=2"]),
        ("shard=2 hosts=0", ["'hosts=0'", "from 1"]),
    ],
)
def test_a_mistake_in_the_text_is_named_with_its_fix(text: str, says: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Mesh.parse(text)
    assert all(word in str(error.value) for word in [*says, repr(text)])


@pytest.mark.parametrize("size", [0, -2, 1.5, "2"])
def test_sizes_are_whole_numbers_from_1(size: object) -> None:
    with pytest.raises(ValueError, match=f"axis 'replica' has size {re.escape(repr(size))}.*from 1"):
        Mesh(replica=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", [0, 4, 1.5])
def test_hosts_have_equally_many_ranks(hosts: Any) -> None:
    with pytest.raises(ValueError, match=f"6 ranks on hosts={hosts}: give a number of hosts that divides them"):
        Mesh(replica=2, shard=3, hosts=hosts)


@given(mesh=MESHES.flatmap(on_hosts))
def test_an_axis_crosses_hosts_where_a_group_has_ranks_of_two(mesh: Mesh) -> None:
    here = mesh.size // mesh.hosts
    crossing = [a for a in AXES if any(len({rank // here for rank in group}) > 1 for group in mesh.groups((a,)))]
    assert list(mesh.crossing) == crossing


# ---- places ----------------------------------------------------------------------------------------------


@given(mesh=MESHES)
def test_ranks_and_coordinates_are_two_names_of_one_place(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(**at) for at in places] == list(range(mesh.size))
    # outermost first, so counting ranks up is counting coordinates up
    assert [tuple(at.values()) for at in places] == list(product(*(range(mesh.axis(a)) for a in AXES)))


def test_places_outside_the_mesh_are_refused_with_the_numbers() -> None:
    mesh = Mesh(replica=2, shard=3)
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"rank {rank} .* replica=2 shard=3 of 6 ranks"):
            mesh.coordinates(rank)
    for at in (-1, 3):
        with pytest.raises(ValueError, match=f"shard={at} is outside the mesh replica=2 shard=3"):
            mesh.rank(shard=at)


def test_an_unknown_axis_is_refused_wherever_it_is_named() -> None:
    mesh = Mesh(replica=2, shard=3)
    for use in (
        lambda: mesh.axis("data"),
        lambda: mesh.rank(data=1),
        lambda: mesh.count(("shard", "data")),
        lambda: mesh.group(0, ("data",)),
        lambda: mesh.groups(("data",)),
        lambda: mesh.index(0, ("data",)),
    ):
        with pytest.raises(ValueError, match=r"unknown mesh axis 'data'.*pipe, replica, shard, tensor"):
            use()


# ---- groups ----------------------------------------------------------------------------------------------


def test_the_examples_of_the_docstring() -> None:
    mesh = Mesh.parse("replica=2 shard=3")
    examples = re.findall(r"group\((\d+), (\(.*?\))\) +-> (\(.*?\))", mesh_module.__doc__ or "")
    assert len(examples) == 3
    for rank, axes, ranks in examples:
        assert mesh.group(int(rank), ast.literal_eval(axes)) == ast.literal_eval(ranks)
    borrowed = Mesh.parse("shard=4 tensor=2 expert=2")
    assert (borrowed.group(1, ("expert",)), borrowed.group(1, ("expert_shard",))) == ((1, 3), (1, 5))


@settings(deadline=None)
@given(mesh=MESHES, axes=SUBSETS)
def test_groups_deal_out_all_ranks(mesh: Mesh, axes: tuple[str, ...]) -> None:
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.count(axes)
        elsewhere = [{a: mesh.coordinates(r)[a] for a in AXES if a not in axes} for r in group]
        assert all(at == elsewhere[0] for at in elsewhere)
        for k, rank in enumerate(group):
            assert mesh.group(rank, axes) == group
            assert mesh.index(rank, axes) == k


@given(mesh=MESHES)
def test_data_ranks_count_shards_inside_replicas(mesh: Mesh) -> None:
    assert mesh.data_size == mesh.replica * mesh.shard
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        assert mesh.data_rank(rank) == at["replica"] * mesh.shard + at["shard"]
