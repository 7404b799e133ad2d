"""What computed while a collective or message was on its way, and how long somebody waited for it: read from a trace.

A trace of torch's profiler has, on one clock, when flights were sent and waited for
(:mod:`autopar.runtime.spmd.flight`), when blocks began, and actions of a pipeline's schedule (:func:`mark`), and every
operator. One of these computes beside a flight if most of its operators ran between the two; those that cut and join
parameters for collectives do not count. Collectives are held against blocks, and messages against actions.
Over gloo what is waited for is exposed: nothing else runs on the rank. On a GPU the stream waits, so exposed is the
time of a collective's kernel in which no other kernel runs.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch._C._profiler import _RecordFunctionFast as shown_as

from autopar.runtime.spmd.carried_collectives import CARRIER, carried_collectives
from autopar.runtime.spmd.flight import LABEL, SENT
from planner.analysis.overlaps import BlockOrAction, ObservedFlight, Overlap, Phase
from planner.solve.pipeline.schedule import Action

FORWARD, ENDS, BACKWARD = "forward", "forward ends", "backward"
MARK = re.compile(rf"block (\d+), ({FORWARD}|{ENDS}|{BACKWARD})$")
BEGIN, END = "begins", "ends"
ACTION = re.compile(rf"action (\d+)([FBIW])(-?\d+), ({BEGIN}|{END})$")
MESSAGES = ("send", "receive")
COMMUNICATING = re.compile(r"_(Gather|SumGradients|Complete|LocalParts)(Backward)?$")
"""Functions of autograd that hold a collective's own operators."""
LAST = "_LocalPartsBackward"
"""What runs when backward is over with all blocks."""


@dataclass(frozen=True)
class _Span:
    work: BlockOrAction
    phase: Phase
    begin: float
    end: float
    operators: tuple[float, ...]

    def mostly_within(self, begin: float, end: float) -> bool:
        inside = bisect(self.operators, end) - bisect(self.operators, begin)
        return 2 * inside > len(self.operators)


def mark(work: BlockOrAction, what: str) -> None:
    """Note in the trace that a block or an action begins or ends."""
    with shown_as(f"block {work}, {what}" if isinstance(work, int) else f"action {work}, {what}"):
        pass


def overlaps_seen(events: Sequence[Any], on_gpu: bool) -> list[ObservedFlight]:
    """Every flight of a step, in the order in which they were sent.

    Not those of the parts of a backward in two, in which blocks do not run as a whole.

    Args:
        events: of torch's profiler.
    """
    events = sorted(events, key=lambda each: each.time_range.start)
    operators, flights = [*_operators(events)], dict[str, list[Any]]()
    blocks, actions = _blocks(events, operators), _actions(events, operators)
    for event in events:
        if found := LABEL.match(event.name):
            flights.setdefault(found[1], []).append((found, event.time_range))
    carried = _carried(events, on_gpu)
    seen = []
    for (label, sent), (_, waited) in (each for each in flights.values() if len(each) == 2):
        kind, message = label[2], label[3]
        spans = blocks if message is None else actions
        whose = _of(kind, message, blocks, actions, sent.start, waited.start)
        if whose is None:
            continue
        beside = (span.work for span in spans if span.mostly_within(sent.start, waited.start))
        carried_us, exposed_us = carried.get(sent.start, (None, None))
        if not on_gpu and (carried_us is not None or message is not None):
            exposed_us = waited.elapsed_us()
        seen.append(ObservedFlight(Overlap(kind, *whose, tuple(beside)), _in_s(carried_us), _in_s(exposed_us)))
    return seen


def _of(
    kind: str, message: str | None, blocks: Sequence[_Span], actions: Sequence[_Span], sent: float, waited: float
) -> tuple[Phase, BlockOrAction | None] | None:
    """In which direction a flight is, and of what; ``None``: of what is not known."""
    if message is not None:
        found = _action(*re.findall(r"-?\d+|[FB]", message))
        return "forward" if found.kind == "F" else "backward", found
    # Gathers belong to the block that waits for them, reductions to the one that sends them.
    moment = waited if kind == "all_gather" else sent
    if (span := _at(blocks, moment)) is not None:
        return span.phase, span.work
    return ("once", None) if actions and _at(actions, moment) is None else None


def _action(stage: str, kind: str, micro_batch: str) -> Action:
    return Action(int(stage), kind, int(micro_batch))


def _in_s(us: float | None) -> float | None:
    return None if us is None else us / 1e6


def _blocks(events: Sequence[Any], operators: Sequence[float]) -> list[_Span]:
    """Blocks forward and backward, in the order in which they ran, with the moments of their operators."""
    begun, ran = dict[int, float](), list[_Span]()
    last: tuple[int, float] | None = None

    def ends(at: float) -> None:
        if last is not None:
            ran.append(_span(last[0], "backward", last[1], at, operators))

    for event in events:
        at = event.time_range.start
        if event.name == LAST or ((action := ACTION.match(event.name)) and action[4] == END):
            ends(at)
            last = None
        elif (found := MARK.match(event.name)) is not None:
            block, what = int(found[1]), found[2]
            if what == FORWARD:
                begun[block] = at
            elif what == ENDS:
                ran.append(_span(block, "forward", begun[block], at, operators))
            elif last is None or block < last[0]:
                ends(at)
                last = block, at
    return ran


def _actions(events: Sequence[Any], operators: Sequence[float]) -> list[_Span]:
    """Actions in the order in which they ran; one that computes nothing is where it begins."""
    ran, begin = list[_Span](), 0.0
    for event in events:
        if (found := ACTION.match(event.name)) is None:
            continue
        at, action = event.time_range.start, _action(*found.groups()[:3])
        if found[4] == BEGIN:
            begin = at
            continue
        span = _span(action, "forward" if action.kind == "F" else "backward", begin, at, operators)
        ran.append(span if span.operators else replace(span, operators=(begin,)))
    return ran


def _span(work: BlockOrAction, phase: Phase, begin: float, end: float, operators: Sequence[float]) -> _Span:
    return _Span(work, phase, begin, end, tuple(operators[bisect(operators, begin) : bisect(operators, end)]))


def _operators(events: Sequence[Any]) -> Iterator[float]:
    """When operators that compute began: those of threads that carry collectives, and of collectives, are others."""
    carrying = {event.thread for event in events if CARRIER[False].match(event.name)}
    carrying -= {event.thread for event in events if MARK.match(event.name)}  # which exchange messages
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
    sent = [e.time_range for e in events if (label := LABEL.match(e.name)) and label[4] == SENT]
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
