"""What processes of ``test_outputs.py`` do: train beside the original, and look at what a step returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.runtime.module import ParallelModule
from planner.base.errors import InputError
from planner.plan.plan import Plan
from tests.autopar.captured_once import captured_once, made
from tests.autopar.workers import Batch, batch_of, cluster_of, model_of, same

NAMES = ("logits", "hidden_states.0", "hidden_states.1", "hidden_states.2")


def speaker() -> torch.nn.Module:
    """A model of Transformers that returns more than its loss."""
    model = model_of("gpt2")
    model.config.output_hidden_states = True
    return made(model, "speaker")


def batch(seed: int = 1) -> Batch:
    """One whose micro-batches ignore different numbers of tokens."""
    given = batch_of("gpt2", seed)
    return {"input_ids": given["input_ids"], "labels": given["target"]}


def tensors_of(returned: Any) -> dict[str, Any]:
    return dict(zip(NAMES, (returned.logits, *returned.hidden_states), strict=True))


def trains(ranks: int, given: dict[str, Any], kept: tuple[str, ...]) -> set[str]:
    """On a rank: a step, and evaluation around it; returns what the step kept here.

    Args:
        given: of :func:`autopar.parallelize`; a plan as its document.
        kept: what all ranks together should keep.
    """
    if "plan" in given:
        given["plan"] = Plan.from_dict(given["plan"])
    model = speaker()
    with captured_once():
        pmodel = autopar.parallelize(copy.deepcopy(model), cluster_of(ranks), example_kwargs=batch(), **given)
    _evaluates(pmodel, model)
    for seed in (1, 2):
        for each in (pmodel, model):
            each.zero_grad()
        returned, expected = pmodel(**pmodel.shard(batch(seed))), model(**batch(seed))
        found = tensors_of(returned)
        same("loss", returned.loss, expected.loss)
        returned.loss.backward()
        expected.loss.backward()
        theirs = dict(model.named_parameters())
        for name, parameter in pmodel.named_parameters():
            grad = theirs[name].grad
            assert parameter.grad is not None and grad is not None and grad.any()
            same(f"gradient of {name}", parameter.grad, grad, 1e-9)
        for name in set(NAMES) - set(kept):
            _is_refused(found[name], name)
        here = {name for name in kept if found[name] is not None}  # None: on the ranks of another stage
        for name in here:
            same(name, found[name], tensors_of(expected)[name])
    _evaluates(pmodel, model)
    return here


def _is_refused(value: Any, name: str) -> None:
    for use in (lambda: value.argmax(-1), lambda: value[0], lambda: 2 * value, lambda: torch.softmax(value, -1)):
        with pytest.raises(InputError, match=rf"output '{name}' was not kept, .* outputs=\('loss', '{name}'\) or"):
            use()
    assert not hasattr(value, "shape") and not isinstance(value, Tensor) and "not kept" in repr(value)


def _evaluates(pmodel: ParallelModule, model: torch.nn.Module) -> None:
    """Everything is returned where nothing runs backward."""
    for training in (True, False):
        with torch.no_grad():
            found, expected = (each.train(training)(**given) for each, given in _both(pmodel, model))
        same("loss", found.loss, expected.loss)
        for name, value in tensors_of(found).items():
            if value is not None:
                same(name, value, tensors_of(expected)[name])
        assert pmodel.pipeline is not None or None not in tensors_of(found).values()
    for each in (pmodel, model):
        each.train()


def _both(pmodel: ParallelModule, model: torch.nn.Module) -> list[tuple[Any, Batch]]:
    return [(pmodel, pmodel.shard(batch())), (model, batch())]
