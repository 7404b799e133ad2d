"""What an optimizer that goes by whole parameters takes under a plan."""

from __future__ import annotations

from planner.analysis.whole_parameters import StoredParameter, WholeParameterBill, bill
from planner.base.errors import PlanError
from planner.cost.model import CostModel
from planner.ir.layout import over_micro_batches, parse_layout
from planner.ir.node import ITEM_BYTES
from planner.plan.document.document import EVALUATE, Document


def bill_of(document: Document) -> WholeParameterBill:
    """The bill of a document's trained parameters; raises as :meth:`planner.plan.plan.Plan.whole_parameters` does."""
    if document.offload != "none":
        raise PlanError(
            f"the plan keeps parameters beside the device ('offload': {document.offload!r}), where none are "
            "stepped whole: plan with pin={'offload': 'none'}"
        )
    leaves = document.account.leaves
    if not leaves:
        raise PlanError(
            f"this plan was read from a file that does not say what its parameters take: price it with {EVALUATE}, and "
            "ask the plan that returns"
        )
    trained = {name: leaves[name] for name in document.parameters if leaves[name].state_bytes}
    parameters = []
    for name, leaf in trained.items():
        layout = over_micro_batches(parse_layout(document.parameters[name], len(document.mesh.axes)), document.mesh)
        parameters += [StoredParameter(leaf.shape, ITEM_BYTES[leaf.dtype], layout)] * leaf.count
    stages = 1 if document.pipeline is None else document.pipeline.ranks
    mesh, per_element = document.mesh.micro_batched(1), document.optimizer_bytes_per_element
    return bill(parameters, mesh, CostModel(document.cluster), per_element, stages)
