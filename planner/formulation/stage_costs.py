"""What choices cost where: seconds and bytes of one micro-batch in each block, for prices by stage and level.

A search space adds up what a whole step costs at one pace (:mod:`planner.formulation.search_space`). On a pipeline the
same block costs more on one stage than on another, since a stage waits longer or holds more micro-batches, and less or
more with a level of recomputation. Here every choice has its seconds forward, backward, again and once a step, and its
bytes, so that any prices make of them the singles and pairs of a problem of choices, for many prices at once.

The blocks of most work, the *body*, have prices of their own for every stage and level. Other blocks have those of
their stage where they must be first or last, or else the least of any stage, with the least recomputation and the least
saved of any level; so has what lies between blocks of two kinds.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, cast

import numpy as np

from planner.formulation.backward_memory import least_working_bytes
from planner.formulation.choices import laid_at_head, laid_at_tail
from planner.formulation.cost_table import (
    AGAIN,
    ANYWHERE,
    BACKWARD,
    BEHIND,
    BODY,
    COVER,
    FIRST,
    FORWARD,
    GATHERED,
    HELD,
    LAST,
    MORE,
    ONCE,
    PLACES,
    USES,
    VALUE,
    WORK,
    Costs,
    CostTable,
)
from planner.formulation.decisions import AsMade, Flow
from planner.formulation.dominated import dominated
from planner.formulation.remat.levels import NOTHING, Amount, Level, Levels, Recompute
from planner.formulation.search_space import Space
from planner.formulation.variables import Variable
from planner.ir.graph import Node, Ref
from planner.solve.choices.model import Mask, arc_consistent
from planner.solve.pipeline.master import Prices, Variant
from planner.solve.problem import Floats, Ints


class StageCosts:
    """The costs of one space for stages of a pipeline.

    Args:
        space: of one stage's ranks; a step in one piece has one stage.
        levels: at which blocks may run.
    """

    def __init__(self, space: Space, levels: Levels):
        self.space, self.folded = space, space.folded
        flops, kinds = space.decision_graph.blocks.flops, space.folded.kinds
        self.body = max(range(len(kinds)), key=lambda kind: (flops[kind] * len(kinds[kind]), len(kinds[kind])))
        own = levels.of(self.body)
        self.levels: tuple[Level, ...] = levels.computed(self.body) if space.unsharding.once_per_step else own
        self.count = len(kinds[self.body])
        self._first = tuple(levels.of(kind)[0] for kind in range(len(kinds)))
        self._least = tuple(levels.computed(kind)[-1] for kind in range(len(kinds)))
        self._saved_before: dict[Ref, bool] = {}
        last = len(self.folded.instances) - 1
        self._places = dict.fromkeys(range(len(kinds)), ANYWHERE)
        if self.folded.instances[last].kind != self.body and len(kinds[self.folded.instances[last].kind]) == 1:
            self._places[self.folded.instances[last].kind] = LAST
        if self.folded.instances[0].kind != self.body and len(kinds[self.folded.instances[0].kind]) == 1:
            self._places[self.folded.instances[0].kind] = FIRST
        self._places[self.body] = BODY

    def blocks(self, place: str) -> int:
        """How many blocks have the prices of a place."""
        return sum(len(self.folded.kinds[kind]) for kind, each in self._places.items() if each == place)

    @cached_property
    def unpreceded(self) -> int | None:
        """How many blocks of the body follow none of it: only these may cost less than its average, since nothing is
        resharded from the one before. ``None`` where others may, too, as far as numbers tell.
        """
        body = [instance.kind == self.body for instance in self.folded.instances]
        found = sum(own and not before for own, before in zip(body, [False, *body], strict=False))
        following = self.count - found
        if following < 1 or (following == 1 and found > 1):
            return None
        members, flows = self.space.members.items(), self.space.decision_graph.flows.items()
        counts = [len(names) for variable, names in members if self._place_of(variable, variable) == BODY]
        for (tail, head, _, _), count in flows:
            is_between = self._kind_of(tail) == self._kind_of(head) and count % following == 0
            if self._place_of(tail, head) == BODY and not is_between:
                counts.append(count)
        return found if all(count % self.count == 0 for count in counts) else None

    @cached_property
    def operators_s(self) -> float:
        """Seconds of one micro-batch that the operators of a block of the body take at least, without resharding."""
        assert self.kept is not None
        body = ((each, kept) for each, kept in zip(self._singles, self.kept, strict=True) if each.place == BODY)
        works_s = ((c.of(FORWARD) + c.of(BACKWARD) + sum(c.again[:1]) * c.of(AGAIN))[kept] for c, kept in body)
        return sum(float(each.min()) for each in works_s) / self.count

    @property
    def gathers_each(self) -> bool:
        """Whether every micro-batch gathers parameters, which takes as long however small it is."""
        return not self.space.unsharding.once_per_step

    def is_anything(self, place: str) -> bool:
        """Whether there are decisions, or pairs of them, with the prices of a place."""
        every = chain(self._singles, chain.from_iterable(self._pairs.values()))
        return any(each.place == place for each in every)

    @cached_property
    def amounts(self) -> tuple[Recompute, ...]:
        """For each level, every block of the body at it, and all others saving as little as they may."""
        sizes = [len(each) for each in self.folded.kinds]

        def at(level: Level) -> Recompute:
            if level == "none":
                return NOTHING
            every = [level if kind == self.body else least for kind, least in enumerate(self._least)]
            return Recompute(tuple(Amount.of({each: size}) for each, size in zip(every, sizes, strict=True)))

        return tuple(map(at, self.levels))

    @cached_property
    def least_amounts(self) -> tuple[Recompute, ...]:
        """Every block recomputing as little as it may, and every block saving as little as it may."""
        sizes = [len(each) for each in self.folded.kinds]
        first, most = (
            Recompute(tuple(Amount.of({each: size}) for each, size in zip(levels, sizes, strict=True)))
            for levels in (self._first, self._least)
        )
        return first, most

    @cached_property
    def index(self) -> dict[Variable, int]:
        return {variable: number for number, variable in enumerate(self.space.variables)}

    @cached_property
    def in_body(self) -> tuple[int, ...]:
        """Numbers of the decisions that have costs at the prices of the body."""
        found = {number for number, each in enumerate(self._singles) if each.place == BODY}
        for ends, several in self._pairs.items():
            found.update(ends if any(each.place == BODY for each in several) else ())
        return tuple(sorted(found))

    @cached_property
    def most_covered_s(self) -> float:
        """Seconds of work of one micro-batch at most that what is once a step may be behind of."""
        assert self.kept is not None
        singles = zip(self._singles, self.kept, strict=True)
        return sum(float(each.of(COVER)[kept].max()) for each, kept in singles)

    def exposed_s(self, choices: Sequence[int]) -> float:
        """Seconds once a step that work does not cover under choices; below zero where there is work left."""
        singles = zip(self._singles, choices, strict=True)
        covering = sum(float(each.parts[COVER][choice]) for each, choice in singles if COVER in each.parts)
        pairs = ((each, ends) for ends, several in self._pairs.items() for each in several if BEHIND in each.parts)
        return sum(float(each.parts[BEHIND][choices[a], choices[b]]) for each, (a, b) in pairs) - covering

    def least_bytes(self, part: float = 1.0) -> int:
        """What the average rank holds at the least: every decision by itself, saving what any level saves at least.

        Args:
            part: a micro-batch is of the space's.
        """
        saved = (0.0 if each.saved is None else part * each.saved.min(axis=0) for each in self._singles)
        held = (float((each.of(HELD) + least).min()) for each, least in zip(self._singles, saved, strict=True))
        return int(sum(held)) // self.space.stages

    def working_bytes(self, stages: int, part: float = 1.0) -> list[float]:
        """What the backward of each stage has at least beside all that is saved, when it begins with its last block.

        Args:
            part: a micro-batch is of the space's.
        """
        of_kinds = [part * size for size in self._working]
        ends = {place: [each for kind, each in enumerate(of_kinds) if self._places[kind] == place] for place in PLACES}
        inner = min((*ends[BODY], *ends[ANYWHERE]))
        found = [min((inner, *ends[FIRST])), *[inner] * (stages - 1)]
        if ends[LAST]:
            found[-1] = ends[LAST][0]
        return found

    @cached_property
    def _working(self) -> list[int]:
        """What the backward of a block of each kind has at least beside that."""
        assert self.kept is not None
        kept = dict(zip(self.space.variables, self.kept, strict=True))
        return [least_working_bytes(self.space, kind, kept) for kind in range(len(self.folded.kinds))]

    # ---- what there is -----------------------------------------------------------------------------------------------

    @cached_property
    def kept(self) -> tuple[Ints, ...] | None:
        """Of every decision the choices that something allows with every neighbour; ``None`` where one has none."""
        return self._consistent([np.ones(each.shape, bool) for each in self._singles])

    def fitting(self, limit_bytes: int) -> StageCosts:
        """The same without choices that need more than a limit by themselves."""
        assert self.kept is not None
        costs = zip(self._singles, self.kept, strict=True)
        dropped = [np.broadcast_to(each.transient, each.shape)[kept] > limit_bytes for each, kept in costs]
        return self.without(dropped) if any(each.any() for each in dropped) else self

    def without(self, dropped: Sequence[Mask]) -> StageCosts:
        """The same without some of the kept choices of every decision, and what nothing allows then."""
        assert self.kept is not None
        found = copy.copy(self)
        for name in ("_table", "_working", "most_covered_s", "_table_of_multiples", "operators_s"):
            found.__dict__.pop(name, None)
        allowed = [np.zeros(each.shape, bool) for each in self._singles]
        for mask, kept, drop in zip(allowed, self.kept, dropped, strict=True):
            mask[kept[~drop]] = True
        found.kept = self._consistent(allowed)
        return found

    def undominated(self) -> StageCosts:
        """The same without choices that cost no less than another one, whatever their neighbours are and whatever the
        prices: for what all decisions cost together at this number of micro-batches, which is no less so.
        """
        assert self.kept is not None
        return self.without(dominated(self._singles, self._pairs, self.kept))

    def _consistent(self, allowed: list[Mask]) -> tuple[Ints, ...] | None:
        tables = dict(self._together)
        for tail, head in [ends for ends in tables if ends[0] == ends[1]]:
            allowed[tail] = allowed[tail] & tables.pop((tail, head)).diagonal()
        allowed = arc_consistent(allowed, tables)
        return tuple(map(np.flatnonzero, allowed)) if all(each.any() for each in allowed) else None

    @cached_property
    def _together(self) -> dict[tuple[int, int], Mask]:
        """Which choices of two decisions are allowed together, where some are not."""
        found = {}
        for ends, several in self._pairs.items():
            if walls := [each.wall for each in several if each.wall is not None]:
                found[ends] = sum(walls[1:], walls[0]) == 0.0
        return found

    @cached_property
    def _singles(self) -> tuple[Costs, ...]:
        return tuple(self._single(variable) for variable in self.space.variables)

    def _single(self, variable: Variable) -> Costs:
        space, options = self.space, self.space.options[variable]
        shape, count = (len(options),), len(self.levels)
        if variable not in space.members:
            return Costs(ANYWHERE, shape, {ONCE: np.zeros(shape)})
        names = space.members[variable]
        node, times = space.graph.by_name[names[0]], len(names)
        if node.is_leaf:
            place = self._places[cast(int, variable[1])] if len(variable) == 3 else ANYWHERE
            once_s, held_bytes = np.zeros(shape), np.zeros(shape)
            for number, layout in enumerate(options):
                assert isinstance(layout, tuple)
                seconds, held = space.storage(node, layout)
                once_s[number], held_bytes[number] = seconds * times, (held - space.not_with_all(node, layout)) * times
            return Costs(place, shape, {ONCE: once_s, HELD: held_bytes}, origin=WORK if node.op == "param" else VALUE)
        kind = cast(int, variable[1])
        place = self._places[kind]
        (forward, backward, inner_again, inner_backward), transient, parameters = space.works_of(node, options)
        if space.training.tier != "device":
            transient = transient + parameters
        parts = {
            FORWARD: (forward + inner_again) * times,
            BACKWARD: (backward + inner_backward) * times,
            COVER: backward * space.overlap * times,
            AGAIN: forward + inner_again,
        }
        if place == BODY:
            again = tuple(float(space.decision_graph.runs_again(variable, each)) for each in self.amounts)
            saved = np.array([self._saved(variable, node, each) for each in self.amounts], float)
        else:
            again = (float(space.decision_graph.runs_again(variable, self.least_amounts[0])),) * count
            least = np.min([self._saved(variable, node, each) for each in self.least_amounts], axis=0)
            saved = np.tile(least.astype(float), (count, 1))
        return Costs(place, shape, parts, again, saved, transient=transient.astype(np.float64))

    def _saved(self, variable: Variable, node: Node, amount: Recompute) -> Floats:
        """Bytes that the members of an operator's variable save of a micro-batch, at least, for each of its choices.

        A block that recomputes saves what enters it as it is handed on, in whichever layout. Blocks may recompute more
        or less than those before them: what one of these saves at any level is left out.
        """
        space, options = self.space, self.space.options[variable]
        blocks, kind, at = space.decision_graph.blocks, cast(int, variable[1]), cast(int, variable[2])
        backward, sizes, found = blocks.backward(kind), space.sizes_of(node, options), np.zeros(len(options))
        usual = {place for places, times in blocks.charged(NOTHING)[variable].items() if times for place in places}
        for places, times in blocks.charged(amount)[variable].items():
            for place in places:
                origin = backward.origin(at, place)
                if origin.node in backward.at_of:
                    found += times * sizes[place]
                elif space.graph.by_name[origin.node].is_leaf:  # in memory that is held anyway, unless it is converted
                    continue
                elif (place in usual or self._readers[origin] == 1) and not self._is_saved_before(origin):
                    is_whole = not amount.without_gathered()
                    found += times * (sizes[place] if is_whole else float(space.table(origin).held.min()))
        return found

    @cached_property
    def _readers(self) -> Counter[Ref]:
        """How many blocks read each value that is handed on, or a leaf."""
        return Counter(ref for instance in self.folded.instances for ref in dict.fromkeys(instance.block.inputs))

    def _is_saved_before(self, ref: Ref) -> bool:
        """Whether the block that makes a value saves it at some level."""
        if ref not in self._saved_before:
            self._saved_before[ref] = not self.space.graph.by_name[ref.node].is_leaf and self._saves(ref)
        return self._saved_before[ref]

    def _saves(self, ref: Ref) -> bool:
        blocks = self.space.decision_graph.blocks
        number, at = blocks.seat[ref.node]
        instance = self.folded.instances[number]
        backward, nodes = blocks.backward(instance.kind), instance.block.nodes
        made = backward.origin(at, len(nodes[at].inputs) + ref.index)
        return any(
            backward.origin(number, place) == made
            for amount in self.amounts
            for number, node in enumerate(nodes)
            for place in blocks.charge(node, amount)
        )

    @cached_property
    def _pairs_of_multiples(self) -> dict[tuple[int, int], list[Costs]]:
        """What holds of pairs in any multiple of the space's micro-batches.

        Where each gathers parameters, a route of gathers and reductions takes ``k m e + a`` with ``k`` times as many,
        ``m`` before; or more, where they add up gradients. Of that ``m e + a`` is no less than the route takes that is
        best for ``m``, and the rest no less than :data:`MORE`, ``(k - 1) m`` times what takes the least without what is
        once a step.
        """
        known: dict[int, Costs] = {}  # pairs that share costs share these

        def in_multiples(costs: Costs) -> Costs:
            if costs.flow is None:
                return costs
            if id(costs) not in known:
                both, forward = self.space.edge_costs.least(costs.flow)
                if costs.is_turned:
                    both, forward = both.T, forward.T
                assert BEHIND not in costs.parts  # with micro-batches nothing is reduced beside computing
                own_s = costs.of(FORWARD) + costs.of(BACKWARD)
                parts = {FORWARD: own_s, MORE: both * self.space.decision_graph.flows[costs.flow]}
                parts |= {AGAIN: forward} if AGAIN in costs.parts else {}
                if costs.wall is not None:
                    parts = {use: np.where(costs.wall == 0.0, each, 0.0) for use, each in parts.items()}
                known[id(costs)] = replace(costs, parts=parts)
            return known[id(costs)]

        return {ends: [*map(in_multiples, several)] for ends, several in self._pairs.items()}

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], list[Costs]]:
        space, found = self.space, dict[tuple[int, int], list[Costs]]()
        again_of = [space.decision_graph.flows_again(amount) for amount in self.amounts]
        again_at_least = space.decision_graph.flows_again(self.least_amounts[0])
        as_made = [space.decision_graph.as_made(amount) for amount in self.amounts]
        known: dict[object, Costs] = {}
        for flow, count in space.decision_graph.flows.items():
            tail, head, ref, _ = flow
            pair, is_param = space.edge_costs.of(flow), space.graph.by_name[ref.node].op == "param"
            place = self._place_of(tail, head)
            again = np.array([(each if place == BODY else again_at_least).get(flow, 0) for each in again_of], float)
            kept = count * (1.0 - again / count) if is_param and not space.unsharding.once_per_step else np.zeros(0)
            adds_up = is_param and space.unsharding.once_per_step and space.mesh.micro_batches > 1
            late, factor = None, float(count)
            if adds_up and space.graph.type_of(ref).grad:
                late, factor = space.late_gradients(flow) if tail in space.members else None, 2.0 * count
            key = (*map(id, pair), is_param, count, place, again.tobytes(), factor, late is not None and flow)
            if key not in known:
                added_s = self._added_s(flow) * count if adds_up else np.zeros(pair[0].shape)
                costs = self._pair(pair, is_param, count, place, again, kept, factor, late, added_s)
                known[key] = replace(costs, flow=flow) if costs.origin == GATHERED else costs
            ends = self.index[tail], self.index[head]
            for costs in (known[key], *(self._kept_as_made(flow, as_made) if place == BODY else ())):
                ordered = costs.transposed if ends[0] > ends[1] else costs
                found.setdefault((min(ends), max(ends)), []).append(ordered)
        return found

    def _kept_as_made(self, flow: Flow, as_made: Sequence[AsMade]) -> list[Costs]:
        """What a value that is kept as it was made takes besides, by level: its resharding again, and its bytes."""
        again = np.array([float(each.again.get(flow, 0)) for each in as_made])
        places = [at for at in range(len(flow[3])) if any((flow, at) in each.held for each in as_made)]
        if not again.any() and not places:
            return []
        enlarging = self.space.edge_costs.enlarging(flow)
        shape = enlarging.again_s.shape
        saved = np.zeros((len(self.levels), *shape))
        parts = {AGAIN: np.where(np.isfinite(enlarging.again_s), enlarging.again_s, 0.0)}
        for at in places:
            times = np.array([float(each.held.get((flow, at), 0)) for each in as_made])
            saved += np.multiply.outer(times, enlarging.smaller_bytes[at])
        return [Costs(BODY, shape, parts, tuple(again), saved, origin=VALUE)]

    def _pair(
        self,
        pair: tuple[Floats, Floats, np.ndarray],
        is_param: bool,
        count: int,
        place: str,
        again: Floats,
        kept: Floats,
        factor: float,
        late: np.ndarray | None,
        added_s: Floats,
    ) -> Costs:
        """What a resharding costs that occurs ``count`` times.

        Args:
            again: how often each level runs it again.
            kept, factor: how many results each level holds for each micro-batch, and all of them throughout the step.
            late: bytes of each that are not there before the end of the step.
            added_s: of backward, what adding up the gradients of one micro-batch takes in it.
        """
        forward, backward, gathered = pair
        allowed, wall = np.isfinite(forward) & np.isfinite(backward), None
        if not allowed.all():
            wall = np.where(allowed, 0.0, math.inf)
            forward, backward = (np.where(allowed, each, 0.0) for each in (forward, backward))
        shape = forward.shape
        if is_param and self.space.unsharding.once_per_step:
            behind = np.maximum(backward * count - added_s * self.space.mesh.micro_batches, 0.0)
            held = gathered * factor - (0.0 if late is None else count * late)
            parts = {BACKWARD: added_s, ONCE: forward * count, BEHIND: behind, HELD: held}
            return Costs(place, shape, parts, wall=wall)
        is_beside = is_param and self.space.unsharding.overlaps_reduce
        parts = {FORWARD: forward * count, BEHIND if is_beside else BACKWARD: backward * count}
        parts |= {AGAIN: forward} if again.any() else {}
        saved = np.multiply.outer(kept, gathered) if is_param and place == BODY else None
        return Costs(place, shape, parts, tuple(again), saved, wall, GATHERED if is_param else VALUE)

    def _added_s(self, flow: Flow) -> Floats:
        """Seconds to add a parameter's gradient of one micro-batch to that of the others, for every pair of choices."""
        space, (tail, head, ref, positions) = self.space, flow
        table = space.table(ref)
        rows = table.numbers(laid_at_tail(space.options[tail], ref.index))
        columns = table.numbers(laid_at_head(space.options[head], positions[0]))
        return table.summing_s[np.ix_(rows, columns)] / space.mesh.micro_batches

    def _place_of(self, tail: Variable, head: Variable) -> str:
        kinds = {self._kind_of(each) for each in (tail, head)} - {None}
        if len(kinds) == 1:
            return self._places[cast(int, kinds.pop())]
        return ANYWHERE

    def _kind_of(self, variable: Variable) -> int | None:
        if variable[0] == "reshard_point":
            return self._kind_of(cast(Variable, variable[1]))
        if variable[0] == "op" or (variable[0] == "leaf" and len(variable) == 3):
            return cast(int, variable[1])
        return None

    # ---- under prices ------------------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> CostTable:
        assert self.kept is not None
        return CostTable(len(self.levels), self._singles, self._pairs, self.kept)

    @cached_property
    def _table_of_multiples(self) -> CostTable:
        assert self.kept is not None
        if not self.gathers_each:
            return self._table
        return CostTable(len(self.levels), self._singles, self._pairs_of_multiples, self.kept)

    def under(
        self,
        at: Sequence[tuple[int, int]],
        body: Prices,
        prices: Prices,
        once: float,
        behind: float,
        mix: tuple[Floats, Floats] | None = None,
        *,
        multiple: float = 1.0,
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Singles and pairs of the problem of choices, an entry for each stage and level that all of the body is at.

        In ``k`` times as many micro-batches each takes a ``k``-th at least, as nothing takes more than ``k`` times as
        long for ``k`` times as much; what is held and done once a step is the same. Values may go another way, whose
        sum alone is no shorter, and of those that are given less is held; parameters that each gathers take as long.

        Args:
            at: numbers of stages among the ``body``'s prices, and of levels.
            prices: of all stages.
            once: what a second once a step counts.
            behind: and one behind work, at most as much.
            mix: how much each level counts of what runs again, and of what is saved, for each entry; instead of one.
            multiple: how many times the space's micro-batches there are; a second of one of these counts as much as of
                all that it falls into.
        """
        stages, numbers = np.array(at).T
        of_level = np.eye(len(self.levels))[numbers].T
        again_mix, saved_mix = (of_level, of_level) if mix is None else mix
        rows = np.stack([prices.forward, prices.backward, prices.held, prices.saved])
        elsewhere = {FIRST: rows[:, 0], LAST: rows[:, -1], ANYWHERE: rows.min(axis=1)}
        priced = {BODY: np.stack([body.forward, body.backward, body.held, body.saved])[:, stages]}
        priced |= {place: np.tile(each[:, None], len(at)) for place, each in elsewhere.items()}
        weights, other, nothing = {}, np.tile([[once], [behind], [-behind]], len(at)), np.zeros(len(at))
        for place, (forward, backward, held, saved) in priced.items():
            by_level, wall = (again_mix * backward, saved_mix * saved), np.ones(len(at))
            weights[place, WORK] = np.vstack([forward, backward, other, held, nothing, *by_level, wall])
            least = np.minimum(forward, backward)
            if multiple != 1.0:
                forward = backward = least
            more, every = (multiple - 1.0) * least, [multiple * each for each in by_level]
            weights[place, GATHERED] = np.vstack([forward, backward, other, held, more, *every, wall])
            if multiple != 1.0:
                held, by_level = nothing, (0.0 * by_level[0], by_level[1])
            weights[place, VALUE] = np.vstack([forward, backward, other, held, nothing, *by_level, wall])
        return (self._table if multiple == 1.0 else self._table_of_multiples).under(weights)

    def variants(self, choices: Sequence[int], ranks: int, multiple: float = 1.0) -> dict[str, tuple[Variant, ...]]:
        """What a block costs under some choices: of the body at every level, of the others together.

        Args:
            multiple: in so many times as many micro-batches, times the space's part of one of them.
        """
        count = len(self.levels)
        sums = {place: (np.zeros(len(USES)), np.zeros(count), np.zeros(count)) for place in PLACES}
        entries: list[tuple[Costs, tuple[int, ...]]]
        entries = [(each, (choices[number],)) for number, each in enumerate(self._singles)]
        pairs = self._pairs if multiple == 1.0 else self._pairs_of_multiples
        entries += [(each, (choices[a], choices[b])) for (a, b), several in pairs.items() for each in several]
        for costs, where in entries:
            parts, again, saved = sums[costs.place]
            often = multiple if costs.origin == GATHERED else 1.0
            for use, table in costs.parts.items():
                parts[use] += table[where]
            if AGAIN in costs.parts:
                again += often * np.array(costs.again) * costs.parts[AGAIN][where]
            if costs.saved is not None:
                at: Any = (slice(None), *where)
                saved += often * costs.saved[at]
        found = {}
        for place, (parts, again, saved) in sums.items():
            times = max(1, self.blocks(place))
            forward_s = parts[FORWARD] + (multiple - 1.0) * parts[MORE]
            behind = max(0.0, parts[BEHIND] - parts[COVER])
            found[place] = tuple(
                Variant(
                    forward_s / times, (parts[BACKWARD] + again[number]) / times,
                    (parts[ONCE] + behind) / ranks / times, parts[HELD] / times, saved[number] / times, number,
                )
                for number in range(len(self.levels) if place == BODY else 1)
            )  # fmt: skip
        return found
