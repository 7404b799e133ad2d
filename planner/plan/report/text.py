"""A plan on one page of monospaced text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.base.cpython import no_garbage
from planner.base.formatting import (
    by_module,
    in_bytes,
    in_paragraph,
    in_percent,
    in_seconds,
    in_shares,
    labelled,
    recomputed,
    sizes_text,
)
from planner.formulation.assignment import Assignment
from planner.formulation.float8 import MULTIPLE, may_scale
from planner.formulation.resharding import Collective
from planner.plan.document.detail import OpDetail
from planner.plan.document.document import Document
from planner.plan.report.sentence import sentence
from planner.plan.report.summary import (
    BlockSummary,
    blocks,
    candidate_cells,
    candidate_name,
    counted,
    dtypes,
    is_notable,
    micro_batched,
    offloads,
    op_calls,
    outputs,
    pinned,
    placed,
    rebound,
    shared,
    stages,
    standing,
    stored,
    traffic,
)

SHOWN = 16
"""So many candidates are listed."""
COMPILED = "what each distinct block computes between collectives, once for all of its instances"
LETTERS = (
    "layouts by axis: S(d) sharded along dim d, R and I replicated (R: gradient still to be summed), P partial sum"
)
"""What layouts are written in, in one line; see :mod:`planner.ir.layout`."""


@no_garbage()
def text(document: Document, width: int | None = None) -> str:
    """What was planned, what it costs, how every distinct block is laid out.

    Args:
        width: of a terminal; the last columns of a table that is wider come on lines below its rows.
    """
    parts = [
        _head(document),
        _blocks(document, width),
        _collectives(document),
        _candidates(document),
        _warnings(document),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def line(document: Document) -> str:
    """Model, cluster, mesh, and the two figures that matter most."""
    predicted, status = document.predicted, document.search.status
    if status == "optimal":
        status = f"{status} {document.qualified}".rstrip()
    return (
        f"{document.model['class']} on {document.cluster.name}: mesh {sizes_text(document.sizes)}, "
        f"step {_step(document)}, peak {in_bytes(predicted.peak_bytes)}, {status}"
    )


def _step(document: Document) -> str:
    """``"181.7 ms (170.2 ms to 195.0 ms)"``: with the interval in which it is expected, where steps were observed."""
    found = document.interval_s
    return in_seconds(document.predicted.step_time_s) + (
        "" if found is None else f" ({in_seconds(found[0])} to {in_seconds(found[1])})"
    )


def _head(document: Document) -> str:
    predicted, search, device = document.predicted, document.search, document.cluster.device
    proven = f" {document.qualified}" if document.qualified else ""
    proof = proven if search.status == "optimal" else f", at most {search.gap * 100:.1f} % from the best"
    proof += f" {document.limited}" if search.status != "optimal" and document.limited else ""
    if document.rebinding is not None and document.rebinding.bound_by == "arithmetic":
        proof += " by arithmetic alone"
    steps = ", ".join(f"{step} {seconds:.2f}" for step, seconds in search.seconds.items())
    if proof and search.time_limit_s is not None:
        steps += f"; limit {search.time_limit_s:g} s"
    pins = ", ".join(pinned(document))
    scales = document.pins.float8 is not None
    devices = f"{document.cluster.world_size} x {device.kind} ({document.cluster.backend})"
    rows = [
        *(("" if number else "rebound", in_paragraph(each)) for number, each in enumerate(rebound(document))),
        ("mesh", sizes_text(document.sizes)),
        *([("pinned", in_paragraph(pins))] if pins else []),
        *([("batches", in_paragraph(micro_batched(document)))] if document.pipeline is not None else []),
        *(_stages(document) if document.pipeline is not None and document.pipeline.ranks > 1 else []),
        *([("outputs", in_paragraph(outputs(document)))] if document.discards else []),
        *([("compile", in_paragraph(COMPILED))] if document.pins.compile else []),
        *([("float8", in_paragraph(_in_float8(document.assignment)))] if scales and document.assignment else []),
        *([("offload", in_paragraph(offloads(document)))] if document.transfer_schedules else []),
        *([("tables", in_paragraph(placed(document.tables, document)))] if document.tables is not None else []),
        *([("without", in_paragraph(document.search.left_out))] if document.search.left_out else []),
        *([("dtypes", in_paragraph(said))] if (said := dtypes(document)) else []),
        ("step", _step(document)),
        ("", in_shares(predicted.time_s, predicted.step_time_s, in_seconds)),
        (
            "memory",
            f"{in_bytes(predicted.peak_bytes)} of {in_bytes(device.usable_bytes)} usable "
            f"({in_percent(predicted.peak_bytes / device.usable_bytes)}) on the fullest device",
        ),
        ("", in_shares(predicted.memory_bytes, predicted.peak_bytes, in_bytes)),
        *([("", predicted.fullest)] if predicted.fullest_at else []),
        ("search", f"{search.status}{proof}, {counted(search.seconds):.2f} s" + (f" ({steps})" if steps else "")),
        *([("", in_paragraph(standing(document)))] if len(search.candidates) > 1 else []),
        *([("proof", in_paragraph(str(document.certificate)))] if document.assignment is not None else []),
    ]
    title = f"{document.model['class']}, {document.model['parameters']:,} parameters"
    told = in_paragraph(f"  {sentence(document)}", "  ")
    notes = [in_paragraph(f"! {note}", "  ") for note in document.notes]
    return "\n".join([f"{title}, on {document.cluster.name}: {devices}", told, *notes, labelled(rows)])


def _in_float8(assignment: Assignment) -> str:
    """How many of the linear layers that may multiply in float8 do."""
    space = assignment.space
    linear = [node for node in space.graph.operators if may_scale(space.training, space.decision_graph.blocks, node)]
    scaled = sum(space.scaling(node, assignment.choice(node)) is not None for node in linear)
    others = f"; sizes of the others on a rank are no multiples of {MULTIPLE}, or they are streamed"
    return (
        f"{scaled} of {len(linear)} linear layers in blocks that repeat multiply in float8, scaled "
        f"{space.training.float8}{others * (scaled < len(linear))}"
    )


def _stages(document: Document) -> list[tuple[str, str]]:
    rows = [in_paragraph(f"{own}: {text}", "   ") for own, text in stages(document)]
    return [("stages" if not number else "", row) for number, row in enumerate(rows)]


def _blocks(document: Document, width: int | None) -> str:
    header = ["block", *document.mesh.names, "result", "parameters as stored", "communicates"]
    rows: list[Sequence[str] | str] = []
    for block in blocks(document):
        share = f"   {in_percent(block.share)} of the step" if block.share else ""
        again = recomputed(block.plan.recompute, block.plan.count)
        rows.append(f"{block.plan.count} x {block.plan.name}{share}{again and '   ' + again}")
        kept = (f"    {level} keeps {by_module(names)}" for level, names in block.plan.keeps.items())
        rows += [in_paragraph(each, " " * 8) for each in kept]
        if not block.detail.ops:
            rows += [_plain_row(document, name, label) for name, label in block.plan.ops.items()]
            continue
        shown = {name: op for name, op in block.detail.ops.items() if is_notable(op)}
        for name, op in shown.items():
            rows += _rows(document, block, name, op)
        rest = len(block.detail.ops) - len(shown)
        if rest:
            rows.append(f"    and {rest} more that neither weigh nor communicate")
    leaves = shared(document)
    if leaves:
        part = sum(leaf.share for leaf in leaves)
        rows.append("read by several" + (f"   {in_percent(part)} of the step" if part else ""))
    for leaf in leaves:
        rows += _lines([f"    {leaf.name}", *("" for _ in document.mesh.names), "", leaf.layout], leaf.calls)
    return "\n".join([*([LETTERS] if document.account.blocks else []), _table(header, rows, width=width)])


def _rows(document: Document, block: BlockSummary, name: str, op: OpDetail) -> list[Sequence[str]]:
    """An operator: what it shards, gives, reads and communicates."""
    kept = ", ".join(f"{short} {layout}" for short, layout in stored(document, op))
    cells = [f"    {name}", *op.meaning, op.results[0] if op.results else "", kept]
    return _lines(cells, op_calls(op, block.plan.count))


def _lines(cells: Sequence[str], made: Sequence[tuple[Collective, int]]) -> list[Sequence[str]]:
    """A row, with its calls; those of backward stand on a line of their own if there is something forward."""
    calls: dict[str, list[str]] = {"forward": [], "backward": []}
    for row in traffic(made):
        calls[row.phase].append(f"{row.kind} {row.axis} {in_bytes(row.bytes_in)}")
    lines = [", ".join(calls["forward"])] if calls["forward"] else []
    lines += ["back: " + ", ".join(calls["backward"])] if calls["backward"] else []
    first, *more = lines or [""]
    return [[*cells, first], *([""] * len(cells) + [line] for line in more)]


def _plain_row(document: Document, name: str, label: str) -> Sequence[str]:
    strategies = dict(part.partition(":")[::2] for part in label.split(" "))
    return [f"    {name}", *(strategies.get(axis, "") for axis in document.mesh.names), "", "", ""]


def _collectives(document: Document) -> str:
    rows = [
        [f"  {row.phase}", row.kind, row.axis, f"{row.calls:,}", in_bytes(row.bytes_in)]
        for row in traffic(document.predicted.calls)
    ]
    if not rows:
        return "collectives per step: none"
    passed = "bytes from each rank" if document.pipeline is None else "bytes from a rank of every stage"
    return _table(["collectives per step", "kind", "axis", "calls", passed], rows, right=(3, 4))


def _candidates(document: Document) -> str:
    if len(document.search.candidates) < 2:
        return ""
    rows: list[Sequence[str] | str] = []
    for candidate in document.search.candidates[:SHOWN]:
        status, seconds = candidate_cells(candidate)
        needs = in_bytes(candidate["peak_bytes"])
        memory = needs if candidate["step_time_s"] is not None else f"at least {needs}"
        rows.append([f"  {candidate_name(candidate)}", status, seconds, memory])
    if len(document.search.candidates) > SHOWN:
        rows.append(f"  and {len(document.search.candidates) - SHOWN} more")
    return _table(["meshes", "", "step", "memory"], rows, right=(2, 3))


def _warnings(document: Document) -> str:
    if not document.coverage:
        return ""
    return "\n".join(
        ["not in the op table, computed whole on every rank (docs/adding_an_op.md):"]
        + [f"  {times} x {op}" for op, times in document.coverage.items()]
    )


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str] | str], right: Sequence[int] = (), width: int | None = None
) -> str:
    """Columns as wide as their widest cell; a row that is one text spans them all. Of a table that is wider than
    ``width`` the last columns come on lines below each row.
    """
    cells = [header, *(row for row in rows if not isinstance(row, str))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    beside = len(header)
    while width is not None and beside > 1 and sum(widths[:beside]) + 2 * (beside - 1) > width:
        beside -= 1

    def lines(row: Sequence[str] | str) -> Iterator[str]:
        if isinstance(row, str):
            yield row
            return
        padded = (
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row[:beside], widths, strict=False))
        )
        yield from filter(None, ["  ".join(padded).rstrip()])
        if row is not header:
            below = zip(header[beside:], row[beside:], strict=True)
            yield from (in_paragraph(f"        {name}: {cell}", " " * 10) for name, cell in below if cell)

    return "\n".join(line for row in [header, *rows] for line in lines(row))
