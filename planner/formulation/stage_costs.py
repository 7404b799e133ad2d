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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import cast

import numpy as np

from planner.formulation.decisions import AsMade, Flow
from planner.formulation.edge_costs import layout_at_head, layout_at_tail
from planner.formulation.remat.levels import NOTHING, Amount, Level, Levels, Recompute
from planner.formulation.search_space import Space
from planner.formulation.variables import Variable
from planner.ir.layout import MICRO
from planner.solve.choices.model import arc_consistent
from planner.solve.pipeline.master import Prices, Variant
from planner.solve.problem import Floats, Ints

FORWARD, BACKWARD, AGAIN, ONCE, BEHIND, COVER, HELD = range(7)
"""Seconds forward, backward, of what may run again, once a step, once a step behind work, of that work, and bytes."""
BODY, FIRST, LAST, ANYWHERE = "body", "first", "last", "anywhere"
PLACES = (BODY, FIRST, LAST, ANYWHERE)


@dataclass(frozen=True, eq=False)
class Costs:
    """One decision's, or one pair's: ``(..., 7)`` by use, how often each level runs it again, and bytes saved by level.

    ``place`` says whose prices count; infinite ``wall`` forbids.
    """

    place: str
    parts: Floats
    again: Floats
    saved: Floats
    wall: Floats

    def only(self, *kept: Ints) -> Costs:
        """The same with only some of the choices of each."""
        at = np.ix_(*kept)
        return Costs(self.place, self.parts[at], self.again, self.saved[at], self.wall[at])


