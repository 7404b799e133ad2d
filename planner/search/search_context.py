"""What all candidates of a search share: what was asked, how long it may take, and what was found once for several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from planner.analysis.pipeline.chain import Link, links_of
from planner.base.errors import PinError
from planner.cost.model import CostModel
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.filters import filters
from planner.formulation.constraints.labels import Labels, label_blocks
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.stored_layouts import StoredLayouts
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import Levels
from planner.formulation.search_space import Space
from planner.formulation.stage_costs import StageCosts
from planner.formulation.training import Training
from planner.ops.sharding_rule import Rule
from planner.search.parallel_config import ParallelConfig, pipelines_of, schedules
from planner.search.pipeline_bounds import PipelineBounds, least_send_s
from planner.search.process_pool import ProcessPool
from planner.solve.pipeline.schedule import OUT_OF_ORDER
from planner.solve.pipeline.stages import Pipeline

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SearchContext:
    """What all candidates of a search share.

    ``levels`` are those of recomputation; ``spare_bytes`` are left of every device's memory; ``gap`` is the part of a
    step that need not be proved; ``seconds`` adds up where time goes; ``known`` holds the labels that were found,
    ``formulated`` the space of each configuration of a model and its training, and ``chains`` those of choices. A plan
    may take ``memory_bytes`` of a device; ``None``: all that it can use. Where there is a
    ``pool``, its processes evaluate candidates.
    """

    cost: CostModel
    training: Training
    rules: Mapping[str, Rule]
    pins: Pins
    levels: Levels
    deadline: float
    progress: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    spare_bytes: int = 0
    gap: float = 0.0
    known: dict[str, Labels] = field(default_factory=dict)
    formulated: dict[tuple[DecisionGraph, ParallelConfig, Training], Space] = field(default_factory=dict)
    chains: dict[tuple[Space, tuple[int, ...]], tuple[Link, ...]] = field(default_factory=dict)
    stored: StoredLayouts | None = None
    memory_bytes: int | None = None
    pool: ProcessPool | None = None

    @property
    def usable_bytes(self) -> int:
        """Memory of a device that a plan may take: ``memory_bytes``, or all that it can use."""
        return self.cost.cluster.device.usable_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def limit_bytes(self) -> int:
        """Memory that a plan may fill by the search's own reckoning, ``spare_bytes`` less than it may take."""
        return self.usable_bytes - self.spare_bytes

    @property
    def to_share(self) -> SearchContext:
        """The same for another process, which finds for itself what is found once."""
        return replace(self, progress=None, seconds={}, known={}, formulated={}, chains={}, pool=None)

    def within(self, memory_bytes: int, deadline: float) -> SearchContext:
        """The same search within other memory."""
        return replace(self, memory_bytes=memory_bytes, deadline=deadline, seconds={"build": 0.0, "solve": 0.0})

    def apart(self, numbers: Sequence[tuple[int, int]]) -> SearchContext:
        """The same search where equal blocks may differ, which makes of each a kind of its own.

        Args:
            numbers: of every block, its kind and which of its kind it is.
        """
        levels = self.levels.of_kinds({number: kind for number, (kind, _) in enumerate(numbers)})
        return replace(self, levels=levels, chains={})

    def labels(self, decision_graph: DecisionGraph, label: str) -> Labels:
        """:func:`planner.formulation.constraints.labels.label_blocks`, found once."""
        if label not in self.known:
            self.known[label] = label_blocks(decision_graph, label)
        return self.known[label]

    def formulate(self, decision_graph: DecisionGraph, config: ParallelConfig) -> Space:
        """Every decision to take in one configuration, found once."""
        mesh, graph = config.mesh, decision_graph.graph
        key = decision_graph, config, self.training
        if key in self.formulated:
            return self.formulated[key]
        kept = filters(self.pins, graph, self.rules, mesh, partial(self.labels, decision_graph))
        if self.stored is not None:
            kept = kept[0], self.stored.allow_leaf(mesh)
        space = Space(
            decision_graph.folded,
            mesh,
            self.cost,
            replace(self.training, unsharding=config.unsharding),
            self.rules,
            *kept,
            decision_graph,
            config.pace(self.pins.schedule),
            like=next((space for (_, each, _), space in self.formulated.items() if each.mesh == mesh), None),
        )
        empty = [variable for variable, options in space.options.items() if not options]
        if empty:
            raise PinError(
                f"the pins leave no way to run {space.describe(empty[0])} on mesh {mesh.sizes}; relax one of them"
            )
        self.formulated[key] = space
        return space

    def bounds(self, decision_graph: DecisionGraph, config: ParallelConfig) -> PipelineBounds:
        """Bounds of the pipelines of one configuration, and of those with a multiple of its micro-batches."""
        space = self.formulate(decision_graph, config)
        waits = self.pins.schedule not in OUT_OF_ORDER
        return PipelineBounds(StageCosts(space, self.levels), self.limit_bytes, least_send_s(space), waits)

    @property
    def is_even(self) -> bool:
        """Whether nothing takes more than ``k`` times as long for ``k`` times as much, as far as is known: what was
        measured may, and what overlaps, since routes are chosen whatever they hide.

        Of a matrix product on a GPU, whose inner dimension is split where tiles are few, some take up to 2 % more.
        """
        return self.cost.is_closed and not self.cost.cluster.software.overlaps

    def pipelines(self, config: ParallelConfig, blocks: int) -> list[Pipeline]:
        """Those of so many blocks that the pins leave of one configuration."""
        names, virtual_stages = schedules(self.pins), self.pins.virtual_stages
        return pipelines_of(config.stages, config.mesh.micro_batches, blocks, names, virtual_stages)

    def links(self, space: Space, choices: tuple[int, ...]) -> tuple[Link, ...]:
        """The chain that choices make of the blocks."""
        key = space, choices
        if key not in self.chains:
            self.chains[key] = self.links_anew(space, choices)
        return self.chains[key]

    def links_anew(self, space: Space, choices: tuple[int, ...]) -> tuple[Link, ...]:
        """The same, which is not kept: of choices that are looked at once."""
        return links_of(assignment_of(space, choices), self.levels, self.pins.schedule)

    def say(self, text: str) -> None:
        """Tell whoever follows the search."""
        if self.progress is not None:
            self.progress(text)

    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() > self.deadline

    def took(self, step: str, since: float) -> float:
        """Count the seconds since a moment for a step; the moment now."""
        now = time.monotonic()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - since
        return now
