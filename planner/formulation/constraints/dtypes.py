"""Pins of dtypes, and what the dtypes of a model leave of them."""

from __future__ import annotations

from planner.base.errors import PinError
from planner.formulation.constraints.pins import Pins
from planner.ir.graph import Graph
from planner.ir.node import ITEM_BYTES


def check_reduce_dtype(pins: Pins, graph: Graph) -> None:
    """Refuse to reduce gradients in a dtype that does not hold them, or in which all are already.

    Raises:
        PinError: names the parameter.
    """
    if pins.reduce_dtype is None:
        return
    trained = [node for node in graph.leaves if node.op == "param" and node.results[0].grad]
    size = ITEM_BYTES[pins.reduce_dtype]
    for node in trained:
        if node.results[0].item_bytes > size:
            raise PinError(
                f"pin 'reduce_dtype' is {pins.reduce_dtype!r}, which does not hold the gradient of {node.target} in "
                f"{node.results[0].dtype}: leave it out, or convert the model to a narrower dtype (model.bfloat16())"
            )
    if all(node.results[0].item_bytes == size for node in trained):
        raise PinError(
            f"pin 'reduce_dtype' is {pins.reduce_dtype!r}, in which the gradients of all parameters are, so that they "
            "are reduced in it without: leave it out, or convert the model to a narrower dtype (model.bfloat16())"
        )
