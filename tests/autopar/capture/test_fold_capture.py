"""Fold before capture: what is traced once, what must not be, and that nothing downstream can tell."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.capture import Captured, capture
from autopar.capture.lowering import lower
from autopar.capture.repeats.candidates import nominate
from autopar.driver.plan import plan_traced
from autopar.driver.trace import Traced, trace
from autopar.graph.module_walk import ModuleWalk
from autopar.verification.reference import reference
from autopar.verification.verify import RTOL, simulate, space_on
from planner.base.errors import CaptureError, InputError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.layout import Mesh
from planner.solve.choices import solve
from tests.autopar.capture.test_fold_forwards import Layer, Stack, Tied, X, copies
from tests.autopar.models import MODELS, llama, text

CLUSTER = ClusterSpec.local(2)


def unnumbered(graph: torch.fx.Graph) -> str:
    """The graph as text; the operator of a Function has another number in every capture."""
    return re.sub(r"(\bautopar_function\.\w+?__)\d+\b", r"\1", str(graph))


def same_graphs(folded: Captured, whole: Captured) -> None:
    """Names and all."""
    assert lower(folded) == lower(whole)
    assert len(whole.program.calls) == 1
    assert unnumbered(folded.graph) == unnumbered(whole.graph)


# ---- the zoo ---------------------------------------------------------------------------------------------------------


FOLDED = [name for name in MODELS if name not in ("qwen2-moe", "qwen3-moe", "gpt-oss")]
"""The models whose layers repeat in ways of their own: those left out repeat as Mixtral's do."""


@pytest.mark.parametrize("name", FOLDED)
def test_graphs_and_plans_are_the_same_on_every_model_of_the_zoo(name: str) -> None:
    model, batch = MODELS[name].build()
    folded, whole = (trace(model, None, batch, fold=fold) for fold in ("capture", "off"))  # type: ignore[arg-type]
    same_graphs(folded.captured, whole.captured)

    def planned(traced: Traced, fold: str) -> autopar.Plan:
        return plan_traced(traced, CLUSTER, Pins.parse({"data": 2}), Training(), fold=fold)  # type: ignore[arg-type]

    plan, unfolded = planned(folded, "capture"), planned(whole, "off")
    assert unfolded.model["fingerprint"] == plan.model["fingerprint"]
    # Decided node by node, equally fast plans may differ in what they hold.
    assert unfolded.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    if name in ("gpt2", "resnet"):  # of the others the graphs are equal, as was said
        again = planned(whole, "graph")
        assert again.digest() == plan.digest()
        assert again.predicted == plan.predicted


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_transformers_layers_are_traced_once(name: str) -> None:
    model, batch = MODELS[name].build()
    assert copies(capture(model, None, batch, fold=True)) == 1


def test_depth_changes_nothing_but_counts() -> None:
    shallow, deep = (capture(llama(num_hidden_layers=n), None, text(), fold=True) for n in (3, 7))
    assert (copies(shallow), copies(deep)) == (2, 6)
    assert len({c.body for c in shallow.program.calls}) == len({c.body for c in deep.program.calls})
    model = llama(num_hidden_layers=5)
    same_graphs(*(capture(model, None, text(), fold=fold) for fold in (True, False)))


def test_what_is_folded_computes_what_the_model_computes() -> None:
    """Numerically, on every rank of a mesh, with the program that was captured in copies."""
    for model, batch in ((llama(num_hidden_layers=3), text()), (Loss([Layer() for _ in range(4)]), {"x": X})):
        ref = reference(model, None, batch)
        assert copies(ref.traced.captured) == 2
        pins = Pins.parse({"data": 2, "tensor": 2})
        space = space_on(ref.traced, Mesh.of(data=2, tensor=2), ClusterSpec.local(4), pins)
        agreement = simulate(ref, assignment_of(space, solve(space.problem(None), time_limit_s=5.0).choices))
        assert agreement.worst[0] <= RTOL
        assert not agreement.miscounted


def test_a_plan_made_with_one_fold_applies_with_another() -> None:
    model, batch = llama(num_hidden_layers=3), text()
    made = autopar.plan(model, CLUSTER, example_kwargs=batch, fold="graph")
    from autopar.driver.plan import assign

    for fold in ("capture", "graph"):
        assignment = assign(trace(model, None, batch, fold=fold), autopar.Plan.from_dict(made.to_dict()))  # type: ignore[arg-type]
        assert len(assignment.space.folded.kinds) == len(made.blocks)


def test_another_fold_is_refused() -> None:
    with pytest.raises(InputError, match=r"fold is 'layers'; it is 'capture' .* 'graph' .* 'off'"):
        autopar.plan(Layer(), CLUSTER, example_args=(X,), fold="layers")  # type: ignore[arg-type]


# ---- nominating, and what is refused ---------------------------------------------------------------------------------


class Loss(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def test_autocast_inside_a_layer_names_module_and_line() -> None:
    class Mixed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    with pytest.raises(CaptureError, match=r"module layers\.0 \(Mixed, .*test_fold_capture\.py:\d+\).*enabled=False"):
        capture(Stack([Mixed() for _ in range(2)]), (X,), fold=True)


def test_branches_on_values_are_refused_with_the_models_own_line() -> None:
    class Branches(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else super().forward(x)

    with pytest.raises(CaptureError, match=r"(?s)test_fold_capture\.py.*return x if x\.sum\(\) > 0"):
        capture(Stack([Branches() for _ in range(3)]), (X,), fold=True)


def test_only_equal_and_outermost_submodules_are_nominated() -> None:
    towers = nn.ModuleList([Stack([Layer(), Layer()]), Stack([Layer(), Layer(), Layer()])])
    (group,) = nominate(ModuleWalk(towers))
    assert [s.path for s in group] == ["0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1", "1.layers.2"]
    assert not nominate(ModuleWalk(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    assert not nominate(ModuleWalk(Stack([Tied(False), Tied(True)])))
    pair = nn.ModuleList([Stack([Layer(), Layer()]), Stack([Layer(), Layer()])])
    assert [[s.path for s in group] for group in nominate(ModuleWalk(pair))] == [["0", "1"]]
