"""Plans at other sizes: sizes that know their formula, how they are simulated, predictions, limits, closed forms."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from planner.analysis.prediction import Prediction, predict_micro_batched
from planner.base.errors import PlanError
from planner.base.symbolic_float import growing, largest
from planner.base.symbolic_int import along, at_sizes, batch_of, describe, micro_batches_of, quotient, sequence_of
from planner.formulation.constraints.pins import Pins
from planner.formulation.pinned_space import pinned_space
from planner.formulation.strategies import rules_of
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, refold, restage, restore
from planner.sizes.closed_form import Formulas
from planner.sizes.size_propagation import NotFollowed, follow
from tests.planner.plans import Build as Written
from tests.planner.plans import cluster, plan_of, residual_mlp

BATCH, LENGTH = batch_of(6), sequence_of(10)

# ---- sizes -----------------------------------------------------------------------------------------------------------

plain = st.integers(-9, 9)
sizes = st.recursive(
    plain | st.just(BATCH) | st.just(LENGTH),
    lambda inner: st.tuples(inner, inner, st.sampled_from("+-*")).map(lambda each: compute(*each)),
    max_leaves=6,
)


def compute(a: int, b: int, operation: str) -> int:
    return a + b if operation == "+" else a - b if operation == "-" else a * b


@given(sizes, sizes, st.sampled_from("+-*"), st.integers(1, 50), st.integers(1, 50))
def test_arithmetic_goes_with_the_formula(a, b, operation, batch, sequence):
    result = compute(a, b, operation)
    assert int(result) == compute(int(a), int(b), operation) == at_sizes(result, 6, 10)
    moved = compute(at_sizes(a, batch, sequence), at_sizes(b, batch, sequence), operation)
    assert at_sizes(result, batch, sequence) == moved


@given(sizes, st.sampled_from([1, 2, 3, BATCH, LENGTH, BATCH * LENGTH]), st.integers(1, 50), st.integers(1, 50))
def test_division_undoes_multiplication(a, b, batch, sequence):
    assert at_sizes(a * b // b, batch, sequence) == at_sizes(a, batch, sequence)


def test_sizes_are_equal_if_they_grow_alike():
    assert BATCH * LENGTH - LENGTH == LENGTH * (BATCH - 1)
    assert {6: "a number"}.get(BATCH) is None and {BATCH: "the batch"}.get(6) is None
    assert batch_of(8) != sequence_of(8)
    assert BATCH - BATCH == 0 and type(BATCH - BATCH) is int
    assert hash(batch_of(8)) == hash(8)


def test_any_size_is_cut_into_micro_batches():
    micro_batches = micro_batches_of(4)
    part = BATCH * 4 * LENGTH // micro_batches
    assert int(part) == 60 and describe(part) == "4 * batch * sequence / micro-batches"
    assert part * micro_batches == 4 * BATCH * LENGTH and 8 // micro_batches * micro_batches == 8
    assert int(along(micro_batches, 3, 2)) == 11 and along(micro_batches, 3, 2) == 2 * micro_batches + 3
    seconds = largest([growing(1.0, 2.0, BATCH), growing(0.0, 1.0, LENGTH)])
    again = seconds * micro_batches / micro_batches
    assert float(seconds * micro_batches) == 4 * float(seconds) and again.formula == seconds.formula


def test_what_is_not_always_a_multiple_is_not_divided():
    assert quotient(BATCH * LENGTH, LENGTH) == BATCH
    assert quotient(BATCH, LENGTH) is None
    with pytest.raises(ArithmeticError, match="batch is not always a multiple of sequence"):
        batch_of(8) // sequence_of(4)
    with pytest.raises(ArithmeticError, match="12 is not always a multiple of batch"):
        12 // BATCH


# ---- following -------------------------------------------------------------------------------------------------------


class Build(Written):
    """A graph whose sizes are followed; a module's path is its operator's name."""

    def call(self, name: str, op: str, /, *shape: int, **args: object) -> Ref:
        return super().call(name, op, *shape, path=name, **args)

    def follow(self, batch: bool = True, sequence: bool = True) -> dict[str, Any]:
        """Name -> shape, as sizes."""
        graph = self.graph(Ref(self.nodes[-1].name))
        found = follow(graph, rules_of(graph), batch, sequence)
        return {ref.node: [math.prod(parts) for parts in dims] for ref, dims in found.dims.items()}


def test_a_flattened_batch_keeps_its_parts():
    g = Build()
    x = g.leaf("x", 6, 10, 4)
    flat = g.call("flat", "view.default", 60, 4, self=x, size=(60, 4))
    up = g.call("up", "linear.default", 60, 8, input=flat, weight=g.leaf("w", 8, 4, op="param"), bias=None)
    g.call("back", "view.default", 6, 10, 2, 4, self=up, size=(6, 10, 2, 4))
    found = g.follow()
    assert found["flat"] == [BATCH * LENGTH, 4]
    assert found["back"] == [BATCH, LENGTH, 2, 4]


def test_numbers_in_arguments_are_what_they_meet():
    """Two ``arange(10)``: one is added to the sequence, the other to ten features."""
    g = Build()
    x = g.leaf("x", 6, 10, 10)
    rows = g.call("rows", "arange.default", 10, end=10)
    column = g.call("column", "view.default", 10, 1, self=rows, size=(10, 1))
    features = g.call("features", "arange.default", 10, end=10)
    at = g.call("at", "add.Tensor", 6, 10, 10, self=x, other=column, alpha=1)
    both = g.call("both", "add.Tensor", 6, 10, 10, self=at, other=features, alpha=1)
    g.call("up", "linear.default", 6, 10, 4, input=both, weight=g.leaf("w", 4, 10, op="param"), bias=None)
    found = g.follow()
    assert found["rows"] == [LENGTH] and found["features"] == [10]
    assert found["up"] == [BATCH, LENGTH, 4]


def test_slices_pads_and_joins_count_from_the_ends():
    g = Build()
    x = g.leaf("x", 6, 10)
    table = g.leaf("table", 64, 1, op="buffer")
    g.call("later", "slice.Tensor", 6, 9, self=x, dim=1, start=1, end=2**63 - 1, step=1)
    g.call("earlier", "slice.Tensor", 6, 9, self=x, dim=1, start=0, end=-1, step=1)
    padded = g.call("padded", "constant_pad_nd.default", 6, 11, self=x, pad=(0, 1), value=0)
    g.call("joined", "cat.default", 6, 21, tensors=(x, padded), dim=1)
    read = g.call("read", "slice.Tensor", 10, 1, self=table, dim=0, start=0, end=10, step=1)
    line = g.call("line", "view.default", 10, self=read, size=(10,))
    g.call("sum", "add.Tensor", 6, 10, self=x, other=line, alpha=1)
    found = g.follow()
    assert found["later"] == found["earlier"] == [BATCH, LENGTH - 1]
    assert found["padded"] == [BATCH, LENGTH + 1] and found["joined"] == [BATCH, 2 * LENGTH + 1]
    assert found["read"] == [LENGTH, 1]


def test_a_slice_may_take_all_only_as_planned():
    g = Build()
    x = g.leaf("x", 8, 16)
    whole = g.call("whole", "slice.Tensor", 8, 16, self=x, dim=1, start=0, end=64, step=1)
    g.call("y", "relu.default", 8, 16, self=whole)
    plan = plan_of(Graph(tuple(g.nodes), (Ref("y"),)), cluster(2))
    assert plan.at(sequence=64).peak_bytes > plan.predicted.peak_bytes
    with pytest.raises(PlanError, match=r"slice\.Tensor in whole takes 64 at most, and would be given 66"):
        plan.at(sequence=66)
    assert plan.max_sequence() == 64


def test_positions_are_looked_up_in_a_table_that_ends():
    """Learned positions by ``arange``, and a buffer that is read up to the sequence length."""
    g = Build()
    x = g.leaf("x", 8, 16, 4)
    rows = g.call("rows", "arange.default", 16, end=16)
    row = g.call("row", "unsqueeze.default", 1, 16, self=rows, dim=0)
    found = g.call("found", "embedding.default", 1, 16, 4, weight=g.leaf("w", 40, 4, op="param"), indices=row)
    read = g.call("read", "slice.Tensor", 16, 4, self=g.leaf("t", 30, 4, op="buffer"), dim=0, start=0, end=16, step=1)
    both = g.call("both", "add.Tensor", 8, 16, 4, self=x, other=found, alpha=1)
    g.call("y", "add.Tensor", 8, 16, 4, self=both, other=read, alpha=1)
    graph = Graph(tuple(g.nodes), (Ref("y"),))
    bounds = follow(graph, rules_of(graph), True, True).bounds
    sequence = sequence_of(16)
    assert set(bounds) == {
        (sequence, 40, "aten.embedding.default in found"),
        (sequence, 30, "aten.slice.Tensor in read"),
    }


def test_halves_grow_half_as_fast():
    g = Build()
    x = g.leaf("x", 6, 10)
    two = (TensorType((6, 5), "float32"),) * 2
    g.nodes.append(Node("half", "aten.chunk.default", (("self", x), ("chunks", 2), ("dim", 1)), two))
    g.call("sum", "add.Tensor", 6, 5, self=Ref("half", 0), other=Ref("half", 1), alpha=1)
    assert at_sizes(g.follow()["sum"][1], 6, 40) == 20


def test_one_of_the_two_sizes_may_stay():
    g = Build()
    g.call("y", "relu.default", 6, 10, self=g.leaf("x", 6, 10))
    assert g.follow(sequence=False)["y"] == [BATCH, 10]
    assert g.follow(batch=False)["y"] == [6, LENGTH]


def refused(g: Build, words: str) -> None:
    with pytest.raises(NotFollowed, match=words):
        g.follow()


def test_a_size_that_meets_a_parameter_is_refused():
    g = Build()
    weight = g.leaf("positions", 10, 4, op="param")
    g.call("sum", "add.Tensor", 6, 10, 4, self=g.leaf("x", 6, 10, 4), other=weight, alpha=1)
    refused(
        g, r"aten\.add\.Tensor in sum, .*(fixed size 10 .*meets|meets the fixed size 10) .*sequence dim 1: leave out"
    )


def test_a_split_that_cannot_be_told_is_refused():
    g = Build()
    g.call("windows", "view.default", 6, 2, 5, 4, self=g.leaf("x", 6, 10, 4), size=(6, 2, 5, 4))
    refused(g, r"windows, the sequence, 10 as planned, is split into 2 and 5")


def test_an_argument_that_meets_nothing_is_refused_if_it_may_move():
    g = Build()
    g.leaf("x", 6, 10)
    g.call("mask", "ones.default", 10, 7, size=(10, 7))
    refused(g, r"mask, its argument 10 may be the sequence length or a constant")
    g.nodes[-1] = Node("mask", "aten.ones.default", (), (TensorType((9, 7), "float32"),))
    assert g.follow()["mask"] == [9, 7]


def test_operators_that_make_sizes_of_their_own_are_refused():
    g = Build()
    g.call("strange", "strange.default", 6, 10, self=g.leaf("x", 6, 10))
    refused(g, r"strange, it makes a size of its own \(6 as planned\)")


@pytest.mark.parametrize(
    "op, shape, args",
    [
        ("select.int", (6,), {"dim": 1, "index": 3}),
        ("slice.Tensor", (6, 1), {"dim": 1, "start": 3, "end": 4, "step": 1}),
        ("unbind.int", (6,), {"dim": -1}),
        ("split.Tensor", (6, 5), {"split_size": 5, "dim": 1}),
    ],
)
def test_a_dim_that_is_taken_apart_is_refused(op, shape, args):
    g = Build()
    g.call("piece", op, *shape, self=g.leaf("x", 6, 10), **args)
    refused(g, r"piece, the sequence is taken apart")


def test_both_of_two_positions_are_all_of_them():
    g = Build()
    x = g.leaf("x", 6, 2)
    g.call("first", "select.int", 6, self=x, dim=1, index=0)
    assert g.follow()["first"] == [BATCH]
    g.call("last", "select.int", 6, self=x, dim=1, index=-1)
    refused(g, r"last, the sequence is taken apart")


@pytest.mark.parametrize(
    "op, size, args",
    [
        ("slice.Tensor", 5, {"dim": 1, "start": 5, "end": None, "step": 1}),
        ("slice.Tensor", 5, {"dim": 1, "start": 0, "end": -5, "step": 1}),
        ("slice.Tensor", 5, {"dim": 1, "start": 0, "end": 5, "step": 1}),
        ("constant_pad_nd.default", 16, {"pad": (0, 6), "value": 0}),
    ],
)
def test_counts_that_may_move_are_refused(op, size, args):
    g = Build()
    g.call("part", op, 6, size, self=g.leaf("x", 6, 10), **args)
    refused(g, r"part, (it makes a size of its own|\d may be a constant or come from the size)")


def test_inputs_must_agree():
    g = Build()
    g.leaf("x", 6, 10)
    g.leaf("y", 6, 12)
    refused(g, r"dim 1 of the inputs has several sizes \(10 in 'x', 12 in 'y'\)")
    one = Build()
    one.leaf("x", 1, 10)
    refused(one, "no input has a dim 0 of more than one element")


# ---- plans at other sizes --------------------------------------------------------------------------------------------

PINS: list[dict[str, Any]] = [
    {},
    {"data": 4},
    {"tensor": 4},
    {"data": 2, "tensor": 2, "recompute": "selective"},
    {"data": 4, "zero": 3, "recompute": "full"},
]


def mlp_plan(batch: int = 512, pin: dict[str, Any] | None = None, memory: str = "1 GiB") -> Plan:
    return _planned(batch, tuple((pin or {}).items()), memory)


@cache
def _planned(batch: int, pin: tuple[tuple[str, Any], ...], memory: str) -> Plan:
    return plan_of(residual_mlp(batch=batch), cluster(4, memory), dict(pin))


MICRO_BATCHED_PLANS: list[dict[str, Any]] = [
    {"micro_batches": 4, "data": 2, "tensor": 2},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "recompute": "full"},
    {"pipeline": 4, "micro_batches": 4, "schedule": "gpipe"},
]


@pytest.mark.parametrize("pin", PINS + MICRO_BATCHED_PLANS, ids=str)
def test_as_planned_is_what_was_planned(pin):
    plan = mlp_plan(pin=pin)
    for again in (plan.at(), plan.at(batch=512)):
        assert again.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-12)
        assert again.peak_bytes == plan.predicted.peak_bytes
        assert again.memory_bytes == plan.predicted.memory_bytes
        assert again.collectives == plan.predicted.collectives
        assert (
            again.exchanges == plan.predicted.exchanges and again.micro_batch_times == plan.predicted.micro_batch_times
        )


@pytest.mark.parametrize("pin", PINS[1:] + MICRO_BATCHED_PLANS, ids=str)
def test_another_batch_costs_what_the_same_recipe_costs_there(pin):
    """Under a pin that decides everything, planning for the other batch takes the same decisions."""
    small, large = mlp_plan(64, pin), mlp_plan(512, pin)
    there = small.at(batch=512)
    same = [b.ops for b in small.blocks] == [b.ops for b in large.blocks] and small.pipeline == large.pipeline
    if same and small.parameters == large.parameters:
        assert there.step_time_s == pytest.approx(large.predicted.step_time_s, rel=1e-12)
        assert there.peak_bytes == large.predicted.peak_bytes
    else:
        assert there.step_time_s >= large.predicted.step_time_s * (1 - 1e-9)


def at(formula: Any, sizes: dict[Any, int]) -> Any:
    """What a formula comes to. All sizes at once: one after the other, sympy compares what is left in symbols."""
    return sympy.sympify(formula).xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})


@pytest.mark.parametrize("pin", PINS, ids=str)
@pytest.mark.parametrize("batch", [64, 512, 1024, 100_000])
def test_formulas_are_what_is_predicted(pin, batch):
    plan = mlp_plan(pin=pin)
    found, there = plan.formulas, plan.at(batch=batch)
    sizes = {found.batch: batch}
    assert found.planned == {found.batch: 512}
    assert at(found.peak_bytes, sizes) == there.peak_bytes
    assert float(at(found.step_time_s, sizes)) == pytest.approx(there.step_time_s, rel=1e-9)
    for use, seconds in there.time_s.items():
        assert float(at(getattr(found, f"{use}_s"), sizes)) == pytest.approx(seconds, rel=1e-9, abs=1e-15)
    calls = Counter[object]()  # calls that grow differently may have one size here
    for kind, axis, phase, size, times in found.collectives:
        calls[kind, axis, phase, at(size, sizes)] += times
    assert calls == {(c.kind, c.axis, c.phase, c.bytes_in): times for c, times in there.collectives}


SCHEDULES: list[dict[str, Any]] = [
    {"pipeline": 2, "micro_batches": 8, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    {"pipeline": 4, "micro_batches": 16, "schedule": "zero_bubble"},
    {"pipeline": 2, "micro_batches": 4, "schedule": "2bw"},
    {"pipeline": 2, "micro_batches": 64},
]


@pytest.mark.parametrize("pin", MICRO_BATCHED_PLANS + SCHEDULES, ids=str)
def test_formulas_of_a_step_micro_batched(pin):
    plan = mlp_plan(pin=pin)
    found = plan.formulas
    as_planned = {found.micro_batches: pin["micro_batches"]}
    for batch in (512, 1024, 100 * 512):
        sizes, there = {found.batch: batch, **as_planned}, plan.at(batch=batch)
        agree(found, sizes, there, plan.predicted)
        # The path that is longest as planned is never longer than the longest.
        step_s = float(at(found.step_time_s, sizes))
        assert step_s <= there.step_time_s * (1 + 1e-9)
        assert step_s >= there.step_time_s * (1 - (1e-9 if batch == 512 else 0.01))
    as_planned[found.batch] = 512
    assert (at(found.bubble_s, as_planned) > 0) == ("pipeline" in plan.sizes)


IN_EACH: list[dict[str, Any]] = [
    {"micro_batches": 8, "data": 4, "zero": 3},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "zero": 3, "schedule": "zero_bubble", "recompute": "full"},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "schedule": "dualpipev", "recompute": "full"},
]


def there_planned(plan: Plan, pin: dict[str, Any], count: int, batch: int = 512) -> Prediction:
    """The decisions of a plan, in the space of so many micro-batches."""
    graph, pins = residual_mlp(batch=batch), Pins.parse({**pin, "micro_batches": count})
    facts, stages = model_facts(graph, "ResidualMLP"), 1 if plan.pipeline is None else plan.pipeline.ranks
    renamed, mesh = replace(plan, model=facts, decided=None), plan.mesh.micro_batched(count)
    space = pinned_space(graph, refold(renamed, graph, facts), mesh, plan.cluster, pins, plan.training, stages)
    assignment = restore(renamed, space, facts)
    staged = restage(plan, assignment)
    assert staged is not None
    return predict_micro_batched(assignment, staged)


@pytest.mark.parametrize("pin", MICRO_BATCHED_PLANS + SCHEDULES + IN_EACH, ids=str)
def test_another_number_of_micro_batches_costs_what_it_costs_there(pin):
    """To the last bit: seconds, bytes, what is alive, calls and exchanges."""
    plan = mlp_plan(pin=pin)
    for count in (4, 16, 32):
        assert plan.at(micro_batches=count) == there_planned(plan, pin, count)
    assert plan.at(micro_batches=16, batch=1024) == there_planned(plan, pin, 16, 1024)


@pytest.mark.parametrize("pin", MICRO_BATCHED_PLANS + SCHEDULES + IN_EACH, ids=str)
def test_formulas_in_micro_batches(pin):
    """As planned in size, every count that the formulas are said to hold for is what planning there predicts."""
    plan = mlp_plan(pin=pin)
    found, size = plan.formulas, 512 // pin["micro_batches"]
    assert found.planned == {found.batch: 512, found.micro_batches: pin["micro_batches"]}
    assert found.valid_micro_batches is not None and pin["micro_batches"] in found.valid_micro_batches
    counts = [count for count in range(2, 25) if count in found.valid_micro_batches]
    assert len(counts) >= 8 and found.valid_micro_batches.most is None
    for count in counts[:3] + counts[-1:]:
        sizes = {found.batch: size * count, found.micro_batches: count}
        there = plan.at(batch=size * count, micro_batches=count)
        agree(found, sizes, there, plan.predicted)
        assert float(at(found.step_time_s, sizes)) == pytest.approx(there.step_time_s, rel=1e-9)
        assert float(at(found.bubble_s, sizes)) == pytest.approx(there.time_s["bubble"], rel=1e-9, abs=1e-12)
    fewer = next(count for count in (4, 8) if count in found.valid_micro_batches)
    for count in (fewer, 32):  # of another size: bytes as there, seconds no more than there
        sizes, there = {found.batch: 512, found.micro_batches: count}, plan.at(micro_batches=count)
        agree(found, sizes, there, plan.predicted)
        step_s = float(at(found.step_time_s, sizes))
        assert there.step_time_s * 0.99 <= step_s <= there.step_time_s * (1 + 1e-9)


def agree(found: Formulas, sizes: dict[Any, int], there: Prediction, planned: Prediction) -> None:
    """Bytes, by use where what was planned as the peak still is, calls, and seconds by use."""
    assert at(found.peak_bytes, sizes) == there.peak_bytes
    both = (planned.fullest_at, there.fullest_at)
    if len({(at.partition(", with")[0], at.partition(" rank ")[2]) for at in both}) == 1:
        for use in ("parameters", "gradients", "optimizer", "gathered"):
            assert getattr(found, f"{use}_bytes") == there.memory_bytes[use]
        assert at(found.saved_bytes, sizes) == there.memory_bytes["activations"]
    for use in ("compute", "recompute", "communication", "gradients", "optimizer"):
        seconds = float(at(getattr(found, f"{use}_s"), sizes))
        assert seconds == pytest.approx(there.time_s[use], rel=1e-9, abs=1e-15)
    calls = Counter[object]()
    for kind, axis, phase, size, times in found.collectives:
        calls[kind, axis, phase, at(size, sizes)] += at(times, sizes)
    assert calls == {(c.kind, c.axis, c.phase, c.bytes_in): times for c, times in there.collectives}


def test_micro_batches_that_formulas_do_not_hold_for():
    found = mlp_plan(pin={"pipeline": 4, "micro_batches": 16, "schedule": "zero_bubble"}).formulas
    assert str(found.valid_micro_batches) == "6, 7, ..."
    found.check(100)
    with pytest.raises(PlanError, match=r"hold for 6, 7, \.\.\. micro-batches, and not for 2: .* simulates it"):
        found.check(2)
    for pin, why in (
        ({"pipeline": 4, "micro_batches": 1}, "of one micro-batch a step is another program"),
        ({"pipeline": 2, "micro_batches": 5, "schedule": "interleaved_1f1b"}, "does not grow evenly"),
    ):
        plan = plan_of(residual_mlp(batch=320), cluster(4), pin)
        assert plan.formulas.valid_micro_batches is None and why in plan.formulas.left_out
        assert plan.formulas.micro_batches not in plan.formulas.step_time_s.free_symbols
        with pytest.raises(PlanError, match=f"for the planned micro-batches alone: .*{why}"):
            plan.formulas.check(8)


@pytest.mark.parametrize(
    "pin, count, why",
    [
        (
            {"micro_batches": 4, "data": 2, "tensor": 2},
            3,
            r"at 3 micro-batches, a dim is 512, which 6 parts \(micro-batches x ranks of the data axis\)",
        ),
        ({"micro_batches": 4, "data": 2, "tensor": 2}, 1, "4 micro-batches, and of 1 it would be another program"),
        ({"data": 4}, 2, "1 micro-batch, and of 2 it would be another program, .* pin 'micro_batches' 2"),
        (
            {"pipeline": 4, "micro_batches": 16, "schedule": "2bw"},
            2,
            "2bw needs at least as many micro-batches",
        ),
        ({"micro_batches": 4, "data": 2, "tensor": 2}, True, "micro_batches is True: give a whole number from 1"),
    ],
    ids=str,
)
def test_wrong_micro_batches(pin, count, why):
    with pytest.raises(PlanError, match=why):
        mlp_plan(pin=pin).at(micro_batches=count)


def test_formulas_of_micro_batches_worked_out_by_hand():
    """Micro-batches of one rank: it does what it did with the whole batch, and waits for nobody."""
    alone = {"micro_batches": 8}
    whole, micro_batches = (
        plan_of(residual_mlp(), cluster(1)).formulas,
        plan_of(residual_mlp(), cluster(1), alone).formulas,
    )
    assert sympy.expand(whole.flops - micro_batches.flops) == 0
    assert micro_batches.bubble_s == 0
    m, b = micro_batches.micro_batches, micro_batches.batch
    # The inputs of all, what one micro-batch saved before the head, which runs its backward by then, and the loss of
    # each.
    assert micro_batches.saved_bytes == 1024 * b + 15360 * b / m + 4 * m
    assert micro_batches.parameters_bytes == whole.parameters_bytes


def test_formulas_worked_out_by_hand():
    """One linear 256 x 64 after three blocks 256 -> 1024 -> 256 after one 256 x 256, batch halved over two ranks."""
    weights = 256 * 256 + 3 * 2 * 256 * 1024 + 256 * 64
    parameters = weights + 256 + 3 * (1024 + 256) + 64
    found = plan_of(residual_mlp(), cluster(2), {"data": 2, "zero": 0}).formulas
    b = found.batch
    assert found.parameters_bytes == found.gradients_bytes == 4 * parameters
    assert found.optimizer_bytes == 8 * parameters
    assert sympy.expand(found.flops - 6 * weights * b / 2) == 0
    # Kept: the input, the stem's result, in each block relu's and the sum, half of the rows.
    assert sympy.expand(found.saved_bytes - 4 * b / 2 * (256 + 256 + 3 * (1024 + 256))) == 0
    assert not found.step_time_s.has(found.sequence) and "meets the sequence" in found.left_out


def test_formulas_in_a_notebook():
    found = plan_of(residual_mlp(), cluster(2), {"data": 2, "zero": 0}).formulas
    text = found._repr_latex_()
    assert text.startswith("$$\n\\begin{aligned}") and text.endswith("\\end{aligned}\n$$")
    assert r"\text{all-reduce, data, backward}" in text and sympy.latex(found.saved_bytes) in text
    lines = dict(line.split("  ", 1) for line in str(found).splitlines())
    assert lines["activations"].strip() == str(found.saved_bytes)
    each = mlp_plan(pin={"micro_batches": 8, "data": 4, "zero": 3}).formulas
    assert any(line.split("  ")[-1].startswith("m * (") for line in str(each).splitlines())
    assert r"m \times \left(" in each.latex()
    assert lines["flops"].strip() == str(found.flops)
    assert any(line.startswith("all-reduce, data, backward  ") for line in repr(found).splitlines())


# ---- the largest that fits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", PINS + MICRO_BATCHED_PLANS, ids=str)
def test_the_largest_batch_is_the_last_that_fits(pin):
    plan = mlp_plan(pin=pin, memory="48 MiB")
    limit, found = plan.cluster.device.usable_bytes, plan.max_batch()
    peaks = {batch: tried(plan, batch) for batch in range(found, found + 17)}
    above = [peak for batch, peak in peaks.items() if batch > found and peak is not None]
    assert peaks[found] is not None and peaks[found] <= limit
    assert above and min(above) > limit


def tried(plan: Plan, batch: int) -> int | None:
    """The peak; ``None`` where the plan does not divide the batch."""
    try:
        return plan.at(batch=batch).peak_bytes
    except PlanError:
        return None


def test_more_memory_holds_a_larger_batch():
    found = [mlp_plan(pin={"data": 4}, memory=f"{size} MiB").max_batch() for size in (48, 64, 96)]
    assert found == sorted(set(found)) and all(batch % 4 == 0 for batch in found)


def test_no_batch_fits():
    plan = mlp_plan(pin={"data": 4, "zero": 0})
    little = replace(plan, cluster=cluster(4, "1 MiB"), decided=plan.assignment)
    with pytest.raises(
        PlanError,
        match=r"no batch fits: the smallest .* 4, takes [\d,]+ bytes \(.*, .* has 943,718 bytes \(921.6 KiB\) to give",
    ):
        little.max_batch()


# ---- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -8, 2.5, "8", True])
def test_wrong_sizes(wrong):
    plan = mlp_plan(pin={"data": 4})
    with pytest.raises(PlanError, match=r"batch is .*: give a whole number from 1"):
        plan.at(batch=wrong)
    with pytest.raises(PlanError, match=r"sequence is .*: give a whole number from 1"):
        plan.max_batch(sequence=wrong)


def test_a_batch_that_does_not_divide():
    with pytest.raises(PlanError, match=r"at batch 6, batch is 6, which 4 ranks of the data axis, in .* do not divide"):
        mlp_plan(pin={"data": 4}).at(batch=6)


def test_a_batch_of_which_no_micro_batches_can_be_cut():
    plan = mlp_plan(pin={"pipeline": 4, "micro_batches": 4, "schedule": "gpipe"})
    with pytest.raises(PlanError, match=r"at batch 6, batch is 6, which 4 micro-batches, in .* do not divide"):
        plan.at(batch=6)


def test_a_model_without_a_sequence():
    plan = mlp_plan(pin={"data": 4})
    for ask in (lambda: plan.at(sequence=64), plan.max_sequence):
        with pytest.raises(PlanError, match=r"another sequence length: at aten\.linear\.default in stem"):
            ask()


def test_a_plan_from_a_file_has_no_model(tmp_path):
    path = tmp_path / "plan.json"
    plan_of(residual_mlp()).save(path)
    plan = Plan.load(path)
    for ask in (lambda: plan.at(batch=64), plan.max_batch, plan.max_sequence, lambda: plan.formulas):
        with pytest.raises(PlanError, match=r"autopar\.evaluate\(model, plan, example_kwargs=batch\)"):
            ask()
