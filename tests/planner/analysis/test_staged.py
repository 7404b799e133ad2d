"""Stages and micro-batches of an assignment: what the chain adds up to, and bounds that hold for every pipeline."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest

from planner.analysis.pipeline import staged
from planner.analysis.pipeline.chain import links_of
from planner.analysis.pipeline.leaf_memory import Leaves
from planner.analysis.pipeline.peak_report import peak_micro_batched
from planner.analysis.pipeline.staged import stage
from planner.cost.model import CostModel
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.certificate import Decided
from planner.formulation.constraints.pins import Pins
from planner.formulation.pipeline_pace import PipelinePace, pace_of, pack
from planner.formulation.remat.levels import COMPUTED, LEVELS, NOTHING, Level, pareto_frontier
from planner.formulation.resharding import local_bytes
from planner.formulation.resharding_tables import BUCKET_BYTES
from planner.formulation.search_space import Space
from planner.formulation.stage_costs import StageCosts
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.formulation.unsharding import Gathers, Unsharding
from planner.ir.folding import Folded, fold
from planner.ir.graph import Graph, Ref
from planner.ir.layout import MICRO, Mesh
from planner.ops.sharding_rule import Rule
from planner.search.parallel_config import pipelines_of
from planner.search.pipeline_bounds import PipelineBounds, least_send_s
from planner.search.remat_selection import with_levels_between
from planner.solve.choices import lower_bounds
from planner.solve.pipeline.master import Paths
from planner.solve.pipeline.stages import Pipeline
from planner.solve.problem import evaluate
from tests.planner.plans import Build, cluster, filtered, named, residual_mlp
from tests.planner.search.test_optimum import random_cluster
from tests.planner.search.test_search import chain


@functools.cache
def model(which: str) -> tuple[Graph, Folded, dict[str, Rule]]:
    graphs = {"residual": residual_mlp(layers=4, batch=16), "chain": chain(layers=5, batch=16), "tapped": tapped()}
    graphs["tied"] = tied()
    graphs["deep"] = residual_mlp(layers=30, batch=4096)
    graph = graphs[which]
    return graph, fold(graph), rules_of(graph)


def tapped() -> Graph:
    """A model that also returns what its second layer makes."""
    graph = residual_mlp(layers=4, batch=16)
    return Graph(graph.nodes, (*graph.outputs, Ref("add1")))


def tied() -> Graph:
    """Layers in a row, the last of which has the weight of the first."""
    b = Build()
    value, weight = b.leaf("x", 64, 64), b.leaf("w", 64, 64, op="param")
    tie = {"weight": weight, "bias": None}
    value = b.call("first", "linear.default", 64, 64, path="first", input=value, **tie)
    for number in range(4):
        value = b.relu(f"relu{number}", b.linear(f"linear{number}", value, 64, f"layers.{number}"), f"layers.{number}")
    return b.mean(b.call("last", "linear.default", 64, 64, path="last", input=value, **tie))


def wide_first(width: int, layers: int) -> Graph:
    """Linear layers alone, the first of a wider input: what is resharded between two is between one variable and
    itself.
    """
    build = Build()
    value = build.leaf("x", 256, width)
    for number in range(layers + 1):
        value = build.linear(f"linear{number}", value, 64, f"layers.{number}")
    return build.mean(value)


def space_of(  # type: ignore[no-untyped-def]
    which: str | Graph,
    spec,
    stages: int,
    micro_batches: int,
    schedule: str | None = None,
    gathers: Gathers = "once",
    **sizes: int,
) -> Space:
    graph, folded, rules = model(which) if isinstance(which, str) else (which, fold(which), rules_of(which))
    mesh = Mesh.of(**sizes).micro_batched(micro_batches)
    kept = filtered(Pins(), graph, rules, mesh)
    pace = pace_of(stages, micro_batches, schedule)
    return Space(folded, mesh, CostModel(spec), Training(unsharding=Unsharding.named(gathers)), rules, *kept, pace=pace)


def assignments(space: Space, rng: random.Random, count: int) -> list[tuple[tuple[int, ...], Assignment]]:
    """Random choices among those that some resharding connects."""
    problem, found = space.problem(None), []
    while len(found) < count:
        choices = [rng.randrange(vertex.choices) for vertex in problem.vertices]
        for _ in range(20):  # mend what cannot be connected
            broken = [e for e in problem.edges if math.isinf(e.time_s[choices[e.tail], choices[e.head]])]
            if not broken:
                break
            edge = rng.choice(broken)
            at = rng.choice((edge.tail, edge.head))
            choices[at] = rng.randrange(problem.vertices[at].choices)
        if evaluate(problem, tuple(choices)).feasible:
            found.append((tuple(choices), assignment_of(space, choices)))
    return found


@pytest.mark.parametrize("which", ["residual", "chain", "tapped"])
@pytest.mark.parametrize("micro_batches, gathers", [(1, "once"), (4, "once"), (4, "each")])
def test_the_chain_adds_up_to_the_problem(which: str, micro_batches: int, gathers: Gathers) -> None:
    """Over gloo nothing hides communication, so that seconds and bytes of one stage are sums over blocks."""
    rng = random.Random(f"{which} {micro_batches}")
    for _ in range(4):
        spec = random_cluster(rng, (4,)).model_copy(update={"backend": "gloo"})
        space = space_of(which, spec, 1, micro_batches, gathers=gathers, outer=2, inner=2)
        for _, assignment in assignments(space, rng, 4):
            links = links_of(assignment, named(space.folded, COMPUTED, ("none",)))
            for level in COMPUTED:
                step = pareto_frontier(space.folded, named(space.folded, (level,), ("none",)))[0]
                recompute = assignment.what_it_comes_to(step)
                problem = Decided(assignment, space.decision_graph).problem(None, recompute)
                whole = evaluate(problem, (0,) * len(problem.vertices))
                ways = [
                    link.levels.index(recompute.level(kind, nth))
                    for link, (kind, nth) in zip(links, space.decision_graph.blocks.numbers, strict=True)
                ]
                work_s = math.fsum(
                    block.forward_s + block.input_s + block.weight_s + block.savings[way].recompute_s
                    for block, way in ((link.block, way) for link, way in zip(links, ways, strict=True))
                )
                once_s = math.fsum(link.once_s for link in links)
                if micro_batches > 1 or level == "none":  # one micro-batch gathers parameters again, several do not
                    assert micro_batches * work_s + once_s == pytest.approx(whole.time_s, rel=1e-9)
                if (
                    level == "none" and space.unsharding.once_per_step
                ):  # else gradients are counted beside their buckets, too
                    blocks = [link.block for link in links]
                    held = sum(b.held_bytes + b.gradient_bytes + b.savings[0].saved_bytes for b in blocks)
                    held -= sum(space.own_bytes(node, assignment.choice(node)) for node in space.graph.operators)
                    more = sum(inputs_beside(assignment)) if micro_batches > 1 else 0
                    leaves = Leaves(assignment, 1)
                    more += sum(sum(leaves.outputs(number).values()) for number in range(len(links)))
                    assert whole.peak_bytes + more <= held  # which counts both where a copy in another layout is saved
                assert sum(sum(link.held.values()) for link in links) == sum(link.block.held_bytes for link in links)


def inputs_beside(assignment: Assignment) -> list[int]:
    """Bytes of the inputs that a problem leaves out: all micro-batches are there, less one and what is saved of one."""
    space, found = assignment.space, []
    for leaf in (node for node in space.graph.leaves if node.op == "input"):
        size = local_bytes(leaf.results[0], assignment.produced(Ref(leaf.name)), space.mesh)
        saved = sum(
            node.inputs[place].node == leaf.name
            for node in space.graph.operators
            for place in space.decision_graph.blocks.charge(node, NOTHING)
            if place < len(node.inputs)
            and assignment.choice(node).operands[place] == assignment.produced(Ref(leaf.name))
        )
        found.append((space.mesh.micro_batches - 1 - saved) * size)
    return found


@pytest.mark.parametrize("which", ["residual", "chain"])
def test_gradients_are_summed_over_micro_batches_before_they_are_reduced(which: str) -> None:
    """And the sum takes its share of every micro-batch, which no communication hides behind."""
    rng, reduced = random.Random(which), 0
    for _ in range(4):
        space = space_of(which, random_cluster(rng, (4,)), 1, 4, outer=2, inner=2)
        touch = space.cost.compute_s(0.0, BUCKET_BYTES, "float32", 0) / BUCKET_BYTES
        for _, assignment in assignments(space, rng, 4):
            weight_s = 0.0
            for node in space.graph.nodes:
                is_param = [space.graph.by_name[ref.node].op == "param" for ref in node.inputs]
                if any(is_param):
                    weight_s += space.work(node, assignment.choice(node)).backward_s / 2
                for position in (at for at, each in enumerate(is_param) if each):
                    ref, layout = node.inputs[position], assignment.choice(node).operands[position]
                    route = (*assignment.shared_route(ref), *assignment.operand_route(node, position))
                    axes = [space.mesh.axes[step.axis].name for step in route]
                    assert axes.count(MICRO) == 1 and axes[-1] == MICRO
                    reduced += len(axes) > 1
                    weight_s += 3 / 4 * 3 * touch * local_bytes(space.graph.type_of(ref), layout, space.mesh)
            assert math.fsum(
                link.block.weight_s for link in links_of(assignment, named(space.folded))
            ) == pytest.approx(weight_s)
    assert reduced


@pytest.mark.parametrize("stages, micro_batches", [(1, 4), (2, 1), (2, 8), (4, 2), (4, 4), (4, 8)])
@pytest.mark.parametrize("names", [("1f1b", "gpipe", "interleaved_1f1b"), ("zero_bubble", "zbv", "dualpipev")])
@pytest.mark.parametrize("which, level", [
    ("residual", None), ("chain", None), ("residual", "none"), ("residual", "full"), ("chain", "selective"),
    ("chain", "resharded"),
])  # fmt: skip
def test_no_pipeline_beats_its_relaxation(
    which: str, stages: int, micro_batches: int, names: tuple[str, ...], level: Level | None
) -> None:
    """What the search counts on as lower bounds: for every assignment, schedule, limit of memory and pinned level."""
    rng = random.Random(f"{which} {stages} {micro_batches}")
    seen, paths = 0, dict[Pipeline, Paths]()
    ways: tuple[Gathers, ...] = ("once", "each", "once")
    for gathers in ways if level in (None, "full") else ways[:2]:
        spec = random_cluster(rng, (2, 4))
        counts = [micro_batches, *([rng.choice((2, micro_batches // 2))] if micro_batches > 2 else [])]
        space, *fewer = (space_of(which, spec, stages, m, names[0], gathers, all=8 // stages) for m in counts)
        levels = named(space.folded, LEVELS if level is None else (level,))
        if level is None:
            levels = with_levels_between(levels, space.decision_graph, space.cost)
        costs, *of_fewer = (StageCosts(each, levels) for each in (space, *fewer))
        for choices, assignment in assignments(space, rng, 3):
            links = links_of(assignment, levels)
            free = stage(links, pipelines_of(stages, micro_batches, len(links), names), None)
            for share in (1.0, 0.9, 0.7):
                limit_bytes = int(free.peak_bytes * share)
                found = stage(links, pipelines_of(stages, micro_batches, len(links), names), limit_bytes)
                if found is not None:
                    seen += 1
                    known, waits = paths.setdefault(found.pipeline, Paths(found.pipeline)), names[0] == "1f1b"
                    for each in (costs, *of_fewer):
                        bounds = PipelineBounds(each, limit_bytes, least_send_s(each.space), waits)
                        assert bounds.work_s(found.pipeline, bounds.free_s) <= found.step_s * (1 + 1e-9)
                        enough_s = rng.choice((math.inf, found.step_s * rng.uniform(1.0, 1.2)))
                        assert bounds.packed_s(found.pipeline, enough_s) <= found.step_s * (1 + 1e-9)
                        is_proof, known_s = rng.random() < 0.8, found.step_s * (seen % 2)
                        if each is costs:
                            relaxed = bounds.of(known, enough_s, is_proof, known_s)
                            assert bounds.free_s * (1 - 1e-9) <= relaxed.time_s <= found.step_s * (1 + 1e-9)
                        bounds.packed_s(found.pipeline, 0.9 * found.step_s)  # drops choices of slower plans, as this is
                        for enough_s in (None, math.inf):
                            assert bounds.packed_s(found.pipeline, enough_s) <= found.step_s * (1 + 1e-9)
                    others = [kept != choice for kept, choice in zip(costs.kept or (), choices, strict=True)]
                    alone = PipelineBounds(costs.without(others), found.peak_bytes, least_send_s(space), waits)
                    assert alone.of(known, math.inf).time_s <= found.step_s * (1 + 1e-9)
                    for enough_s in (None, math.inf):
                        assert alone.packed_s(found.pipeline, enough_s) <= found.step_s * (1 + 1e-9)
                    assert costs.least_bytes() <= found.peak_bytes <= limit_bytes
                    assert math.fsum(found.time_s.values()) == pytest.approx(found.step_s)
                    assert sum(peak_micro_batched(assignment, found).by_use().values()) == found.peak_bytes
                    recompute = found.recompute(space.folded)
                    assert found.levels == tuple(recompute.level(*each) for each in space.decision_graph.blocks.numbers)
    assert seen >= (9 if level is None else 3)


@pytest.mark.parametrize("seed", [91, 672, 759, 803, 946])
def test_nothing_is_resharded_into_the_first_block_that_is_packed(seed: int) -> None:
    """Nearly all of the first rank's time is not its blocks', and it hardly waits."""
    rng, seen = random.Random(seed), 0
    width, layers = 64 * rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 24, 32)), rng.choice((2, 3, 4, 5))
    space = space_of(wide_first(width, layers), random_cluster(rng, (2, 4)), 2, 32, "1f1b", all=4)
    levels = named(space.folded, ("none",))
    costs = StageCosts(space, levels)
    for choices, assignment in assignments(space, rng, 4):
        links = links_of(assignment, levels)
        found = stage(links, pipelines_of(2, 32, len(links), ("1f1b",)), None)
        others = [kept != choice for kept, choice in zip(costs.kept or (), choices, strict=True)]
        for each in (costs, costs.without(others)):
            bounds = PipelineBounds(each, None, least_send_s(space), True)
            assert 0.0 < bounds.packed_s(found.pipeline) <= found.step_s * (1 + 1e-9)
            seen += 1
    assert seen >= 4


@pytest.mark.parametrize("waiting", [False, True])
def test_no_way_to_share_blocks_out_is_shorter_than_what_they_are_packed_into(waiting: bool) -> None:
    for ranks, micro_batches, count, first in itertools.product((2, 3), (3, 5), (2, 3, 6), (0, 1)):
        blocks = frozenset(range(first, first + count))
        waits = [len(blocks.intersection(range(rank))) if waiting else 0 for rank in range(ranks)]
        shares = (each for each in itertools.product(range(count + 1), repeat=ranks) if sum(each) == count)
        ways = [[own * micro_batches + wait for own, wait in zip(each, waits, strict=True) if own] for each in shares]
        packed = pack(PipelinePace(ranks, micro_batches, micro_batches / ranks, (0.5,) * waiting), blocks)
        assert packed.most == min(map(max, ways))


@pytest.mark.parametrize("which", ["residual", "chain", "tapped", "tied"])
def test_what_happens_once_a_step_is_never_less_than_its_share(which: str) -> None:
    """So only cuts are looked for that take less than what is left of a step for it, and those are still found."""
    rng, tight, found_again = random.Random(which), 0, 0
    for stages, micro_batches in ((1, 1), (1, 4), (2, 4), (4, 4)):
        space = space_of(which, random_cluster(rng, (2, 4)), stages, micro_batches, all=8 // stages)
        for _, assignment in assignments(space, rng, 3):
            links = links_of(assignment, named(space.folded))
            for pipeline in pipelines_of(stages, micro_batches, len(links)):
                least_s = staged._least_once_s(links, pipeline)
                for _ in range(5):
                    inner = sorted(rng.sample(range(1, len(links)), pipeline.stages - 1))
                    once_s = max(map(sum, staged._once_s(links, pipeline, (0, *inner, len(links)))))
                    assert 0.0 < least_s <= once_s * (1 + 1e-9)
                    tight += least_s > 0.8 * once_s
                for share in (1.0, 0.9, 0.8):
                    limit_bytes = int(stage(links, [pipeline], None).peak_bytes * share)
                    if (found := stage(links, [pipeline], limit_bytes)) is not None:
                        again = stage(links, [pipeline], limit_bytes, found.step_s * (1 + 1e-6))
                        assert again is not None and again.step_s <= found.step_s * (1 + 1e-6)
                        found_again += 1
    assert tight and found_again > 10


def test_a_step_micro_batched_holds_less_and_starts_more() -> None:
    peaks = []
    for micro_batches in (1, 4, 16):
        space = space_of("residual", cluster(1), 1, micro_batches, all=1)
        _, assignment = assignments(space, random.Random(0), 1)[0]
        links = links_of(assignment, named(space.folded))
        found = stage(links, pipelines_of(1, micro_batches, len(links)), None)
        peaks.append(found.alive.stages[0].saved_bytes)
        assert found.time_s["bubble"] == pytest.approx(0.0)
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 4 * peaks[2]


def test_a_schedule_that_holds_less_is_tried_where_faster_ones_do_not_fit() -> None:
    space, alone = space_of("deep", cluster(8), 4, 8, all=2), 0
    choices = lower_bounds(space.problem(None)).choices
    assert choices is not None
    links = links_of(assignment_of(space, choices), named(space.folded))
    lean, fast = (pipelines_of(4, 8, len(links), (name,)) for name in ("1f1b", "interleaved_1f1b"))
    assert len(fast) > 1
    free = stage(links, lean, None)
    for share in (1.0, 0.8, 0.68):
        limit_bytes = int(free.peak_bytes * share)
        fits = [stage(links, which, limit_bytes) is not None for which in (lean, fast, [*lean, *fast])]
        assert fits[2] == (fits[0] or fits[1])
        alone += fits[0] and not fits[1]
    assert alone


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble", "zbv"])
def test_a_little_less_memory_than_the_fastest_plan_needs_is_enough(schedule: str) -> None:
    rng = random.Random(1)
    space = space_of("deep", cluster(8), 2, 4, all=4)
    for _, assignment in assignments(space, rng, 3):
        links = links_of(assignment, named(space.folded))
        for pipeline in pipelines_of(2, 4, len(links), (schedule,)):
            free = stage(links, [pipeline], None)
            for share in (0.97, 0.94, 0.9):
                limit_bytes = int(free.peak_bytes * share)
                found = stage(links, [pipeline], limit_bytes)
                assert found is not None and found.peak_bytes <= limit_bytes
                assert found.step_s < 1.2 * free.step_s


def test_what_a_schedule_that_splits_backward_lacks_is_left_free() -> None:
    """A cut knows no moment of it at which a whole backward runs, but what its ranks hold."""
    rng, found = random.Random(1), 0
    space = space_of("residual", cluster(8), 2, 1, all=4)
    for _, assignment in assignments(space, rng, 6):
        links = links_of(assignment, named(space.folded))
        for pipeline in pipelines_of(2, 1, len(links), ("zero_bubble",)):
            limit_bytes = int(stage(links, [pipeline], None).peak_bytes * 0.95)
            if (fitting := stage(links, [pipeline], limit_bytes)) is not None:
                assert fitting.peak_bytes <= limit_bytes
                found += 1
    assert found >= 6


def test_a_proof_splits_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate is of split tables, whose minima do not agree; what is proved is as with whole ones."""
    space = space_of("chain", cluster(8), 2, 8, data=2, tensor=2)
    costs, pipeline = StageCosts(space, named(space.folded)), Pipeline("1f1b", 2, 8)

    def bound_s(entries: int, is_proof: bool) -> float:
        monkeypatch.setattr("planner.search.pipeline_bounds.ENTRIES", entries)
        bounds = PipelineBounds(costs, 2**20, least_send_s(space), waits=True)
        return bounds.of(Paths(pipeline), math.inf, is_proof).time_s

    few, many = 4, 10**6
    assert bound_s(few, is_proof=False) < bound_s(many, is_proof=False) * (1 - 1e-6)
    assert bound_s(few, is_proof=True) == pytest.approx(bound_s(many, is_proof=True), rel=1e-9)
