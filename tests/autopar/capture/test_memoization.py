"""Layers whose code need not run: which these are, and which could tell."""

from __future__ import annotations

import builtins
import copy
import dis
import functools
import inspect
import itertools
import operator
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.capture.lowering import lower
from autopar.capture.repeats.replay import Call
from autopar.capture.snapshot.user_code_state import globals_of
from tests.autopar.capture.test_fold_forwards import Forward, Layer, Make, Stack, X, both, copies, layers, own_layers

N = 7
RECALLED = 4
"""Of seven equal layers: the first has an input without gradient, the second is traced, the third watched."""


@pytest.fixture(autouse=True)
def recalled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose code did not run."""
    found: list[str] = []
    before = Call.is_recalled

    def is_recalled(call: Call) -> bool:
        if before(call):
            found.append(call.path)
            return True
        return False

    monkeypatch.setattr(Call, "is_recalled", is_recalled)
    return found


def plain(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.act(layer.linear(x))


# ---- what code may read ----------------------------------------------------------------------------------------------


class Holder:
    """A class that does nothing but hold."""

    factor = 2.0


class Held:
    """An object of one's own."""

    def __init__(self, number: int):
        self.factor = float(number)


class Scaling:
    """A class whose objects keep what they say on it."""

    factor = 1.0

    def __init__(self) -> None:
        """Code, so that it can be followed."""


class Slotted:
    __slots__ = ("factor",)


SETTINGS = ModuleType("settings")
noise: Any = np.ones(1)
"""What no layer reads."""
BOX = [1.0]
who, behind = builtins.id, inspect.getattr_static
SHARED: dict[str, Any] = {}
COUNT = 0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    reset()
    yield
    reset()


def reset() -> None:
    global COUNT
    COUNT, Holder.factor, Scaling.factor = 0, 2.0, 1.0
    SETTINGS.factor = 2.0  # type: ignore[attr-defined]
    SHARED.clear()


def prepared(change: Callable[[Any], object], forward: Forward = plain, n: int = N) -> Make:
    """A stack of layers, changed before it is captured."""

    def make() -> nn.Module:
        reset()
        model = layers(forward, n)()
        change(model)
        return model

    return make


def between(change: Callable[[Any, int], object], forward: Forward) -> Make:
    """A stack that changes something before every layer."""

    def run(model: Stack, x: Tensor) -> Tensor:
        for number, layer in enumerate(model.layers):
            change(model, number)
            x = layer(x)
        return x

    def make() -> nn.Module:
        reset()
        return own_layers(run, forward, N)()

    return make


def each(name: str, value: Callable[[int], object]) -> Callable[[Any], None]:
    """Give every layer an attribute."""

    def change(model: Any) -> None:
        for number, layer in enumerate(model.layers):
            object.__setattr__(layer, name, value(number))

    return change


def share(value: object) -> Callable[[Any], None]:
    return each("shared", lambda number: value)


def scaled(read: Callable[[Any], float]) -> Forward:
    return lambda layer, x: x + layer.linear(x) * read(layer)


def twice(is_one: Callable[[int], bool], value: Callable[[], Any]) -> Callable[[Any], None]:
    """Give every layer one container twice, or two that are equal."""

    def change(model: Any) -> None:
        for number, layer in enumerate(model.layers):
            first = value()
            layer.first, layer.second = first, first if is_one(number) else value()
            layer.pair = {"both": (layer.first, layer.second)}

    return change


def are_one(layer: Any) -> float:
    return 3.0 if layer.first is layer.second else 1.0


def are_one_in_another(layer: Any) -> float:
    return 3.0 if operator.is_(*layer.pair["both"]) else 1.0


def known_to_all(is_global: Callable[[int], bool]) -> Callable[[Any], None]:
    return each("box", lambda number: BOX if is_global(number) else [1.0])


def nested(model: Any) -> None:
    model.layers[4].act.factor = 3.0


