"""Undo: containers are found wherever they are, and what is changed in them is told with what they held."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.undo import Before, Held
from autopar.walk import Walk


class Model(nn.Module):
    """Holds one of each kind of container, below one another, and empty ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.made: Any = OrderedDict(a=[1, 2], b=({"deep": 0.0},))
        self.seen: Any = {1, 2, 3}
        self.last: Any = deque([1, 2], maxlen=2)
        self.count: Any = defaultdict(int, {1: 1})
        self.own: Any = SimpleNamespace(calls=0, names=[])
        self.none: Any = {}
        self.shared: Any = self.made["a"]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "an attribute": lambda m: setattr(m, "extra", 1),
    "another of equal value": lambda m: setattr(m.own, "calls", False),
    "a zero of another sign": lambda m: m.made["b"][0].update(deep=-0.0),
    "an equal key": lambda m: (m.count.pop(1), m.count.update({True: 1})),
    "the order of keys": lambda m: m.made.move_to_end("a"),
    "an equal list in place of one": lambda m: m.made.update(a=[1, 2]),
    "a list in two places": lambda m: m.shared.append(3),
    "a list in an object": lambda m: m.own.names.append("x"),
    "a set": lambda m: (m.seen.discard(1), m.seen.add(4)),
    "a deque": lambda m: m.last.append(3),
    "what was empty": lambda m: m.none.update(x=1),
    "a deletion": lambda m: delattr(m, "count"),
    "a hook": lambda m: m.linear.register_forward_hook(lambda module, args, output: None),
    "a module": lambda m: setattr(m, "linear", nn.Linear(2, 2)),
    "much at once": lambda m: (m.made.clear(), m.seen.clear(), m.__dict__.update(own=None), m.last.rotate()),
}


def written(value: Any) -> object:
    """All that is below a value, in order, by identity and by what it holds."""
    if isinstance(value, dict):
        return id(value), [(written(key), written(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set, deque)):
        return id(value), [written(each) for each in (sorted(value) if isinstance(value, set) else value)]
    return id(value), repr(value), written(vars(value)) if isinstance(value, (nn.Module, SimpleNamespace)) else None


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_taken_back(change: str) -> None:
    model = Model()
    state, before = written(model), Before(Walk(model))
    CHANGES[change](model)
    assert written(model) != state
    before.restore()
    assert written(model) == state
    assert model.last.maxlen == 2
    assert before.had_new_tensors == (change == "a module")


def test_only_what_is_changed_is_told() -> None:
    model = Model()
    held = Held([vars(model)])
    assert held.changed() == []
    model.made["c"] = 3
    model.none["x"] = 1
    model.own.calls = 1
    was = [(model.none, []), (model.made, [("a", model.shared), ("b", model.made["b"])])]
    was.append((vars(model.own), [("calls", 0), ("names", model.own.names)]))
    assert held.changed() == was


@pytest.mark.parametrize(
    "keep",
    [
        lambda model, tensor: model.register_buffer("kept", tensor),
        lambda model, tensor: setattr(model.own, "kept", tensor),
        lambda model, tensor: model.own.names.append(tensor),
        lambda model, tensor: model.made.update(c=SimpleNamespace(kept=[tensor])),
    ],
)
def test_new_tensors_are_told(keep: Callable[[Model, Tensor], Any]) -> None:
    model, tensor = Model(), torch.zeros(2)
    before = Before(Walk(model))
    keep(model, tensor)
    before.restore()
    assert before.had_new_tensors


def test_tensors_in_another_place_are_not_new() -> None:
    model = Model()
    before = Before(Walk(model))
    model.own.names.append(model.linear.weight)
    before.restore()
    assert not before.had_new_tensors
