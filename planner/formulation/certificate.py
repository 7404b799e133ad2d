"""Prices the plan's decisions again on the unfolded graph, as a check of the folded objective.

Folding decides once for equal blocks and multiplies. Here nothing is folded: every operator, leaf and value of the
graph is a decision of its own that is taken as the plan takes it, and every edge between two of them is priced. Both
prices are :func:`planner.solve.problem.evaluate`'s, of two different problems; a fold that counted wrongly shows as a
difference.

What the search adds up is not all of a step with several pipeline stages, or with model data on the host: such a
certificate says what it is of, and what it leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from planner.base.cpython import no_garbage
from planner.formulation.assignment import Assignment
from planner.formulation.choices import Choices, Options
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import Recompute, unfolded
from planner.formulation.resharding import ReshardingTable
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice
from planner.formulation.variables import Variable
from planner.ir.folding import relabel
from planner.ir.graph import Ref
from planner.solve.problem import Evaluation, Ints, evaluate

ROUNDING = 1e-9
"""Relative difference that adding in another order may make."""


@dataclass(frozen=True)
class Certificate:
    """What a plan's step costs by two ways of counting, and what the search proved about it.

    Attributes:
        objective_s, peak_bytes: on the folded problem; bytes are those of all stages of a pipeline together.
        unfolded_s, unfolded_bytes: of the same decisions on the unfolded graph.
        decisions, edges: how many of each were priced there.
        bound_s: no plan is faster, as the search proved.
        of: what was priced, where that is not a whole step; else empty.
        without: what a step takes beside that, which was simulated and not priced here.
        step_s: of the whole step as predicted, which the bound is of; 0 where the objective is all of it.
    """

    objective_s: float
    peak_bytes: int
    unfolded_s: float
    unfolded_bytes: int
    decisions: int
    edges: int
    bound_s: float
    of: str = ""
    without: str = ""
    step_s: float = 0.0

    @property
    def difference_s(self) -> float:
        """What folding miscounts, in seconds: 0, but for rounding."""
        return self.objective_s - self.unfolded_s

    @property
    def difference_bytes(self) -> int:
        """What folding miscounts at the peak: 0."""
        return self.peak_bytes - self.unfolded_bytes

    @property
    def holds(self) -> bool:
        """Whether both ways of counting agree, to rounding, and the bound is not above the step that it is of.

        That no other plan is below the bound, the search proves: no other plan is priced here.
        """
        rounding = ROUNDING * max(self.objective_s, self.unfolded_s)
        exact = abs(self.difference_s) <= rounding and self.difference_bytes == 0
        return exact and self.bound_s <= max(self.objective_s, self.step_s) + rounding

    def __str__(self) -> str:
        verdict = "certified" if self.holds else "NOT CERTIFIED"
        off_s = 0.0 if abs(self.difference_s) <= ROUNDING * self.objective_s else self.difference_s
        of = f", of {self.of}" if self.of else ""
        rest = f"not of {self.without}, with which a step takes {self.step_s:.9g} s; " if self.without else ""
        return (
            f"{verdict}{of}: folded {self.objective_s:.9g} s, unfolded {self.unfolded_s:.9g} s over {self.decisions:,} "
            f"decisions and {self.edges:,} edges, differing by {off_s:.3g} s and {self.difference_bytes:,} bytes; "
            f"{rest}no plan that fits is below {self.bound_s:.9g} s"
        )


@no_garbage()
def certify(assignment: Assignment, bound_s: float) -> Certificate:
    """Price an assignment folded and unfolded.

    Args:
        bound_s: the proven lower bound on any plan's step time.
    """
    space = assignment.space
    folded, _, _ = _price(assignment, space.decision_graph, assignment.recompute)
    points = space.variables.reshard_points.values()
    alike = ((space.members[space.variable_of[ref.node]], ref.index) for ref in points)
    shared = frozenset(Ref(name, index) for names, index in alike for name in names)
    instances = relabel(space.folded, range(len(space.folded.instances)))
    recompute = unfolded(assignment.recompute, space.decision_graph.blocks.numbers)
    apart, decisions, edges = _price(assignment, DecisionGraph(instances, space.rules, shared), recompute)
    return Certificate(folded.time_s, folded.peak_bytes, apart.time_s, apart.peak_bytes, decisions, edges, bound_s)


def of_part(certificate: Certificate, assignment: Assignment, step_s: float, again: int = 0) -> Certificate:
    """A certificate that says what of a micro-batched step, or with model data elsewhere than on the device, it is of.

    Args:
        step_s: of the whole step as predicted.
        again: of how many blocks the cut says that they make something again.
    """
    space, of, without = assignment.space, list[str](), list[str]()
    if space.stages > 1:
        filling = ", with the least that it waits for the pipeline to fill and to empty" * bool(space.pace.waits)
        of.append(f"the average of {space.stages} ranks{filling}")
        without.append("the schedule with its bubble, and what the slowest rank takes more")
    decided = (levels for kind in range(len(space.folded.kinds)) for levels in assignment.recompute.levels(kind))
    if again != sum(len(numbers) for _, numbers in decided):
        of += [] if of else ["a step that makes nothing again"]
        without.append("what the cut recomputes")
    if space.training.tier != "device":
        of.append("a step in which nothing stays on the device and nothing moves beside computing")
        without.append("what stays, and what moves beside computing")
    return replace(certificate, of=", and of ".join(of), without="; ".join(without), step_s=step_s)


def _price(assignment: Assignment, decision_graph: DecisionGraph, recompute: Recompute) -> tuple[Evaluation, int, int]:
    """What the decisions cost on a decision graph of their graph; how many decisions and edges it has."""
    problem = _Together(assignment, decision_graph).problem(None, recompute)
    choices = (0,) * len(problem.vertices)
    return evaluate(problem, choices), len(problem.vertices), len(problem.edges)


class Decided(Space):
    """A space in which every variable has one option: what an assignment decides for the variable's first member."""

    def __init__(self, assignment: Assignment, decision_graph: DecisionGraph):
        space = assignment.space
        super().__init__(
            decision_graph.folded,
            space.mesh,
            space.cost,
            space.training,
            space.rules,
            decision_graph=decision_graph,
            pace=space.pace,
        )
        self._assignment = assignment
        self._known.computed = space._known.computed

    @cached_property
    def options(self) -> dict[Variable, Options]:
        chosen, space = self._assignment.chosen, self._assignment.space
        found: dict[Variable, Options] = {}
        # Roles that are decided together share a list, so that what their operators cost by themselves is found once.
        lists: dict[Variable, Options] = {
            variable: Choices.only(decision) if isinstance(decision, Choice) else [decision]
            for variable, decision in chosen.items()
        }
        for variable, names in self.members.items():
            found[variable] = lists[space.variable_of[names[0]]]
        for point, ref in self.decision_graph.variables.reshard_points.items():
            found[point] = [self._assignment.consumer_layout(ref)]
        for position in range(len(self.leaving)):
            found["output", position] = [self._assignment.output_layout(position)]
        return found

    def table(self, ref: Ref) -> ReshardingTable:
        return self._assignment.space.table(ref)


class _Together(Decided):
    """The same with what all stages hold, since rounding the average rank's share of each decision is no miscount."""

    def on_average(self, held: Ints) -> Ints:
        return held
