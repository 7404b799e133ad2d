"""Which blocks computed while a collective was on its way, and how long somebody waited for it: read from a trace.

A trace of torch's profiler has, on one clock, when flights were sent and waited for
(:mod:`autopar.runtime.spmd.flight`), when blocks began (:func:`mark`), and every operator. A block computes beside a
flight if most of its operators ran between the two; those that cut and join parameters for collectives do not count.
Over gloo what is waited for is exposed: nothing else runs on the rank. On a GPU the stream waits, so exposed is the
time of a collective's kernel in which no other kernel runs.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _RecordFunctionFast as shown_as

from autopar.runtime.spmd.carried_collectives import CARRIER, carried_collectives
from autopar.runtime.spmd.flight import LABEL, SENT
from planner.analysis.overlaps import ObservedFlight, Overlap, Phase

FORWARD, ENDS, BACKWARD = "forward", "forward ends", "backward"
MARK = re.compile(rf"block (\d+), ({FORWARD}|{ENDS}|{BACKWARD})$")
COMMUNICATING = re.compile(r"_(Gather|SumGradients|Complete|LocalParts)(Backward)?$")
"""Functions of autograd that hold a collective's own operators."""
LAST = "_LocalPartsBackward"
"""What runs when backward is over with all blocks."""


@dataclass(frozen=True)
class _Span:
    block: int
    phase: Phase
    begin: float
    end: float
    operators: tuple[float, ...]

    def mostly_within(self, begin: float, end: float) -> bool:
        inside = bisect(self.operators, end) - bisect(self.operators, begin)
        return 2 * inside > len(self.operators)


def mark(block: int, what: str) -> None:
    """Note in the trace that a block begins or ends."""
    with shown_as(f"block {block}, {what}"):
        pass


def overlaps_seen(events: Sequence[Any], on_gpu: bool) -> list[ObservedFlight]:
    """Every flight of a step, in the order in which they were sent.

    Args:
        events: of torch's profiler.
    """
    events = sorted(events, key=lambda each: each.time_range.start)
    spans, flights = _spans(events), dict[str, list[Any]]()
    for event in events:
        if found := LABEL.match(event.name):
            flights.setdefault(found[1], []).append((found[2], event.time_range))
    carried = _carried(events, on_gpu)
    seen = []
    for (kind, sent), (_, waited) in (each for each in flights.values() if len(each) == 2):
        beside = [span for span in spans if span.mostly_within(sent.start, waited.start)]
        # Gathers belong to the block that waits for them, reductions to the one that sends them.
        of = _at(spans, waited.start if kind == "all_gather" else sent.start)
        if of is None:
            continue
        overlap = Overlap(kind, of.phase, of.block, tuple(span.block for span in beside))
        if sent.start not in carried:
            seen.append(ObservedFlight(overlap, None, None))
            continue
        carried_us, exposed_us = carried[sent.start]
        seen.append(ObservedFlight(overlap, carried_us / 1e6, (exposed_us if on_gpu else waited.elapsed_us()) / 1e6))
    return seen


def _spans(events: Sequence[Any]) -> list[_Span]:
    """Blocks forward and backward, in the order in which they ran, with the moments of their operators."""
    begun, backward, ran = dict[int, float](), list[tuple[int, float]](), list[tuple[int, Phase, float, float]]()
    for event in events:
        if (found := MARK.match(event.name)) is None:
            continue
        block, what, at = int(found[1]), found[2], event.time_range.start
        if what == FORWARD:
            begun[block] = at
        elif what == ENDS:
            ran.append((block, "forward", begun[block], at))
        elif not backward or block < backward[-1][0]:
            backward.append((block, at))
    over = [event.time_range.start for event in events if event.name == LAST]
    ends = [*(at for _, at in backward[1:]), *over[-1:]]
    ran += [(block, "backward", at, end) for (block, at), end in zip(backward, ends, strict=False)]
    operators = [*_operators(events)]
    return [
        _Span(block, phase, begin, end, tuple(operators[bisect(operators, begin) : bisect(operators, end)]))
        for block, phase, begin, end in ran
    ]


def _operators(events: Sequence[Any]) -> Iterator[float]:
    """When operators that compute began: those of threads that carry collectives, and of collectives, are others."""
    carrying = {event.thread for event in events if CARRIER[False].match(event.name)}
    until = 0.0
    for event in events:
        if COMMUNICATING.search(event.name) or LABEL.match(event.name):
            until = max(until, event.time_range.end)
        elif event.name.startswith("aten::") and event.thread not in carrying and event.time_range.start >= until:
            yield event.time_range.start


def _at(spans: Sequence[_Span], moment: float) -> _Span | None:
    return next((span for span in spans if span.begin <= moment <= span.end), None)


def _carried(events: Sequence[Any], on_gpu: bool) -> dict[float, tuple[float, float]]:
    """By the moment at which a flight was sent, for how many microseconds it was carried, and exposed on a GPU."""
    is_computing = (
        [each for each in events if _is_kernel(each) and not CARRIER[True].match(each.name)] if on_gpu else []
    )
    computing = _union([each.time_range for each in is_computing])
    sent = [e.time_range for e in events if (label := LABEL.match(e.name)) and label[3] == SENT]
    found: dict[float, tuple[float, float]] = {}
    for each in carried_collectives(events, on_gpu):
        called, carrier = each.called, each.range
        flight = None if called is None else next((one for one in sent if one.start <= called <= one.end), None)
        if flight is not None:
            hidden = sum(max(0.0, min(carrier.end, end) - max(carrier.start, begin)) for begin, end in computing)
            found[flight.start] = carrier.elapsed_us(), carrier.elapsed_us() - hidden
    return found


def _is_kernel(event: Any) -> bool:
    """Whether it ran on a GPU; annotations stand there, too, each as long as what it is about."""
    return str(event.device_type).endswith("CUDA") and not event.is_user_annotation


def _union(ranges: Sequence[Any]) -> list[tuple[float, float]]:
    """Ranges, sorted by when they begin, in which there is no other."""
    found: list[tuple[float, float]] = []
    for each in ranges:
        if found and each.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], each.end)
        else:
            found.append((each.start, each.end))
    return found
