"""How inputs of other shapes are cut, by hand."""

from __future__ import annotations

import pytest

from planner.formulation.constraints.stored_layouts import PlannedInputs
from planner.ir.layout import Layout, Mesh, R, Shard, local_shape

S = Shard(0)


def planned(mesh: Mesh, *layout: object) -> PlannedInputs:
    """Ids that are cut, and positions that all rows share."""
    layouts: dict[str, Layout] = {"ids": tuple(layout), "positions": (R,) * len(mesh.axes)}  # type: ignore[dict-item]
    return PlannedInputs(mesh, layouts)


@pytest.mark.parametrize(
    "rows, layout", [(8, (S, S)), (4, (S, S)), (6, (S, R)), (2, (S, R)), (3, (R, R)), (1, (R, R)), (12, (S, S))]
)
def test_an_axis_that_does_not_divide_the_batch_has_it_whole(rows: int, layout: Layout) -> None:
    inputs = planned(Mesh.of(replicate=2, data=2), S, S)
    shapes = {"ids": (rows, 5), "mask": (rows, 1, 5), "positions": (1, 5), "bias": (7, 7), "scale": ()}
    mesh, found = inputs.cut(shapes)
    assert mesh == inputs.mesh
    assert found == {"ids": layout, "mask": layout, "positions": (R, R), "bias": (R, R), "scale": (R, R)}
    assert local_shape((rows, 5), layout, mesh.sizes) is not None


@pytest.mark.parametrize(
    "rows, micro_batches, layout", [(8, 4, Shard(0, 4)), (6, 3, Shard(0, 3)), (4, 2, Shard(0, 2)), (3, 3, R), (1, 1, R)]
)
def test_a_batch_is_cut_into_as_many_micro_batches_as_it_can_be(rows: int, micro_batches: int, layout: Layout) -> None:
    inputs = planned(Mesh.of(data=2).micro_batched(4), S, S)
    mesh, found = inputs.cut({"ids": (rows, 5), "positions": (127,)})
    assert mesh == Mesh.of(data=2).micro_batched(micro_batches)
    assert found == {"ids": (layout,), "positions": (R,)}


def test_parts_of_new_inputs_are_as_many_as_the_batchs() -> None:
    inputs = planned(Mesh.of(data=2, tensor=2), S, R)
    assert [inputs.ranks(name) for name in ("ids", "positions", "mask")] == [2, 1, 2]
