"""Says how the model at hand differs from the one that a plan was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.base.formatting import shape_text
from planner.formulation.decision_names import filled
from planner.ir.folding import Folded
from planner.ir.graph import Graph
from planner.plan.document.document import Document


def difference(plan: Document, folded: Folded, model: Mapping[str, Any]) -> str:
    """What differs between the model that a plan was made for and the one at hand, and the way out.

    Args:
        folded: the graph of the model at hand.
        model: its facts, see :func:`planner.plan.document.fingerprint.model_facts`.
    """
    facts = [
        f"{what}: plan {plan.model.get(what)}, model {model[what]}"
        for what in ("class", "parameters")
        if plan.model.get(what) != model[what]
    ]
    mode = plan.model.get("mode", model["mode"])
    if not facts and mode != model["mode"]:
        return (
            f"the plan was made for the model in {mode} mode, and the model is in {model['mode']} mode, in which it "
            f"computes something else: call model.{mode}() first, or plan again in {model['mode']} mode"
        )
    for mine, theirs in zip(
        [(name, len(i)) for name, i in zip(folded.names, folded.kinds, strict=True)],
        [(b.name, b.count) for b in plan.blocks],
        strict=False,
    ):
        if mine != theirs:
            facts.append(f"block: plan {theirs[1]} x {theirs[0]}, model {mine[1]} x {mine[0]}")
            break
    for leaf in folded.graph.leaves:
        recorded, shape = plan.account.leaves.get(leaf.target), leaf.results[0].shape
        if leaf.op == "input" and recorded is not None and recorded.shape != shape:
            facts.append(f"input {leaf.target}: plan {shape_text(recorded.shape)}, model {shape_text(shape)}")
    same = not any(plan.model.get(what) != model[what] for what in ("class", "parameters"))
    facts += _inputs_apart(plan, folded.graph)
    dtypes = _dtypes_apart(plan, folded.graph)
    facts += dtypes
    planned, found = sum(b.count * len(b.ops) for b in plan.blocks), len(folded.graph.operators)
    if planned != found:
        facts.append(f"operators: plan {planned}, model {found}")
    if same and planned > found and folded.graph.loss is None:
        way = "this returns no loss, and the plan may have been made with a loss_fn: give it, or plan again without one"
    elif same and planned < found and folded.graph.loss is not None:
        way = "this returns a loss, and the plan may have been made without its loss_fn: leave it out, or plan again"
    elif same and dtypes:
        way = "plan again for these dtypes, or give the model and its inputs those that it was made with"
    elif same:
        way = "give the batch and the loss_fn, if any, that it was made with, or plan again for this one"
    else:
        way = "plan again for this one"
    if not facts:
        facts.append("the same structure, but other shapes, arguments, input sizes or loss_fn")
        way += "; where the model calls its layers in the order of a set, walk sorted(...) of it"
    return f"the plan was made for another model, batch or loss ({'; '.join(facts)}): {way}"


def _inputs_apart(plan: Document, graph: Graph) -> list[str]:
    """The inputs that only the plan, or only the model at hand has, in words."""
    there = {leaf.target for leaf in graph.leaves if leaf.op == "input"}
    sides = (("plan", plan.inputs.keys() - there), ("model", there - plan.inputs.keys()))
    return [f"input {name}: only in the {side}" for side, names in sides for name in sorted(names)]


def _dtypes_apart(plan: Document, graph: Graph) -> list[str]:
    """The first parameter, buffer or input that the plan knows in another dtype, and how many others, in words."""
    leaves = plan.account.leaves.items()
    planned = {each: leaf.dtype for name, leaf in leaves for each in filled(name.partition(" #")[0], leaf.stands_for)}
    found = [
        f"{'parameter' if leaf.op == 'param' else leaf.op} {leaf.target}: plan {planned[leaf.target]}, model {dtype}"
        for leaf in graph.leaves
        if (dtype := leaf.results[0].dtype) != planned.get(leaf.target, dtype)
    ]
    others = f", and {len(found) - 1} more in another dtype" if len(found) > 1 else ""
    return [found[0] + others] if found else []
