"""Pins of dtypes, and what the dtypes of a model leave of them."""

from __future__ import annotations

from planner.base.errors import ClusterError, PinError
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import FLOAT8
from planner.formulation.block_facts import BlockFacts
from planner.formulation.constraints.pins import Pins
from planner.formulation.float8 import DTYPE, MULTIPLE, is_scalable, may_scale
from planner.formulation.training import Training
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


def check_float8(pins: Pins, graph: Graph, blocks: BlockFacts, cluster: ClusterSpec) -> None:
    """Refuse products in float8 where they have no price, or where there are none.

    Raises:
        ClusterError: the device states no peak of it, or its products were measured, and none in float8.
        PinError: no linear layer can.
    """
    if pins.float8 is None:
        return
    if getattr(cluster.device.peak_flops_per_s, FLOAT8) is None:
        raise ClusterError(
            f"pin 'float8' is {pins.float8!r}, but {cluster.device.kind!r} states no peak for it: add "
            f"device.peak_flops_per_s.{FLOAT8}, such as 1979 TFLOP/s, or leave the pin out"
        )
    if cluster.calibration is not None and cluster.calibration.products:
        raise ClusterError(
            f"pin 'float8' is {pins.float8!r}, but the calibration has products as they were measured, none of them in "
            "float8: leave one of the two out"
        )
    training = Training(float8=pins.float8)
    linear = [node for node in graph.operators if may_scale(training, blocks, node)]
    if not any(is_scalable(node, [tensor.shape for tensor in graph.input_types(node)]) for node in linear):
        raise PinError(
            f"pin 'float8' is {pins.float8!r}, and the model has no product for it: there are {len(linear)} linear "
            f"layers in {DTYPE} in blocks that repeat, and none whose numbers of tokens and features are "
            f"multiples of {MULTIPLE}. Convert the model (model.bfloat16()), or leave the pin out"
        )
