"""A model's state: containers are found wherever they are, names that its code shares too, and all is restored."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.model_state import Snapshot
from autopar.graph.module_walk import ModuleWalk


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


class Named(NamedTuple):
    names: list[str]


class Ledger(dict[str, Any]):
    """Writes more than it is told to, and hides what it has."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setitem__("last", key)

    def values(self) -> Any:
        raise NotImplementedError

    def clear(self) -> None:
        raise NotImplementedError


class Ordered(OrderedDict[str, Any]):
    """With attributes of its own."""


class Row(list[Any]):
    """Anything."""


class Seen(set[int]):
    """Numbers."""


class Last(deque[int]):
    """Numbers."""


class Own:
    """Its objects may be in sets."""

    calls = 0


class Apart(Model):
    """Holds containers of classes of one's own, below one another."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Any = Counter(a=1)
        self.ledger: Any = Ledger(a=[1], last="a")
        self.ordered: Any = Ordered(a=1, b={"deep": Row([1, 2])})
        self.ordered.note = "x"
        self.row: Any = Row([Named(["a"]), frozenset({Own()})])
        self.marks: Any = Seen({1, 2})
        self.recent: Any = Last([1, 2], maxlen=2)


APART: dict[str, Callable[[Any], Any]] = {
    "a count": lambda m: m.times.update("ab"),
    "a key": lambda m: m.ledger.update(b=2),
    "a key by its own method": lambda m: m.ledger.__setitem__("b", 2),
    "a list in a dict of one's own": lambda m: m.ledger["a"].append(2),
    "the order of keys": lambda m: m.ordered.move_to_end("a"),
    "an attribute of a dict": lambda m: setattr(m.ordered, "note", "y"),
    "a list of one's own, deep down": lambda m: m.ordered["b"]["deep"].reverse(),
    "a list in a named tuple": lambda m: m.row[0].names.append("b"),
    "an attribute of what is in a frozen set": lambda m: setattr(next(iter(m.row[1])), "calls", 1),
    "a set": lambda m: (m.marks.discard(1), m.marks.add(3)),
    "a deque": lambda m: m.recent.append(3),
    "a tensor": lambda m: m.row.append(torch.zeros(2)),
}

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
    found: list[object] = [id(value)]
    if isinstance(value, dict):
        found += [(written(key), written(each)) for key, each in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        found += [written(each) for each in (sorted(value) if isinstance(value, set) else value)]
    else:
        found.append(repr(value))
    if isinstance(value, (nn.Module, SimpleNamespace, Ordered, Own)):
        found.append(written(vars(value)))
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_taken_back(change: str) -> None:
    model = Model()
    state, before = written(model), Snapshot(ModuleWalk(model))
    CHANGES[change](model)
    assert written(model) != state
    before.restore()
    assert written(model) == state
    assert model.last.maxlen == 2
    assert before.had_new_tensors == (change == "a module")


@pytest.mark.parametrize("change", APART)
def test_a_change_in_a_class_of_ones_own_is_taken_back(change: str) -> None:
    model = Apart()
    state, before = written(model), Snapshot(ModuleWalk(model))
    before.restore()
    assert written(model) == state
    APART[change](model)
    assert written(model) != state
    before.restore()
    assert written(model) == state
    assert model.recent.maxlen == 2
    assert before.had_new_tensors == (change == "a tensor")


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
    before = Snapshot(ModuleWalk(model))
    keep(model, tensor)
    before.restore()
    assert before.had_new_tensors


def test_tensors_in_another_place_are_not_new() -> None:
    model = Model()
    before = Snapshot(ModuleWalk(model))
    model.own.names.append(model.linear.weight)
    before.restore()
    assert not before.had_new_tensors


TOTAL = 0
LOSSES: dict[str, list[int]] = {"all": []}
UNSET: Any


class Settings:
    """Read by name, and held by no module."""

    scale = 1.0


def global_number(model: Any) -> None:
    global TOTAL
    TOTAL += 1


def global_that_was_not_there(model: Any) -> None:
    global UNSET
    UNSET = 1


def inner_function(model: Any) -> None:
    [LOSSES["all"].append(each) for each in (1, 2)]


def attribute_of_a_class(model: Any) -> None:
    Settings.scale += 1


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.ones(n)


def cache(model: Any) -> None:
    table(3)


def variables() -> tuple[Callable[[Any], None], Callable[[], object]]:
    calls, seen = 0, list[int]()

    def forward(model: Any) -> None:
        nonlocal calls
        calls += 1
        seen.append(calls)

    return forward, lambda: (calls, list(seen))


forward, told = variables()


def shared() -> object:
    names = {name: value for name, value in globals().items() if name in ("TOTAL", "UNSET")}
    return names, repr(LOSSES), vars(Settings)["scale"], table.cache_info().currsize, told()


@pytest.mark.parametrize(
    "forward", [global_number, global_that_was_not_there, inner_function, attribute_of_a_class, cache, forward]
)
@pytest.mark.parametrize("is_method", [True, False])
def test_what_functions_share_by_name_is_taken_back(forward: Callable[[Any], None], is_method: bool) -> None:
    """A function that the model's class has, or that another one of the user's names."""
    kind = type("Own", (nn.Module,), {"forward": forward if is_method else lambda self: forward(self)})
    model, before = kind(), shared()
    snapshot = Snapshot(ModuleWalk(model))
    model()
    assert shared() != before
    snapshot.restore()
    assert shared() == before
