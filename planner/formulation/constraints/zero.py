"""How the data and sequence axes store parameters as pinned (ZeRO stages), for all or by module.

Ways are numbered as stages of ZeRO: 0 stores whole; 1, 2 and 3 store sharded, and differ in when that is gathered. How
a parameter is stored is decided for itself, so parameters may differ in any manner. When backward gathers is decided
for a block: all that it has gathered, or nothing, is gathered again. With micro-batches it is decided for the whole
    step.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from planner.base.errors import PinError, PlanError
from planner.base.globs import is_of, modules_of
from planner.formulation.remat.levels import ALONE, Level
from planner.formulation.unsharding import PER_MICRO_BATCH, PER_STEP, Unsharding
from planner.ir.folding import Folded, Instance, relabel
from planner.ir.graph import Graph

Zero = int | Mapping[str, int]
"""A way for all parameters, or by glob of their names, or of the paths of modules that they are in."""
Ways = frozenset[int | None]
"""Those of some parameters; ``None``: of some the search says it."""
WAYS = (
    "parameters are stored whole (0), sharded and held from forward to backward as they are used (1 or 2), or sharded "
    "and gathered again in backward, with micro-batches of each micro-batch (3)"
)


def read_zero(value: object) -> Zero | None:
    """Check a user's pin.

    Raises:
        PinError: neither a way nor a mapping to ways.
    """
    if value is None or _is_way(value):
        return value  # type: ignore[return-value]
    if not isinstance(value, Mapping) or not value:
        raise PinError(
            f"pin 'zero' is {value!r}; {WAYS}, all in one way, or by module path (with * and ?), "
            "e.g. {'embed*': 0, 'layers.*': 3}"
        )
    for glob, way in value.items():
        if not isinstance(glob, str) or not _is_way(way):
            raise PinError(f"pin 'zero' has {way!r} for {glob!r}; it maps module paths (with * and ?) to ways: {WAYS}")
    return dict(value)


def _is_way(value: object) -> bool:
    return type(value) is int and 0 <= value <= 3


def way_of(zero: Zero | None, name: str) -> int | None:
    """What is pinned for a parameter, by its name."""
    if not isinstance(zero, Mapping):
        return zero
    return next((way for glob, way in zero.items() if is_of(glob, name)), None)


def ways_of(zero: Zero | None) -> Ways:
    """Those that parameters may have."""
    if not isinstance(zero, Mapping):
        return frozenset({zero})
    return frozenset(zero.values()) if "*" in zero else frozenset({*zero.values(), None})


def unshardings(zero: Zero | None) -> tuple[Unsharding, ...]:
    """When a micro-batched step may gather parameters, first what is looked at first.

    Raises:
        PinError: some are pinned to one of both, and some to the other.
    """
    ways = ways_of(zero)
    if 3 in ways and ways & {1, 2}:
        raise PinError(
            f"pin 'zero' is {zero}, but with micro-batches all parameters that are sharded are gathered once a step "
            "(1, 2), or all in each micro-batch (3): pin one of both, and others to 0"
        )
    if 3 in ways:
        return (PER_MICRO_BATCH,)
    return (PER_STEP, PER_MICRO_BATCH) if None in ways and not ways & {1, 2} else (PER_STEP,)


def levels_alone(ways: Ways) -> tuple[Level, ...]:
    """Whether a block that makes nothing else again gathers again: the levels of recomputation that are left of both.

    Args:
        ways: of the parameters that it reads.
    """
    if 3 in ways:
        return ALONE[1:]
    return ALONE if None in ways and not ways & {1, 2} else ALONE[:1]


def check_zero(zero: Zero | None, graph: Graph) -> None:
    """Refuse globs that pin nothing; ``*`` may stand for the rest where there is none.

    Raises:
        PinError: one matches no parameter, or none that an earlier one has left.
    """
    if not isinstance(zero, Mapping):
        return
    names = [leaf.target or leaf.name for leaf in graph.leaves if leaf.op == "param"]
    first = {name: next((glob for glob in zero if is_of(glob, name)), None) for name in names}
    for glob in zero:
        if glob in (*first.values(), "*"):
            continue
        taken = next((first[name] for name in names if is_of(glob, name)), None)
        if taken is not None:
            raise PinError(
                f"pin 'zero': {glob!r} pins nothing, since {taken!r} and others before it match all that it matches: "
                "put it first, or leave it out"
            )
        paths = [*dict.fromkeys(path for name in names for path in modules_of(name)), *names]
        near = difflib.get_close_matches(glob, paths, n=3, cutoff=0.4)
        hint = f"; {'close' if near else 'there'} are: {', '.join(map(repr, near or paths[:3]))}" if paths else ""
        raise PinError(f"pin 'zero': no parameter, and no module that has one, matches {glob!r}{hint}")


def pinned_apart(folded: Folded, zero: Zero | None) -> Folded:
    """The same with equal blocks apart whose parameters are pinned to different ways."""
    if not isinstance(zero, Mapping):
        return folded
    return relabel(folded, [tuple(way for _, way in _read(folded, zero, each)) for each in folded.instances])


def check_together(folded: Folded, zero: Zero | None) -> None:
    """Refuse a plan that decides blocks together whose parameters are pinned to different ways.

    Raises:
        PlanError: names two of them.
    """
    if not isinstance(zero, Mapping):
        return
    for first, *others in folded.kinds:
        for other in others:
            for (name, way), (another, its) in zip(_read(folded, zero, first), _read(folded, zero, other), strict=True):
                if way != its:
                    raise PlanError(
                        f"the plan's pin 'zero' is {way} for {name!r} and {its} for {another!r}, and its blocks decide "
                        "both together: one of them was edited; restore it, or plan again"
                    )


def ways_of_kinds(folded: Folded, zero: Zero | None) -> Sequence[Ways]:
    """Those of the parameters that each kind of block reads.

    Raises:
        PinError: a block would gather some again in backward, and hold others.
    """
    if not isinstance(zero, Mapping):
        return [frozenset({zero})] * len(folded.kinds)
    found = []
    for number, (first, *_) in enumerate(folded.kinds):
        by_way = {way: name for name, way in _read(folded, zero, first)}
        held = by_way.get(1, by_way.get(2))
        if held is not None and 3 in by_way:
            raise PinError(
                f"pin 'zero' is 3 for {by_way[3]!r}, and {way_of(zero, held)} for {held!r}, which block "
                f"{folded.names[number]!r} reads too: in backward a block gathers all of its parameters again, or "
                "none. Pin both alike, or one to 0"
            )
        found.append(frozenset(by_way))
    return found


def _read(folded: Folded, zero: Zero, instance: Instance) -> list[tuple[str, int | None]]:
    """The parameters that a block reads, by name, and what is pinned for them."""
    leaves = (folded.graph.by_name[ref.node] for ref in instance.block.inputs)
    names = [leaf.target or leaf.name for leaf in leaves if leaf.op == "param"]
    return [(name, way_of(zero, name)) for name in names]
