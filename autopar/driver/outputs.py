"""The outputs of a model that a user asks for, as names of those that training steps need not keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from autopar.capture.capture import ONLY
from autopar.driver.trace import Traced
from planner.base.errors import InputError, PlanError
from planner.formulation.discarded_outputs import discarded_outputs
from planner.ir.graph import LOSS
from planner.plan.document.document import EVALUATE
from planner.plan.plan import Plan

Outputs = Sequence[str] | Literal["all"]
"""Names of outputs to keep, of nested ones also what is above them: ``hidden_states`` or ``hidden_states.3``."""


def check_outputs(outputs: object) -> None:
    """Refuse what is neither names nor ``"all"``; raises :class:`InputError`."""
    is_names = isinstance(outputs, (tuple, list)) and all(isinstance(name, str) for name in outputs)
    if outputs is not None and outputs != "all" and not is_names:
        raise InputError(
            f"outputs is {outputs!r}; give a tuple of names of the model's outputs to keep, such as ('loss', "
            "'logits'), or 'all'"
        )


def discards_of(traced: Traced, outputs: Outputs | None) -> tuple[str, ...] | None:
    """Names of the outputs that were not asked for; ``None``: nobody said, see
    :attr:`planner.formulation.training.Training.discards`.

    Raises:
        InputError: the model does not return what is asked for; says what it returns.
    """
    if outputs is None:
        return None
    if outputs == "all":
        return ()
    names = traced.captured.output_names
    there = names if traced.graph.loss is None else (*names, LOSS)
    unknown = [asked for asked in outputs if not any(_is_of(name, asked) for name in there)]
    if unknown:
        raise InputError(
            f"outputs has {unknown[0]!r}, which {traced.name} does not return on these inputs: it returns "
            f"{_listed(names) if names != (ONLY,) else 'one value, which with a loss_fn is the loss'}"
        )
    return tuple(name for name in traced.graph.output_names if not any(_is_of(name, asked) for asked in outputs))


def check_discards(traced: Traced, plan: Plan) -> None:
    """Refuse a plan that discards what the model does not return, or has to.

    Raises:
        PlanError: names it, and what may stand there.
    """
    graph = traced.graph
    may = [graph.output_names[position] for position in sorted(discarded_outputs(graph, graph.output_names, 1))]
    wrong = next((name for name in plan.discards if name not in may), None)
    if wrong is not None:
        why = "that is always kept" if wrong in graph.output_names else f"{traced.name} does not return it"
        raise PlanError(
            f'the plan\'s "discards" has output {wrong!r}, but {why}; possible: {_listed(may) or "none"}. Mend it, or '
            f"make another with {EVALUATE}"
        )


def _is_of(name: str, asked: str) -> bool:
    return name == asked or name.startswith(f"{asked}.")


def _listed(names: Iterable[str]) -> str:
    """Names, of nested outputs the outermost one."""
    return ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
