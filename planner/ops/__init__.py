"""The op table: what the planner knows of each ATen operator.

A graph's node becomes a row: which factors may be sharded (``sharding_rule``, ``signature``), how many flops it takes,
and what its backward needs. One module per family holds the rows, ``registry`` finds them; ``memory_traffic``,
``saved_tensors`` and ``workspace`` say what follows in bytes. All facts of an operator stand in its row, so that a new
operator is a row and nothing else.
"""

from planner.ops.registry import FAMILIES, OPS, attends, drops, passed_places, saved_places
from planner.ops.table import Row

__all__ = ["FAMILIES", "OPS", "Row", "attends", "drops", "passed_places", "saved_places"]
