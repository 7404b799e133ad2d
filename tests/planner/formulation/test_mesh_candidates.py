"""Meshes respect the levels of the cluster, and each essentially different one is proposed once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec, Level
from planner.formulation.constraints.mesh_candidates import candidate_meshes, pinned_mesh
from planner.ir.layout import Axis, Mesh


def cluster(*sizes: int) -> ClusterSpec:
    """A cluster with these level sizes, innermost first."""
    levels = tuple(
        Level(name=f"l{i}", size=size, latency_s=1e-6, bandwidth_bytes_per_s=1e9) for i, size in enumerate(sizes)
    )
    return ClusterSpec.local(1, memory_bytes=1).model_copy(update={"levels": levels})


@pytest.mark.parametrize(
    "levels, meshes",
    [
        ((1,), [(1,)]),
        ((1, 1), [(1,)]),
        ((2,), [(2,)]),
        ((4,), [(4,), (2, 2)]),
        ((8,), [(8,), (2, 4)]),
        ((12,), [(12,), (2, 6), (3, 4)]),
        ((1, 8), [(8,), (2, 4)]),
        ((8, 1), [(8,), (2, 4)]),
        ((2, 2), [(4,), (2, 2)]),
        ((8, 2), [(16,), (2, 8), (4, 4), (8, 2)]),
        ((8, 4), [(32,), (2, 16), (4, 8), (8, 4), (16, 2)]),
        ((8, 3), [(24,), (3, 8), (6, 4), (12, 2)]),
        ((6, 2), [(12,), (2, 6), (4, 3), (6, 2)]),
        ((2, 2, 2), [(8,), (2, 4), (4, 2)]),
    ],
)
def test_candidates(levels: tuple[int, ...], meshes: list[tuple[int, ...]]) -> None:
    assert [mesh.sizes for mesh in candidate_meshes(cluster(*levels))] == meshes


def test_three_axes() -> None:
    found = [mesh.sizes for mesh in candidate_meshes(cluster(8, 4), max_axes=3) if len(mesh.axes) == 3]
    # In (2, 2, 8) two axes lie between nodes, in (4, 2, 4) two within one: those stand in ascending order.
    assert found == [(2, 2, 8), (2, 4, 4), (2, 8, 2), (4, 2, 4), (8, 2, 2)]


def test_names_and_strides() -> None:
    assert candidate_meshes(cluster(4), max_axes=1) == (Mesh((Axis("all", 4, 1),)),)
    assert candidate_meshes(cluster(4, 2))[1] == Mesh((Axis("outer", 2, 4), Axis("inner", 4, 1)))


def test_meshes_of_one_stage() -> None:
    assert [mesh.sizes for mesh in candidate_meshes(cluster(8, 4), devices=16)] == [(16,), (2, 8), (4, 4), (8, 2)]
    assert candidate_meshes(cluster(8, 3), devices=12) == ()
    crossing = candidate_meshes(cluster(8, 3), devices=12, crossing=True)
    assert [mesh.sizes for mesh in crossing] == [(12,), (2, 6), (3, 4), (4, 3), (6, 2)]
    within = candidate_meshes(cluster(8, 4), devices=16)
    assert candidate_meshes(cluster(8, 4), devices=16, crossing=True) == within


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 3))
def test_every_candidate_fills_the_cluster_along_its_boundaries(sizes: list[int], max_axes: int) -> None:
    spec = cluster(*sizes)
    meshes = candidate_meshes(spec, max_axes)
    assert len(set(meshes)) == len(meshes)
    assert len(meshes[0].axes) == 1
    for mesh in meshes:
        assert mesh.size == spec.world_size
        assert mesh == Mesh.of(**dict(zip(mesh.names, mesh.sizes, strict=True)))
        for axis in mesh.axes:
            assert all(span % axis.stride == 0 or axis.stride % span == 0 for span in spec.spans)


@pytest.mark.parametrize(
    "pins, stages, axes",
    [
        ({"tensor": 8, "data": 2}, 2, {"data": 2, "tensor": 8}),
        ({"tensor": 8}, 1, {"data": 4, "tensor": 8}),
        ({"context": 2, "tensor": 2}, 1, {"data": 8, "context": 2, "tensor": 2}),
        ({"tensor": 8}, 4, {"tensor": 8}),
        ({"data": 32, "tensor": 1}, 1, {"data": 32}),
        ({}, 1, {"data": 32}),
    ],
)
def test_pins(pins: dict[str, int], stages: int, axes: dict[str, int]) -> None:
    mesh = pinned_mesh(cluster(8, 4), pins, stages)
    assert mesh == Mesh.of(**axes)
    assert mesh.axes[-1].stride == 1


def test_a_single_device_is_one_axis_of_size_one() -> None:
    assert pinned_mesh(cluster(1), {"tensor": 1}) == candidate_meshes(cluster(1))[0] == Mesh.of(all=1)


@pytest.mark.parametrize(
    "pins, stages, parts",
    [
        ({"tensor": 5}, 1, ["tensor 5 does not divide the 32 devices", "'local'", "a size that divides 32"]),
        ({"data": 3}, 1, ["pinned data 3, but", "32 devices", "pin what data leaves, too"]),
        ({"tensor": 8}, 3, ["pipeline 3 x tensor 8 = 24", "32 devices"]),
        ({"data": 2, "tensor": 8}, 1, ["data 2 x tensor 8 = 16", "32 devices", "leave out data"]),
        (
            {"tensr": 2},
            1,
            ["'tensr'", "did you mean 'tensor'?", "data, depth, expert, expert_tensor, context, ulysses, table"],
        ),
        ({"tensor": 0}, 1, ["tensor=0", "at least 1"]),
        ({"tensor": True}, 1, ["tensor=True", "at least 1"]),
        ({"tensor": "8"}, 1, ["tensor='8'", "whole number"]),
    ],
)
def test_wrong_pins(pins: dict[str, int], stages: int, parts: list[str]) -> None:
    with pytest.raises(PinError) as caught:
        pinned_mesh(cluster(8, 4), pins, stages)
    for part in parts:
        assert part in str(caught.value)