class StageCosts:
    """The costs of one space for stages of a pipeline.

    Args:
        space: of a micro-batched step.
        levels: at which blocks may run.
        limit_bytes: choices that need more for themselves are left out.
    """

    def __init__(self, space: Space, levels: Levels, limit_bytes: int | None):
        self.space, self.folded = space, space.folded
        self.limit = math.inf if limit_bytes is None else float(limit_bytes)
        flops, kinds = space.decision_graph.blocks.flops, space.folded.kinds
        self.body = max(range(len(kinds)), key=lambda kind: (flops[kind] * len(kinds[kind]), len(kinds[kind])))
        own = levels.of(self.body)
        self.levels: tuple[Level, ...] = levels.computed(self.body) if space.unsharding.once_per_step else own
        self.count = len(kinds[self.body])
        self._least = tuple(levels.computed(kind)[-1] for kind in range(len(kinds)))
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
        """Nothing, and every block saving as little as it may."""
        sizes = [len(each) for each in self.folded.kinds]
        most = Recompute(tuple(Amount.of({each: size}) for each, size in zip(self._least, sizes, strict=True)))
        return NOTHING, most

    @cached_property
    def index(self) -> dict[Variable, int]:
        return {variable: number for number, variable in enumerate(self.space.variables)}

    @cached_property
    def most_covered_s(self) -> float:
        """Seconds of work of one micro-batch at most that what is once a step may be behind of."""
        return sum(float(each.parts[:, COVER].max()) for each in self.singles)

    def exposed_s(self, choices: Sequence[int]) -> float:
        """Seconds once a step that work does not cover under choices; below zero where there is work left."""
        singles = (each.parts[choice] for each, choice in zip(self.singles, choices, strict=True))
        found = sum(float(parts[BEHIND] - parts[COVER]) for parts in singles)
        pairs = ((each, ends) for ends, several in self.pairs.items() for each in several)
        return found + sum(float(each.parts[choices[a], choices[b], BEHIND]) for each, (a, b) in pairs)

    @cached_property
    def least_bytes(self) -> int:
        """What the average rank holds at the least: every decision by itself, saving what any level saves at least."""
        held = (float((each.parts[:, HELD] + each.saved.min(axis=1)).min()) for each in self._singles)
        return int(sum(held)) // self.space.stages

    # ---- what there is -----------------------------------------------------------------------------------------------

    @cached_property
    def kept(self) -> tuple[Ints, ...] | None:
        """Of every decision the choices that something allows with every neighbour; ``None`` where one has none."""
        allowed = [each.wall == 0.0 for each in self._singles]
        tables = {ends: np.all([each.wall == 0.0 for each in several], axis=0) for ends, several in self._pairs.items()}
        for tail, head in [ends for ends in tables if ends[0] == ends[1]]:
            allowed[tail] = allowed[tail] & tables.pop((tail, head)).diagonal()
        allowed = arc_consistent(allowed, tables)
        return tuple(map(np.flatnonzero, allowed)) if all(each.any() for each in allowed) else None

    @cached_property
    def singles(self) -> tuple[Costs, ...]:
        """Every decision's that is kept, in the order of the space's variables."""
        assert self.kept is not None
        return tuple(each.only(kept) for each, kept in zip(self._singles, self.kept, strict=True))

    @cached_property
    def pairs(self) -> dict[tuple[int, int], list[Costs]]:
        """Every pair of kept decisions that a value flows between, the smaller number first."""
        assert self.kept is not None
        known: dict[object, Costs] = {}
        found: dict[tuple[int, int], list[Costs]] = {}
        for (tail, head), several in self._pairs.items():
            for each in several:
                tails, heads = self.kept[tail], self.kept[head]
                key = id(each), tails.tobytes(), heads.tobytes()
                if key not in known:
                    known[key] = each.only(tails, heads)
                found.setdefault((tail, head), []).append(known[key])
        return found

    @cached_property
    def _singles(self) -> tuple[Costs, ...]:
        return tuple(self._single(variable) for variable in self.space.variables)

    def _single(self, variable: Variable) -> Costs:
        space, options = self.space, self.space.options[variable]
        size, count = len(options), len(self.levels)
        parts, saved, wall = np.zeros((size, 7)), np.zeros((size, count)), np.zeros(size)
        again = np.zeros(count)
        if variable not in space.members:
            return Costs(ANYWHERE, parts, again, saved, wall)
        names = space.members[variable]
        node, times = space.graph.by_name[names[0]], len(names)
        if node.is_leaf:
            place = self._places[cast(int, variable[1])] if len(variable) == 3 else ANYWHERE
            for number, layout in enumerate(options):
                assert isinstance(layout, tuple)
                once_s, held = space.storage(node, layout)
                held -= space.not_with_all(node, layout)
                parts[number, ONCE], parts[number, HELD] = once_s * times, held * times
            return Costs(place, parts, again, saved, wall)
        kind = cast(int, variable[1])
        place = self._places[kind]
        (forward, backward, inner_again, inner_backward), transient, parameters = space.works_of(node, options)
        if space.training.tier != "device":
            transient = transient + parameters
        parts[:, FORWARD] = (forward + inner_again) * times
        parts[:, BACKWARD] = (backward + inner_backward) * times
        parts[:, AGAIN] = forward + inner_again
        parts[:, COVER] = backward * space.overlap * times
        wall = np.where(transient > self.limit, math.inf, 0.0)
        if place == BODY:
            again = np.array([float(space.decision_graph.runs_again(variable, each)) for each in self.amounts])
            saved = np.array([space.held_by(variable, node, options, each) for each in self.amounts], float).T
        else:
            held = np.min([space.held_by(variable, node, options, each) for each in self.least_amounts], axis=0)
            saved = np.repeat(held[:, None].astype(float), count, axis=1)
        return Costs(place, parts, again, saved, wall)

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], list[Costs]]:
        space, found = self.space, dict[tuple[int, int], list[Costs]]()
        again_of = [space.decision_graph.flows_again(amount) for amount in self.amounts]
        as_made = [space.decision_graph.as_made(amount) for amount in self.amounts]
        known: dict[object, Costs] = {}
        for flow, count in space.decision_graph.flows.items():
            tail, head, ref, _ = flow
            pair, is_param = space.edge_costs.of(flow), space.graph.by_name[ref.node].op == "param"
            place = self._place_of(tail, head)
            again = np.array([each.get(flow, 0) if place == BODY else 0 for each in again_of], float)
            kept = count * (1.0 - again / count) if is_param and not space.unsharding.once_per_step else np.zeros(0)
            adds_up = is_param and space.unsharding.once_per_step and space.mesh.micro_batches > 1
            late, factor = None, float(count)
            if adds_up and space.graph.type_of(ref).grad:
                late, factor = space.late_gradients(flow) if tail in space.members else None, 2.0 * count
            key = (*map(id, pair), is_param, count, place, again.tobytes(), factor, late is not None and flow)
            if key not in known:
                added_s = self._added_s(flow) * count if adds_up else np.zeros(pair[0].shape)
                known[key] = self._pair(pair, is_param, count, place, again, kept, factor, late, added_s)
            ends = self.index[tail], self.index[head]
            for costs in (known[key], *(self._kept_as_made(flow, as_made) if place == BODY else ())):
                if ends[0] > ends[1]:
                    parts, saved = (each.swapaxes(0, 1) for each in (costs.parts, costs.saved))
                    costs = Costs(place, parts, costs.again, saved, costs.wall.T)
                found.setdefault((min(ends), max(ends)), []).append(costs)
        return found

    def _kept_as_made(self, flow: Flow, as_made: Sequence[AsMade]) -> list[Costs]:
        """What a value that is kept as it was made takes besides, by level: its resharding again, and its bytes."""
        again = np.array([float(each.again.get(flow, 0)) for each in as_made])
        places = [at for at in range(len(flow[3])) if any((flow, at) in each.held for each in as_made)]
        if not again.any() and not places:
            return []
        enlarging = self.space.edge_costs.enlarging(flow)
        shape = enlarging.again_s.shape
        parts, saved = np.zeros((*shape, 7)), np.zeros((*shape, len(self.levels)))
        parts[..., AGAIN] = np.where(np.isfinite(enlarging.again_s), enlarging.again_s, 0.0)
        for at in places:
            times = np.array([float(each.held.get((flow, at), 0)) for each in as_made])
            saved += enlarging.smaller_bytes[at][..., None] * times
        return [Costs(BODY, parts, again, saved, np.zeros(shape))]

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
        wall = np.where(np.isfinite(forward) & np.isfinite(backward), 0.0, math.inf)
        forward, backward = (np.where(wall == 0.0, each, 0.0) for each in (forward, backward))
        parts, saved = np.zeros((*forward.shape, 7)), np.zeros((*forward.shape, len(self.levels)))
        once = is_param and self.space.unsharding.once_per_step
        if once:
            parts[..., ONCE], parts[..., BACKWARD] = forward * count, added_s
            parts[..., BEHIND] = np.maximum(backward * count - added_s * self.space.mesh.micro_batches, 0.0)
            parts[..., HELD] = gathered * factor - (0.0 if late is None else count * late)
        else:
            parts[..., FORWARD], parts[..., BACKWARD], parts[..., AGAIN] = forward * count, backward * count, forward
            if is_param and place == BODY:
                saved[:] = gathered[..., None] * kept
        return Costs(place, parts, np.zeros(len(self.levels)) if once else again, saved, wall)

    def _added_s(self, flow: Flow) -> Floats:
        """Seconds to add a parameter's gradient of one micro-batch to that of the others, for every pair of choices."""
        space, (tail, head, ref, positions) = self.space, flow
        table = space.table(ref)
        found = np.zeros((len(table.layouts), len(table.layouts)))
        rows = [table.index[layout_at_tail(each, ref.index)] for each in space.options[tail]]
        columns = [[table.index[layout_at_head(each, at)] for each in space.options[head]] for at in positions]
        for row in set(rows):
            for column in set(chain.from_iterable(columns)):
                source, target = table.layouts[row], table.layouts[column]
                if source != target and math.isfinite(table.backward_s[row, column]):
                    steps = table.route(source, target)
                    summed = (each for each in steps if space.mesh.axes[each.axis].name == MICRO)
                    found[row, column] = sum(space.conversion_s(ref, each.before, each.after)[1] for each in summed)
        total: Floats = found[np.ix_(rows, columns[0])] / space.mesh.micro_batches
        return total

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

    def under(
        self,
        at: Sequence[tuple[int, int]],
        body: Prices,
        prices: Prices,
        once: float,
        behind: float,
        mix: tuple[Floats, Floats] | None = None,
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Singles and pairs of the problem of choices, an entry for each stage and level that all of the body is at.

        Args:
            at: numbers of stages among the ``body``'s prices, and of levels.
            prices: of all stages.
            once: what a second once a step counts.
            behind: and one behind work, at most as much.
            mix: how much each level counts of what runs again, and of what is saved, for each entry; instead of one.
        """
        stages, numbers = np.array([stage for stage, _ in at]), np.array([number for _, number in at])
        of_level = np.eye(len(self.levels))[numbers].T
        again_mix, saved_mix = (of_level, of_level) if mix is None else mix
        rows = {
            BODY: _Rows(body.forward[stages], body.backward[stages], body.held[stages], body.saved[stages]),
            FIRST: _Rows.of(prices, 0, len(at)),
            LAST: _Rows.of(prices, prices.stages - 1, len(at)),
            ANYWHERE: _Rows.least(prices, len(at)),
        }

        def priced(costs: Costs) -> Floats:
            row = rows[costs.place]
            again = costs.again @ again_mix if costs.place == BODY else np.zeros(len(at))
            weights = np.stack(
                [
                    row.forward, row.backward, row.backward * again, np.full(len(at), once),
                    np.full(len(at), behind), np.full(len(at), -behind), row.held,
                ]
            )  # fmt: skip
            found: Floats = costs.parts @ weights + (costs.saved @ saved_mix) * row.saved + costs.wall[..., None]
            return found

        known: dict[int, Floats] = {}
        pairs = {}
        for ends, several in self.pairs.items():
            total = None
            for costs in several:
                if id(costs) not in known:
                    known[id(costs)] = priced(costs)
                total = known[id(costs)] if total is None else total + known[id(costs)]
            assert total is not None
            pairs[ends] = total
        singles = [priced(costs) for costs in self.singles]
        for ends in [ends for ends in pairs if ends[0] == ends[1]]:
            singles[ends[0]] = singles[ends[0]] + np.einsum("cck->ck", pairs.pop(ends))
        return singles, pairs

    def variants(self, choices: Sequence[int], ranks: int) -> dict[str, tuple[Variant, ...]]:
        """What a block costs under some choices: of the body at every level, of the others together."""
        sums = {place: (np.zeros(7), np.zeros(len(self.levels)), np.zeros(len(self.levels))) for place in PLACES}
        entries: list[tuple[Costs, tuple[int, ...]]]
        entries = [(each, (choices[number],)) for number, each in enumerate(self.singles)]
        entries += [(each, (choices[a], choices[b])) for (a, b), several in self.pairs.items() for each in several]
        for costs, where in entries:
            parts, again, saved = sums[costs.place]
            parts += costs.parts[where]
            again += costs.again * costs.parts[(*where, AGAIN)]
            saved += costs.saved[where]
        found = {}
        for place, (parts, again, saved) in sums.items():
            times = max(1, self.blocks(place))
            behind = max(0.0, parts[BEHIND] - parts[COVER])
            found[place] = tuple(
                Variant(
                    parts[FORWARD] / times, (parts[BACKWARD] + again[number]) / times,
                    (parts[ONCE] + behind) / ranks / times, parts[HELD] / times, saved[number] / times,
                )
                for number in range(len(self.levels) if place == BODY else 1)
            )  # fmt: skip
        return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Prices of a place, one for each entry."""

    forward: Floats
    backward: Floats
    held: Floats
    saved: Floats

    @classmethod
    def of(cls, prices: Prices, stage: int, count: int) -> _Rows:
        fields = (prices.forward, prices.backward, prices.held, prices.saved)
        return cls(*(np.full(count, each[stage]) for each in fields))

    @classmethod
    def least(cls, prices: Prices, count: int) -> _Rows:
        fields = (prices.forward, prices.backward, prices.held, prices.saved)
        return cls(*(np.full(count, each.min()) for each in fields))
