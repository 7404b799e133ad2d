"""A model and example inputs to a captured program and the planner's graph of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture.capture import Captured, LossFn, capture
from autopar.capture.hooks import check_hooks
from autopar.capture.in_slabs import in_slabs
from autopar.capture.lowering import lower
from autopar.driver.arguments import Fold, warn
from planner.base.cpython import no_garbage, on_one_stack
from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from planner.ir.graph import Graph
from planner.plan.document.fingerprint import model_facts
from planner.sizes.position_limits import check_positions
from planner.tables.lookups import lookups
from planner.tables.tables_plan import TablesPlan


@dataclass(frozen=True)
class Traced:
    """A captured model and its planner graph.

    Attributes:
        name: of the model's class.
        capture_s: seconds that it took.
        whole: the same with every table a parameter of its own; ``None``: it is so.
    """

    captured: Captured
    graph: Graph
    name: str
    capture_s: float
    whole: Traced | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the model in a plan."""
        if self.whole is not None:
            return self.whole.facts
        return model_facts(self.graph, self.name, "train" if self.captured.training else "eval")

    def placing(self, tables: TablesPlan | None, cluster: ClusterSpec) -> Traced:
        """The same with tables in slabs as a plan has them.

        Raises:
            PlanError: the model has no such tables.
        """
        if tables is None or not tables.in_slabs:
            return self
        ranks, inside = cluster.world_size, cluster.levels[0].size
        captured = in_slabs(self.captured, lookups(self.graph), tables.in_slabs, ranks, ranks // inside)
        return replace(self, captured=captured, graph=lower(captured), whole=self)

    def check_micro_batched(self) -> None:
        """Refuse a model that no micro-batched plan can train, before one is searched.

        Raises:
            InputError: it is to be trained and has no loss.
        """
        trained = any(leaf.results[0].grad for leaf in self.graph.leaves)
        if self.captured.training and trained and self.graph.loss is None:
            raise InputError(
                "a micro-batched step runs its own backward, so the model must return its loss (one floating number "
                "that depends on what is trained), or be given a loss_fn: give it one, or leave out the pins that "
                "ask for such a step; to run it forward only, call model.eval() first"
            )


@on_one_stack
@no_garbage()
def trace(
    model: nn.Module,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    fold: Fold = "capture",
) -> Traced:
    """Capture and lower a model; see :func:`autopar.capture.capture.capture`, and :func:`plan` for ``fold``."""
    start = time.monotonic()
    warn(check_hooks(model))
    captured = capture(model, example_args, example_kwargs, loss_fn, fold=fold == "capture")
    graph = lower(captured)
    check_positions(graph)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if loss_fn is not None and model.training and not trains:
        raise InputError(
            f"loss_fn is given, {type(model).__name__} is in train mode, and none of its parameters has requires_grad, "
            "so that there is nothing to train: set requires_grad on what is to be trained, or call model.eval() to "
            "have the loss computed alone"
        )
    if loss_fn is not None and trains and not graph.roots:
        raise InputError(
            "the loss that loss_fn returned depends on no parameter that is trained: compute it from the model's "
            "outputs, and do not detach them"
        )
    return Traced(captured, graph, type(model).__name__, time.monotonic() - start)
