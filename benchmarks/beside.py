"""Beside: a parallelized model trained beside its original, and what became of many such pairs in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autopar.runtime.module import ParallelModule


def largest_error(
    model: nn.Module,
    pmodel: ParallelModule,
    optimizers: Sequence[Any],
    losses: Callable[[int], Sequence[Tensor]],
    steps: int,
    largest_norm: float | None = 0.5,
) -> float:
    """On a rank: the largest relative error of a loss, or of a parameter or buffer afterwards, in some steps.

    Args:
        optimizers: that of the model, and that of the parallelized one.
        losses: of both, by the number of the step.
        largest_norm: to which gradients are clipped; ``None``: they are not.
    """
    from torch import nn

    both, worst = (model, pmodel), 0.0
    for step in range(steps):
        found = losses(step)
        worst = max(worst, ((found[1] - found[0]) / found[0]).abs().item())
        for m, loss, optimizer in zip(both, found, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            if largest_norm is not None:
                nn.utils.clip_grad_norm_(m.parameters(), largest_norm)
            optimizer.step()
    state = pmodel.full_state_dict()
    for key, value in model.state_dict().items():
        worst = max(worst, ((state[key] - value).abs().max() / value.abs().max().clamp_min(1e-30)).item())
    return worst


def summary(rows: Sequence[Mapping[str, Any]], errors: Iterable[float]) -> str:
    """How many cells are equal, do not apply and failed, and the largest of their errors."""
    count = {status: sum(row["status"] == status for row in rows) for status in ("equal", "n/a", "FAILED")}
    return (
        f"{count['equal']} equal, {count['n/a']} not applicable, {count['FAILED']} failed; largest relative error "
        f"{max(errors, default=0.0):.1e}"
    )