def reads_nested(layer: Any, x: Tensor) -> Tensor:
    return x + layer.act(layer.linear(x)) * getattr(layer.act, "factor", 1.0)


def in_eval(model: Any) -> None:
    model.layers[4].act.eval()


def drops(layer: Layer, x: Tensor) -> Tensor:
    return x + F.dropout(layer.linear(x), 0.1, layer.act.training)


def hooked(model: Any) -> None:
    model.layers[4].act.register_forward_hook(lambda module, args, output: output * 2)


def tied(model: Any) -> None:
    model.layers[5].linear.weight = model.layers[3].linear.weight


def frozen(model: Any) -> None:
    model.layers[4].linear.bias.requires_grad_(False)


def marked(model: Any) -> None:
    model.layers[4].linear.weight.factor = 3.0


def slotted(number: int) -> Slotted:
    found = Slotted()
    found.factor = float(number)  # type: ignore[attr-defined]
    return found


ONE_SLOT = slotted(2)


def fills(model: Any, number: int) -> None:
    ONE_SLOT.factor = float(number)  # type: ignore[attr-defined]


READS: dict[str, tuple[Make, int]] = {
    "nothing of its own": (layers(plain, N), RECALLED),
    "numbers that are equal": (prepared(each("factor", lambda n: 2.0), scaled(lambda s: s.factor)), RECALLED),
    "an attribute named as a global that it does not read": (
        prepared(each("noise", lambda n: 2.0), scaled(lambda s: s.noise)),
        RECALLED,
    ),
    "a global that cannot be told, in a function within": (layers(scaled(lambda s: (lambda: float(noise[0]))()), N), 0),
    "lists that are equal": (prepared(each("factors", lambda n: [1, 2.0]), scaled(lambda s: s.factors[1])), RECALLED),
    "one list twice, then two": (prepared(twice(lambda n: n < 5, lambda: [1.0]), scaled(are_one)), 2),
    "two lists, then one twice": (prepared(twice(lambda n: n > 4, lambda: [1.0]), scaled(are_one)), 2),
    "one list twice in all": (prepared(twice(lambda n: True, lambda: [1.0]), scaled(are_one)), RECALLED),
    "one empty dict twice, then two": (prepared(twice(lambda n: n < 5, dict), scaled(are_one)), 2),
    "one list twice inside another, then two": (
        prepared(twice(lambda n: n < 5, lambda: [2.0]), scaled(are_one_in_another)),
        2,
    ),
    "a list of a global, then equal ones": (
        prepared(known_to_all(lambda n: n < 5), scaled(lambda s: 3.0 if s.box is BOX else 1.0)),
        2,
    ),
    "lists of their own, then that of a global": (
        prepared(known_to_all(lambda n: n > 4), scaled(lambda s: 3.0 if s.box is BOX else 1.0)),
        2,
    ),
    "deques of other lengths": (
        prepared(each("last", lambda n: deque(maxlen=2 + n // 5)), scaled(lambda s: float(s.last.maxlen))),
        0,
    ),
    "one object for all": (prepared(share(Held(2)), scaled(lambda s: s.shared.factor)), RECALLED),
    "one object of a library for all": (
        prepared(share(SimpleNamespace(factor=2.0)), scaled(lambda s: s.shared.factor)),
        0,
    ),
    "a class of the user's that has no code": (layers(scaled(lambda s: Holder.factor), N), 0),
    "its number": (layers(scaled(lambda s: s.index + 1.0), N), 0),
    "its number, to no effect": (layers(lambda s, x: plain(s, x) if s.index < 99 else x, N), 0),
    "one of two kinds": (layers(scaled(lambda s: s.index % 2 + 1.0 if hasattr(s, "index") else 0.0), N), 0),
    "objects of their own": (prepared(each("held", lambda n: Held(n)), scaled(lambda s: s.held.factor)), 0),
    "all attributes": (layers(scaled(lambda s: vars(s)["index"] + 1.0), N), 0),
    "itself by a function of another name": (layers(scaled(lambda s: 1.0 + behind(s, "index") // 5), N), 0),
    "its dict": (layers(scaled(lambda s: s.__dict__["index"] + 1.0), N), 0),
    "a copy of itself": (layers(scaled(lambda s: copy.copy(s).index + 1.0), N), 0),
    "itself by a back door": (layers(scaled(lambda s: object.__getattribute__(s, "index") + 1.0), N), 0),
    "an attribute that one has": (prepared(nested, reads_nested), 3),
    "a flag of an inner module": (prepared(in_eval, drops), 3),
    "an inner module with a hook": (prepared(hooked), 3),
    "a parameter of another": (prepared(tied), RECALLED),
    "a parameter that is frozen": (prepared(frozen), 3),
    "slots": (prepared(each("slots", slotted), scaled(lambda s: s.slots.factor)), 0),
    "slots that all share": (between(fills, scaled(lambda s: ONE_SLOT.factor)), 0),
    "its place among all": (
        prepared(lambda m: share(list(m.layers))(m), scaled(lambda s: 3.0 if s is s.shared[5] else 1.0)),
        0,
    ),
    "a table of all": (
        prepared(lambda m: share({id(m.layers[5]): 3.0})(m), scaled(lambda s: s.shared.get(id(s), 1.0))),
        0,
    ),
    "a table of all, by a function of another name": (
        prepared(lambda m: share({id(m.layers[5]): 3.0})(m), scaled(lambda s: s.shared.get(who(s), 1.0))),
        0,
    ),
    "a table by shape": (
        prepared(share({(2, 4): 3.0}), lambda s, x: x + s.linear(x) * s.shared[x.shape[0], x.shape[1]]),
        RECALLED,
    ),
    "an array": (prepared(share(np.ones(1)), scaled(lambda s: float(s.shared[0]))), 0),
    "an iterator": (prepared(share(itertools.count(1)), scaled(lambda s: float(bool(s.shared)))), 0),
}


@pytest.mark.parametrize("case", READS)
def test_what_a_layer_reads_decides_whether_it_runs(case: str, recalled: list[str]) -> None:
    make, expected = READS[case]
    both(make)
    assert len(recalled) == expected


# ---- what code may leave behind --------------------------------------------------------------------------------------


def counts(layer: Any, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return plain(layer, x)


def counts_in_a_global(layer: Layer, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return x + layer.linear(x) * COUNT


def counts_in_a_box(layer: Any, x: Tensor) -> Tensor:
    layer.shared[0] += 1
    return x + layer.linear(x) * layer.shared[0]


def counts_in_an_object(layer: Any, x: Tensor) -> Tensor:
    layer.shared.factor += 1
    return x + layer.linear(x) * layer.shared.factor


def counts_in_a_default(layer: Layer, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(layer.index)
    return x + layer.linear(x) * len(seen)


def counts_on_itself(layer: Layer, x: Tensor) -> Tensor:
    counts_on_itself.calls = getattr(counts_on_itself, "calls", 0) + 1  # type: ignore[attr-defined]
    return x + layer.linear(x) * counts_on_itself.calls  # type: ignore[attr-defined]


def counts_on_its_class(layer: Layer, x: Tensor) -> Tensor:
    type(layer).made = getattr(type(layer), "made", 0) + 1  # type: ignore[attr-defined]
    return x + layer.linear(x) * type(layer).made  # type: ignore[attr-defined]


def closure() -> Forward:
    calls = 0

    def forward(layer: Layer, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x + layer.linear(x) * calls

    return forward


def closure_over_a_list() -> Forward:
    seen: list[int] = []

    def forward(layer: Layer, x: Tensor) -> Tensor:
        seen.append(layer.index)
        return x + layer.linear(x) * len(seen)

    return forward


class Lists(Layer):
    made: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.made.append(1)
        return x + self.linear(x) * len(self.made)


def on_lists() -> nn.Module:
    Lists.made = []
    return Stack([Lists(i) for i in range(N)])


def draws(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.linear(x) * (1 + (random.random() < 0.5))


def draws_by_numpy(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.linear(x) * (1 + bool(np.random.rand() < 0.5))


class Chance:
    """An object whose state is in C."""

    def __call__(self) -> nn.Module:
        drawn = random.Random(3)
        return prepared(share(drawn), lambda s, x: x + s.linear(x) * (1 + (s.shared.random() < 0.5)))()


def takes(layer: Any, x: Tensor) -> Tensor:
    """By a method of a list, which holds the list."""
    return x + layer.linear(x) * layer.shared()


def factory() -> Callable[[Tensor], Tensor]:
    calls = 0

    def count(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * 2 if calls > 4 else x

    return count


class Scheduled(Layer):
    """Its code names the factory, but not what came of it."""

    make = staticmethod(factory)

    def __init__(self, index: int, held: Any):
        super().__init__(index)
        self.fn = held

    def forward(self, x: Tensor) -> Tensor:
        fn = self.fn[0] if isinstance(self.fn, list) else self.fn
        return x + fn(self.linear(x))


def scheduled(wrap: Callable[[Any], Any]) -> Make:
    def make() -> nn.Module:
        held = wrap(factory())
        return Stack([Scheduled(i, held) for i in range(N)])

    return make


def house_function(x: Tensor) -> Tensor:
    SHARED["calls"] = SHARED.get("calls", 0) + 1
    return x * SHARED["calls"]


def by_a_library(layer: Layer, x: Tensor) -> Tensor:
    """The library's registry gives a function of the user's, which nothing else names."""
    return x + statistics.house(layer.linear(x))  # type: ignore[attr-defined]


def appends_to_its_input(layer: Layer, x: Tensor, states: list[Tensor]) -> Tensor:
    states.append(x)
    return plain(layer, x)


def swaps_its_input(layer: Layer, x: Tensor, states: list[Any]) -> Tensor:
    states[0] = layer.linear.bias
    return plain(layer, x)


def gives_full_lists(model: Any, x: Tensor) -> Any:
    swapped = 0
    for layer in model.layers:
        states = [x]
        x = layer(x, states)
        swapped += states[0] is layer.linear.bias
    return x * swapped


def gives_lists(model: Any, x: Tensor) -> Any:
    found = []
    for layer in model.layers:
        states: list[Tensor] = []
        x = layer(x, states)
        found.append(len(states))
    return x * found[-1], found


def leaves(layer: Layer, x: Tensor) -> Tensor:
    SHARED["calls"] = 1
    return plain(layer, x)


def sums(model: Any, x: Tensor) -> Tensor:
    total = 0
    for layer in model.layers:
        x = layer(x)
        total += SHARED.pop("calls", 0)
    return x * total


def says_so(layer: Any, x: Tensor) -> Tensor:
    layer.ran = True
    return plain(layer, x)


def says_so_unseen(layer: Any, x: Tensor) -> Tensor:
    object.__setattr__(layer, "ran", True)
    return plain(layer, x)


def asks_who_ran(model: Any, x: Tensor) -> Tensor:
    return Stack.forward(model, x) * sum(layer.ran for layer in model.layers)


def some_ran(forward: Forward) -> Make:
    """What the first layers write is there already."""

    def make() -> nn.Module:
        model = own_layers(asks_who_ran, forward, N)()
        each("ran", lambda number: number < 4)(model)
        return model

    return make


def marks_its_input(layer: Layer, x: Any) -> Tensor:
    y: Any = plain(layer, x)
    x.seen = True
    return y


def sees_marks(model: Any, x: Any) -> Tensor:
    for layer in model.layers:
        before, x = x, layer(x)
        x = x * 2 if getattr(before, "seen", False) else x
    return x


CHANGES: dict[str, Make] = {
    "a count on every layer": layers(counts, N),
    "a global count": prepared(lambda m: None, counts_in_a_global),
    "a shared list": lambda: prepared(share([0]), counts_in_a_box)(),
    "a shared object": lambda: prepared(share(Held(0)), counts_in_an_object)(),
    "a default": layers(counts_in_a_default, N),
    "an attribute of a function": layers(counts_on_itself, N),
    "an attribute of the class": lambda: layers(counts_on_its_class, N)(),
    "a list of the class": on_lists,
    "a variable of a closure": lambda: layers(closure(), N)(),
    "a list of a closure": lambda: layers(closure_over_a_list(), N)(),
    "random numbers": layers(draws, N),
    "random numbers of numpy": layers(draws_by_numpy, N),
    "a random generator of one's own": Chance(),
    "a method of a list": lambda: prepared(share([5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0].pop), takes)(),
    "a closure in a list": scheduled(lambda count: [count]),
    "a closure in a library's": scheduled(torch.enable_grad()),
    "a function that a library calls": prepared(lambda m: None, by_a_library),
    "a list that it is given": own_layers(gives_lists, appends_to_its_input, N),
    "a list in which it swaps": own_layers(gives_full_lists, swaps_its_input, N),
    "what the model takes away": own_layers(sums, leaves, N),
    "a flag that is up already": some_ran(says_so),
    "a flag that is up already, unseen": some_ran(says_so_unseen),
    "a mark on its input": own_layers(sees_marks, marks_its_input, N),
}


@pytest.mark.parametrize("case", CHANGES)
def test_layers_that_leave_something_behind_all_run(
    case: str, recalled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "house", house_function, raising=False)
    both(CHANGES[case])
    assert not recalled


# ---- what a model may change between its layers ----------------------------------------------------------------------


def sets_factor(model: Any, number: int) -> None:
    model.held[0].factor = 1 + number // 4


def holding(make: Make) -> Make:
    def made() -> nn.Module:
        model: Any = make()
        held = Held(1)
        model.held = [held]
        share(held)(model)
        return model

    return made


def replaces(model: Any, number: int) -> None:
    if number == 5:
        model.layers[5].linear = model.layers[0].linear


def replaces_weight(model: Any, number: int) -> None:
    if number == 5:
        model.layers[5].linear.weight = model.layers[0].linear.weight


def replaces_forward(model: Any, number: int) -> None:
    if number == 5:
        model.layers[5].forward = lambda x: x * 3


def evaluates(model: Any, number: int) -> None:
    if number == 5:
        model.layers[5].eval()


def sets_module(model: Any, number: int) -> None:
    SETTINGS.factor = 1.0 + number // 4  # type: ignore[attr-defined]


def sets_class(model: Any, number: int) -> None:
    Holder.factor = 1.0 + number // 4


def sets_global(model: Any, number: int) -> None:
    global COUNT
    COUNT = number // 4


def swaps(model: Any, number: int) -> None:
    if number == 5:
        layer = model.layers[5]
        layer.linear, layer.other = layer.other, layer.linear


def renames(model: Any, number: int) -> None:
    if number == 5:
        held = model.layers[5]._parameters
        first, second = held.pop("first"), held.pop("second")
        held.update(second=first, first=second)


def two_linears(model: Any) -> None:
    for layer in model.layers:
        layer.other = nn.Linear(8, 8)


def two_vectors(model: Any) -> None:
    for layer in model.layers:
        layer.first, layer.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))


def given(change: Callable[[Any], object], make: Make) -> Make:
    """A stack that is changed before it is captured, too."""

    def made() -> nn.Module:
        model = make()
        change(model)
        return model

    return made


def turns_into(model: Any, number: int) -> None:
    """And back again: what class an object is of is not undone."""
    if number > 4:
        model.layers[5].act.__class__ = nn.Sigmoid if number == 5 else nn.ReLU


def sets_held(model: Any, number: int) -> None:
    model.held[0].factor = 1.0 + number // 5


def sets_its_class(model: Any, number: int) -> None:
    type(model.held[0]).factor = 1.0 + number // 5


def sets_its_box(model: Any, number: int) -> None:
    model.held[0][0] = 1.0 + number // 5


def held_as(hold: Callable[[Any], Any], value: Callable[[], Any], make: Make) -> Make:
    """A stack that has a value, and whose layers have what holds it."""

    def made() -> nn.Module:
        model: Any = make()
        model.held = [value()]
        share(hold(model.held[0]))(model)
        return model

    return made


def times(box: list[float], x: Tensor) -> Tensor:
    return x * box[0]


def by_partial(layer: Any, x: Tensor) -> Tensor:
    found: Tensor = x + layer.shared(layer.linear(x))
    return found


def marked_tensor() -> Any:
    found: Any = torch.ones(1)
    found.factor = 1.0
    return found


def by_late_import(layer: Layer, x: Tensor) -> Tensor:
    import late_settings  # type: ignore[import-not-found]

    return x + layer.linear(x) * late_settings.factor


def sets_late(model: Any, number: int) -> None:
    sys.modules["late_settings"].factor = 1.0 + number // 4  # type: ignore[attr-defined]


def by_globals(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.linear(x) * (globals()["COUNT"] + 1)


def marks(model: Any, x: Any) -> Tensor:
    for number, layer in enumerate(model.layers):
        if number == 5:
            x.factor = 3.0
        x = layer(x)
    return x


def numbers(model: Any, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x, 1.0 + number // 5)
    return x


def aliases(model: Any, x: Tensor) -> Tensor:
    x = model.head(x)
    for number, layer in enumerate(model.layers):
        x = layer(x, x.view(x.shape) if number == 5 else x * 2)
    return x


def same_twice(model: Any, x: Tensor) -> Tensor:
    x = model.head(x)
    for number, layer in enumerate(model.layers):
        x = layer(x, x if number == 5 else x * 2)
    return x


def with_mark(layer: Layer, x: Any) -> Tensor:
    return x + layer.linear(x) * getattr(x, "factor", 1.0)


def with_other(layer: Layer, x: Tensor, other: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(x, other)
    return layer.linear(a + b) * (2 if x is other else 1)


def keeps_first(model: Any, x: Tensor) -> Tensor:
    SHARED["first"] = x = model.head(x)
    for number, layer in enumerate(model.layers):
        x = layer(SHARED["first"] if number == 5 else x)
    return x


def knows_first(layer: Layer, x: Tensor) -> Tensor:
    return layer.linear(x) * (5 if x is SHARED["first"] else 1)


BETWEEN: dict[str, tuple[Make, int]] = {
    "a shared object": (holding(between(sets_factor, scaled(lambda s: s.shared.factor))), 2),
    "a module of a layer": (between(replaces, plain), 3),
    "a parameter of a layer": (between(replaces_weight, plain), 2),
    "the forward of a layer": (between(replaces_forward, plain), 3),
    "the mode of a layer": (between(evaluates, lambda s, x: F.dropout(plain(s, x), 0.1, s.training)), 3),
    "the settings of the user's": (between(sets_module, scaled(lambda s: SETTINGS.factor)), 0),
    "a class of the user's": (between(sets_class, scaled(lambda s: Holder.factor)), 0),
    "a global": (between(sets_global, scaled(lambda s: COUNT + 1)), 2),
    "a mark on an input": (own_layers(marks, with_mark, N), 3),
    "two modules of a layer": (given(two_linears, between(swaps, lambda s, x: s.other(plain(s, x)))), 3),
    "two names in a layer": (given(two_vectors, between(renames, lambda s, x: s.linear(x) * s.first + s.second)), 3),
    "the class of an inner module": (between(turns_into, plain), 3),
    "the class of a shared object": (
        held_as(lambda it: it, Scaling, between(sets_its_class, scaled(lambda s: s.shared.factor))),
        2,
    ),
    "a mark on a shared tensor": (
        held_as(lambda it: it, marked_tensor, between(sets_held, scaled(lambda s: s.shared.factor))),
        2,
    ),
    "an object that is a key": (
        held_as(lambda it: {it: 1}, lambda: Held(1), between(sets_held, scaled(lambda s: next(iter(s.shared)).factor))),
        0,
    ),
    "what a partial holds": (
        held_as(lambda it: functools.partial(times, it), lambda: [1.0], between(sets_its_box, by_partial)),
        0,
    ),
    "settings that are imported late": (between(sets_late, by_late_import), 0),
    "a global, by the table of them": (between(sets_global, by_globals), 0),
    "a number that it gives": (own_layers(numbers, lambda s, x, n: x + s.linear(x) * n, N), 2),
    "the memory of an input": (own_layers(aliases, with_other, N), 4),
    "one input given twice": (own_layers(same_twice, with_other, N), 4),
    "which tensor an input is": (own_layers(keeps_first, knows_first, N), 3),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_layers_run_where_the_model_changed_something(
    case: str, recalled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, expected = BETWEEN[case]
    monkeypatch.setitem(sys.modules, "late_settings", ModuleType("late_settings"))
    reset()
    both(make)
    assert len(recalled) == expected


def test_what_is_recalled_returns_what_the_others_return(recalled: list[str]) -> None:
    def nests(layer: Layer, x: Tensor, table: Tensor) -> Any:
        y = layer.linear(x) * table
        return {"y": (y, None, 2.0), "x": x, "weight": layer.linear.weight, "again": [y, y.view(y.shape)]}

    def run(model: Any, x: Tensor) -> Tensor:
        table = torch.ones(8)
        for layer in model.layers:
            found = layer(x, table)
            assert found["x"] is x and found["y"][0] is found["again"][0]
            assert found["weight"] is layer.linear.weight
            x = found["y"][0] * found["y"][2] + found["again"][1]
        return x

    captured = both(own_layers(run, nests, N))
    assert len(recalled) == RECALLED
    assert copies(captured) == RECALLED + 1


MANY: dict[str, Any] = {}
exec("def many():\n" + "\n".join(f"    x.a{n}, g{n}" for n in range(300)), MANY)


def binds_and_unbinds() -> type:
    global LATER
    LATER = 1
    del LATER

    class Inner:
        attribute = COUNT

        def method(self) -> Any:
            return [each.index for each in SHARED.values()]

    return Inner


@pytest.mark.parametrize("function", [MANY["many"], binds_and_unbinds, statistics.quantiles, inspect.getmembers])
def test_globals_are_told_from_attributes(function: Any) -> None:
    """As the disassembler does, of functions with hundreds of names too."""
    naming = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
    codes, expected = [function.__code__], set()
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        expected |= {each.argval for each in dis.get_instructions(code) if each.opname in naming}
    assert expected
    assert set(globals_of(function.__code__)) == expected


def test_a_mark_on_a_parameter(recalled: list[str]) -> None:
    """Captured whole it is lost, since parameters are others there."""
    make = prepared(marked, scaled(lambda s: getattr(s.linear.weight, "factor", 1.0)))
    graph = lower(capture(make(), (X,), fold=True))
    assert [n["other"] for n in graph.nodes if n.op == "aten.mul.Tensor"] == [1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0]
    assert len(recalled) == 3


def test_classes_and_python_are_left_as_they_were() -> None:
    both(layers(plain, N))
    assert sys.getprofile() is None
    assert all("__getattribute__" not in vars(kind) for kind in (Layer, nn.Linear, nn.ReLU, nn.Module))


def test_nothing_is_watched_where_somebody_profiles(recalled: list[str]) -> None:
    seen: list[str] = []
    sys.setprofile(lambda frame, event, value: seen.append(event))
    try:
        both(layers(plain, N))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert seen
    assert not recalled
