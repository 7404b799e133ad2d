"""While a model of Transformers is captured, eager attention that caps its scores is one operator.

Transformers has no other attention for models with soft caps, and writes their scores out. Models ask a table for the
function that attends, and give the one that is theirs, written beside the model, for ``eager``. While a model is
captured the table answers with ours, which compares the model's function with the operator on numbers: one that does
something else runs as it is. So does one whose weights somebody asks for, which the operator does not make.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.capture.hooks import COLLECTING
from autopar.operators.attention import attention

TABLE = "transformers.modeling_utils"
"""The module of the table; where it is not imported, no model has attention of Transformers."""
Attends = Callable[..., tuple[Tensor, Tensor | None]]
"""Takes a module, queries, keys, values ``[b, h, n, d]``, a mask and options; gives ``[b, n, h, e]``, and weights."""


@contextlib.contextmanager
def soft_caps_whole() -> Iterator[None]:
    """While inside, eager attention of Transformers with soft caps is the operator, where that computes the same."""
    table = getattr(sys.modules.get(TABLE), "ALL_ATTENTION_FUNCTIONS", None)
    if table is None:
        yield
        return
    asked = table.get_interface

    def get_interface(name: str, default: Attends) -> Attends:
        found: Attends = asked(name, default)
        return _operator_or(found) if name == "eager" else found

    table.get_interface = get_interface
    try:
        yield
    finally:
        del table.get_interface


def _operator_or(function: Attends) -> Attends:
    """What attends in place of a model's own function."""

    def run(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        is_known = options.get("softcap") and (mask is None or mask.is_floating_point())
        if not is_known or _has_readers(module, options) or not _is_alike(function, module, query, key, options):
            return function(module, query, key, value, mask, **options)
        return _operator(query, key, value, mask, options), None

    return run


def _has_readers(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether somebody may read an attention's weights: the caller of the model, or a hook that is given results."""
    default = getattr(getattr(module, "config", None), "output_attentions", False)
    asked = options.get("output_attentions", default) or _are_collected()
    return bool(asked or any(hook.__module__ != COLLECTING for hook in module._forward_hooks.values()))


def _are_collected() -> bool:
    """Whether hooks that Transformers put on a model, in this call or one before, keep weights in this call."""
    collector = getattr(sys.modules.get(COLLECTING), "_active_collector", None)
    collected = None if collector is None else collector.get()
    return any("attentions" in name for name in collected or ())


def _operator(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Mapping[str, Any]) -> Tensor:
    out = attention(
        query,
        key,
        value,
        mask,
        options.get("dropout", 0.0),
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
        softcap=options["softcap"],
    )
    return out.transpose(1, 2).contiguous()


def _is_alike(function: Attends, module: nn.Module, query: Tensor, key: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether a function computes on numbers what the operator does: scores within the cap and beyond, some hidden."""
    options = {**options, "dropout": 0.0}
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(0)
        heads = query.shape[1], key.shape[1], key.shape[1]
        q, k, v = (torch.randn(1, count, 5, query.shape[-1], dtype=torch.float64) for count in heads)
        q *= options["softcap"] / (options.get("scaling") or 1) / query.shape[-1] ** 0.5
        mask = torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(2).bool(), -torch.inf)
        try:
            found, _ = function(module, q, k, v, mask, **options)
        except Exception:  # it takes more than is known here
            return False
        wanted = _operator(q, k, v, mask, options)
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=0, atol=1e-5)  # weights are in float32
