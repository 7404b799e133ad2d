"""A plan as an HTML page that needs nothing else: no script, no font, no request.

:func:`fragment` is what a notebook shows, :func:`page` a file of its own. The style knows the light and
dark themes of the browser, JupyterLab and VS Code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from planner.base.errors import PlanError, ScheduleError
from planner.base.formatting import (
    MEMORY_USES,
    TIME_USES,
    by_module,
    in_bytes,
    in_count,
    in_percent,
    in_seconds,
    recomputed,
)
from planner.cost.cluster import ClusterSpec
from planner.formulation.resharding import Collective
from planner.ir.layout import Mesh
from planner.plan.document.detail import LeafDetail, OpDetail
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
    rebound,
    shared,
    stages,
    standing,
    stored,
    traffic,
)

DARK = """
  --ink: #e6e9ef; --soft: #a3adbd; --faint: #7c8799; --line: #2c333f; --card: #1b2029; --page: #14181f; --well: #262d38;
  --a0: #7fb0ff; --a1: #f3a95c; --a2: #5fd3b0; --a0-bg: #1d2f4d; --a1-bg: #44301a; --a2-bg: #17392f;
  --u0: #5b8fe8; --u1: #e39a4c; --u2: #d8705f; --u3: #45b596; --u4: #a587da; --u5: #78828f;
  --warn: #f0c560; --warn-bg: #3a2f12; --good: #63d3a0; --good-bg: #15392a; --bad: #f0867a;
"""
MOST_RANKS = 256
"""So many ranks are drawn at most."""
ACROSS = 16
"""So many of them stand beside or below one another at most."""
Cell = str | tuple[str, str]


def page(document: Document, beside: str = "") -> str:
    """A whole page.

    Args:
        beside: HTML that stands below the head.
    """
    title = escape(f"{document.model['class']} on {document.cluster.name}")
    body = "margin:0;padding:24px 12px;background:#f6f7fa"
    dark = "@media (prefers-color-scheme: dark) { body { background: #14181f !important; } }"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style>{dark}</style></head>\n<body style="{body}">\n{fragment(document, beside)}\n</body></html>\n'
    )


def fragment(document: Document, beside: str = "") -> str:
    """An element to put into a page; see :func:`page`."""
    parts = [
        _head(document),
        _note(document),
        beside,
        f'<div class="top"><div class="bars">{step_card(document)}{memory_card(document)}</div>{_mesh(document)}</div>',
        _timeline(document),
        _blocks(document),
        f'<div class="two">{_collectives(document)}{_search(document)}</div>',
        _leaves(document),
    ]
    return styled("\n".join(filter(None, parts)))


def styled(html: str) -> str:
    """An element with the report's style."""
    return f'<div class="autopar"><style>{_style()}</style>\n{html}</div>'


def _style() -> str:
    """The style sheet, with the dark theme wherever a dark theme announces itself."""
    sheet = resources.files("planner.plan.report").joinpath("style.css").read_text(encoding="utf-8")
    themes = 'body[data-jp-theme-light="false"] .autopar, body.vscode-dark .autopar'
    light = 'body[data-jp-theme-light="true"] .autopar, body.vscode-light .autopar'
    media = f"@media (prefers-color-scheme: dark) {{ .autopar:not(:is({light})) {{ {DARK} }} }}"
    return sheet.replace("/*DARK*/", f"{media}\n{themes} {{ {DARK} }}")


# ---- the head --------------------------------------------------------------------------------------------------------


def _head(document: Document) -> str:
    cluster, search, model = document.cluster, document.search, document.model
    proven = search.status == "optimal"
    told = (
        f"optimal {document.qualified}".rstrip()
        if proven
        else f"at most {search.gap * 100:.1f} % from the best {document.limited}".rstrip()
    )
    if document.rebinding is not None and document.rebinding.bound_by == "arithmetic":
        told = "rebound"
    pills = [_pill(told, "good" if proven and not document.qualified else "warn")]
    pills += [_pill(f"pinned: {each}") for each in pinned(document)]
    devices = f"{cluster.world_size} × {escape(cluster.device.kind)}"
    return (
        f'<div class="head"><h1>{escape(str(model["class"]))}</h1>{"".join(pills)}</div>'
        f'<div class="sub">{in_count(int(model["parameters"]))} parameters on {escape(cluster.name)}: {devices}, '
        f"{escape(cluster.backend)}{f'<br>{escape(said)}' if (said := dtypes(document)) else ''}</div>"
        f'<p class="sentence">{escape(sentence(document))}</p>'
    )


def _pill(text: str, tone: str = "") -> str:
    return f'<span class="pill {tone}">{escape(text)}</span>'


def _note(document: Document) -> str:
    came = "<br>".join(map(escape, rebound(document)))
    notes = f'<div class="note"><b>Rebound</b> {came}</div>' if came else ""
    notes += "".join(f'<div class="note">{escape(note)}</div>' for note in document.notes)
    if not document.coverage:
        return notes
    ops = ", ".join(f"{times} × <code>{escape(op)}</code>" for op, times in document.coverage.items())
    return (
        f'{notes}<div class="note"><b>Not in the op table</b>, so computed whole on every rank: {ops}. '
        "See docs/adding_an_op.md.</div>"
    )


# ---- mesh ------------------------------------------------------------------------------------------------------------


def _mesh(document: Document) -> str:
    chips = enumerate(document.sizes.items())
    axes = "".join(f'<span class="chip a{i % 3}">{escape(name)} {size}</span> ' for i, (name, size) in chips)
    micro_batches = "" if document.pipeline is None else f"<p>{escape(micro_batched(document))}</p>"
    moves = f"<p>offload: {escape(offloads(document))}</p>" if document.transfer_schedules else ""
    moves += f"<p>outputs: {escape(outputs(document))}</p>" if document.discards else ""
    if document.pipeline is not None and document.pipeline.ranks > 1:
        micro_batches += "".join(f"<p>stage {escape(own)}: {escape(text)}</p>" for own, text in stages(document))
    links = "".join(f"<li>{escape(line)}</li>" for line in _links(document.cluster))
    drawing = _drawing(document.mesh.micro_batched(1), document.cluster.spans[0])
    nodes = -(-document.mesh.micro_batched(1).size // document.cluster.spans[0])
    shades = '<p class="soft">one shade a node</p>' if nodes > 1 and document.mesh.size <= MOST_RANKS else ""
    told = f"{shades}{micro_batches}{moves}"
    return f'<div class="card mesh"><h2>Mesh</h2>{drawing}<div>{axes}</div>{told}<ul class="links">{links}</ul></div>'


def _links(cluster: ClusterSpec) -> list[str]:
    """The levels of the network, innermost first."""
    unit, found = "devices", []
    for level in cluster.levels:
        if level.size > 1:
            speed = f"{level.bandwidth_bytes_per_s / 1e9:.4g} GB/s, {in_seconds(level.latency_s)}"
            found.append(f"{level.size} {unit} per {level.name}: {speed}")
        unit = f"{level.name}s"
    return found


def _drawing(mesh: Mesh, node: int) -> str:
    """Ranks in tables, one shade a node: of the last two axes the longer to the right and the other downwards; what is
    more than :data:`ACROSS`, and other axes, in further tables, so that the drawing is at most about so many ranks
    across and down.
    """
    if mesh.size > MOST_RANKS:
        return f'<p class="soft">{mesh.size:,} devices in nodes of {node:,}</p>'
    *outer, rows, columns = (*(1, 1), *mesh.sizes)
    names = ("", "", *mesh.names)[-2:]
    is_turned = rows > columns
    if is_turned:
        rows, columns, names = columns, rows, names[::-1]
    across = min(columns, ACROSS)
    lines = -(-columns // across)
    down = min(rows, max(1, ACROSS // lines))
    parts = -(-rows // down)
    tables = math.prod(outer) * parts
    beside = min(tables, max(1, ACROSS // across))
    cell, gap, space, top = (34 if across * beside <= 8 else 22), 4, 10, 18
    row_height = lines * (cell + gap) + (space if lines > 1 else 0)
    left = 18 if names[0] and rows > 1 else 2
    table_width, table_height = across * (cell + gap) + space, down * row_height + space
    width, height = left + beside * table_width - space, top + -(-tables // beside) * table_height - space
    found = [f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="mesh">']
    found.append(f'<text x="{left}" y="11">{escape(names[1])} →</text>')
    if names[0] and rows > 1:
        middle = top + (table_height - space) / 2
        found.append(
            f'<text x="11" y="{middle}" transform="rotate(-90 11 {middle})" text-anchor="middle">'
            f"← {escape(names[0])}</text>"
        )
    for number in range(mesh.size):
        block, place = divmod(number, rows * columns)
        row, column = divmod(place, rows)[::-1] if is_turned else divmod(place, columns)
        part, row = divmod(row, down)
        table_row, table = divmod(block * parts + part, beside)
        line, column = divmod(column, across)
        x = left + table * table_width + column * (cell + gap)
        y = top + table_row * table_height + row * row_height + line * (cell + gap)
        shade = 0.95 if number // node % 2 == 0 else 0.6
        found.append(
            f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" rx="5" fill="var(--u0)" opacity="{shade}"/>'
            f'<text class="rank" x="{x + cell / 2}" y="{y + cell / 2 + 4}" text-anchor="middle">{number}</text>'
        )
    return "".join(found) + "</svg>"


# ---- bars ------------------------------------------------------------------------------------------------------------


def _bar(uses: Mapping[str, float], total: float, kind: str = "") -> str:
    parts = [
        f'<i class="u{i % 6}" style="width:{100 * value / total:.2f}%" title="{escape(name)}"></i>'
        for i, (name, value) in enumerate(uses.items())
        if value and total
    ]
    return f'<div class="bar {kind}">{"".join(parts)}</div>'


def _legend(uses: Mapping[str, float], total: float, show: Any, hints: Mapping[str, str]) -> str:
    parts = [
        f'<span title="{escape(hints.get(name, ""))}"><i class="u{i % 6}"></i>{escape(name)} <b>{show(value)}</b> '
        f"{in_percent(value / total)}</span>"
        for i, (name, value) in enumerate(uses.items())
        if value and total
    ]
    return f'<div class="legend">{"".join(parts)}</div>'


def step_card(document: Document) -> str:
    """What a step takes, and for what."""
    predicted = document.predicted
    return (
        f'<div class="card"><div class="figure"><b>{in_seconds(predicted.step_time_s)}</b>'
        f"<span>predicted for one step</span></div>{_bar(predicted.time_s, predicted.step_time_s)}"
        f"{_legend(predicted.time_s, predicted.step_time_s, in_seconds, TIME_USES)}</div>"
    )


def memory_card(document: Document) -> str:
    """What the fullest device holds, and of what."""
    predicted, device = document.predicted, document.cluster.device
    limit, peak = device.usable_bytes, predicted.peak_bytes
    thin = "thin" if peak < limit / 3 else ""
    scale = f"<span>0</span><span>{in_bytes(limit)} usable of {in_bytes(device.memory_bytes)}</span>"
    return (
        f'<div class="card"><div class="figure"><b>{in_bytes(peak)}</b><span>predicted peak per device, '
        f"{in_percent(peak / limit)} of what is usable</span></div>"
        f"{_bar(predicted.memory_bytes, peak) if peak < limit / 3 else ''}"
        f'{_bar(predicted.memory_bytes, max(limit, peak), thin)}<div class="scale">{scale}</div>'
        f"{_legend(predicted.memory_bytes, peak, in_bytes, MEMORY_USES)}{_fullest(document)}</div>"
    )


def _fullest(document: Document) -> str:
    """When and where memory is fullest, and the largest tensors then."""
    predicted = document.predicted
    if not predicted.fullest_at:
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{in_bytes(size)}</td></tr>' for name, size in predicted.largest
    )
    table = f'<div class="wide"><table><tbody>{rows}</tbody></table></div>' if rows else ""
    return f'<p class="key">fullest in {escape(predicted.fullest_at)}{", with" if rows else ""}</p>{table}'


def _timeline(document: Document) -> str:
    """The schedule, where the step runs micro-batched; of a plan that was edited, why there is none."""
    if document.pipeline is None:
        return ""
    try:
        drawn = document.timeline().to_svg()
    except (PlanError, ScheduleError) as error:
        drawn = f"<p>{escape(str(error))}</p>"
    return f'<div class="card"><h2>Timeline</h2>{drawn}</div>'


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _blocks(document: Document) -> str:
    summaries = blocks(document)
    heaviest = max(summaries, key=lambda block: block.share, default=None)
    cards = "".join(_block(document, block, block is heaviest) for block in summaries)
    key = (
        "One line per operator that has parameters, does the heavy work or communicates. Layouts give one type per "
        "axis: <b>S(d)</b> sharded along dim d, <b>S(d,o)</b> each of o equal parts of it, <b>R</b> replicated with "
        "partial gradient, <b>I</b> replicated with whole gradient, <b>P</b> partial sums. Collectives run forward "
        "(→) and backward (←); bytes are what each rank passes in, over all instances of the block."
    )
    return f'<div class="card"><h2>Distinct blocks</h2><p class="key">{key}</p>{cards}{_shared(document)}</div>'


def _shared(document: Document) -> str:
    """What is converted once for several blocks, or several operators of one, and what that communicates."""
    rows: list[list[Cell]] = [
        [f"<code>{escape(leaf.name)}</code>", _layout(leaf.layout), _call_lines(leaf.calls), in_percent(leaf.share)]
        for leaf in shared(document)
    ]
    if not rows:
        return ""
    return '<p class="key">read by several</p>' + _table(["leaf", "as stored", "collectives", "of the step"], rows)


def _block(document: Document, block: BlockSummary, is_open: bool) -> str:
    plan = block.plan
    total = document.predicted.step_time_s
    uses = {"compute": block.compute_s, "communication": block.communication_s, "gradients": block.gradients_s}
    bar = _bar(uses, total) if total else ""
    share = f'<span class="mini">{bar}{in_percent(block.share)}</span>' if block.detail.ops else "<span></span>"
    moved = sum(row.bytes_in for row in traffic(block.detail.collectives))
    sent = f'<span class="n soft">{in_bytes(moved)} moved</span>' if moved else '<span class="n dim">no traffic</span>'
    again = recomputed(plan.recompute, plan.count)
    again = again and f' <span class="soft">{again}</span>'
    summary = (
        f'<span><span class="times">{plan.count} ×</span> <code>{escape(plan.name)}</code>{again}</span>'
        f"{share}{sent if block.detail.ops else '<span></span>'}"
    )
    if not block.detail.ops:
        body = _plain(document, plan.ops)
    else:
        notable = {name: op for name, op in block.detail.ops.items() if is_notable(op)}
        body = _ops(document, block, notable) if notable else ""
        body += _traffic(block.detail.collectives)
        body += (
            f'<details class="more"><summary>all {len(block.detail.ops)} operators</summary>'
            f"{_ops(document, block, block.detail.ops)}</details>"
        )
    parts = "".join(
        f'<p class="key">{escape(f"{level} keeps {by_module(names)}")}</p>' for level, names in plan.keeps.items()
    )
    body = parts + body
    opened = " open" if is_open else ""
    return f'<details class="block"{opened}><summary>{summary}</summary><div class="body">{body}</div></details>'


def _ops(document: Document, block: BlockSummary, ops: Mapping[str, OpDetail]) -> str:
    header: list[Cell] = [
        "operator",
        *(f'<span class="chip a{i % 3}">{escape(name)}</span>' for i, name in enumerate(document.mesh.names)),
        "result",
        "parameters as stored",
        "collectives",
        ("time", "n"),
        ("saved", "n"),
    ]
    return _table(header, (_op(document, block, name, op) for name, op in ops.items()))


def _op(document: Document, block: BlockSummary, name: str, op: OpDetail) -> list[Cell]:
    path, _, operator = name.rpartition(": ")
    label = f"<code>{escape(path)}</code> " if path else ""
    shape = "×".join(map(str, op.shape)) or "scalar"
    result = f'{_layout(op.results[0])} <span class="dim">{shape}</span>' if op.results else ""
    kept = "<br>".join(f"<code>{escape(short)}</code> {_layout(layout)}" for short, layout in stored(document, op))
    seconds = (op.forward_s + op.backward_s) * block.plan.count
    return [
        f'{label}<code class="soft">{escape(operator)}</code>',
        *(_strategy(word, i) for i, word in enumerate(op.meaning)),
        result,
        kept,
        _call_lines(op_calls(op, block.plan.count)),
        (in_seconds(seconds) if seconds else "", "n"),
        (in_bytes(op.saved_bytes * block.plan.count) if op.saved_bytes else "", "n"),
    ]


def _strategy(word: str, axis: int) -> str:
    tone = "" if word == "whole" else f"a{axis % 3}"
    return f'<span class="chip {tone}">{escape(word)}</span>'


def _layout(layout: str) -> str:
    types = layout.split()
    chips = (
        f'<span class="chip {f"a{i % 3}" if t[0] in "SP" else ""}">{escape(t)}</span>' for i, t in enumerate(types)
    )
    return f'<span class="lay">{"".join(chips)}</span>'


def _call_lines(calls: Iterable[tuple[Collective, int]]) -> str:
    return "".join(
        f'<span class="call" title="{row.phase}"><span class="dir">{"→" if row.phase == "forward" else "←"}</span>'
        f'{escape(row.kind)} <span class="soft">{escape(row.axis)}</span> {in_bytes(row.bytes_in)}</span>'
        for row in traffic(calls)
    )


def _traffic(calls: Sequence[tuple[Collective, int]]) -> str:
    if not calls:
        return ""
    total = sum(count for _, count in calls)
    return f'<details class="more"><summary>{total} collective calls</summary>{_traffic_table(calls)}</details>'


def _plain(document: Document, ops: Mapping[str, str]) -> str:
    """What a plan without details says."""
    header = ["operator", *map(escape, document.mesh.names)]
    rows = ([escape(name), *(escape(part.partition(":")[2]) for part in label.split())] for name, label in ops.items())
    return _table(header, rows)


# ---- tables below ----------------------------------------------------------------------------------------------------


def _traffic_table(calls: Iterable[tuple[Collective, int]]) -> str:
    return _table(
        ["phase", "kind", "axis", ("calls", "n"), ("bytes in, per rank", "n")],
        (
            [row.phase, escape(row.kind), escape(row.axis), (f"{row.calls:,}", "n"), (in_bytes(row.bytes_in), "n")]
            for row in traffic(calls)
        ),
    )


def _collectives(document: Document) -> str:
    calls = document.predicted.calls
    body = _traffic_table(calls) if calls else '<p class="soft">None: one device computes everything.</p>'
    return f'<div class="card"><h2>Collectives of one step</h2>{body}</div>'


def _search(document: Document) -> str:
    search = document.search
    steps = ", ".join(f"{escape(name)} {in_seconds(seconds)}" for name, seconds in search.seconds.items())
    rows: list[list[Cell]] = []
    for candidate in search.candidates:
        seconds, bound = candidate["step_time_s"], candidate["bound_s"]
        status, _ = candidate_cells(candidate)
        rows.append([
            escape(candidate_name(candidate)),
            escape(status) if bound is not None else f'<span style="color:var(--bad)">{escape(status)}</span>',
            (in_seconds(seconds) if seconds is not None else "", "n"),
            (in_seconds(bound) if bound is not None else "∞", "n"),
            (in_bytes(candidate["peak_bytes"]), "n"),
        ])  # fmt: skip
    header: list[Cell] = ["mesh", "answer", ("step", "n"), ("proven bound", "n"), ("peak", "n")]
    table = _table(header, rows) if rows else ""
    took = f'<p class="key">{in_seconds(counted(search.seconds))}: {steps}</p>' if steps else ""
    told = f'<p class="key">{escape(standing(document))}</p>' if len(search.candidates) > 1 else ""
    return f'<div class="card"><h2>Search</h2>{took}{told}{table}</div>'


def _leaves(document: Document) -> str:
    """Every parameter, buffer and input, folded away."""
    leaves = document.account.leaves
    sections = {"parameter": document.parameters, "buffer": document.buffers, "input": document.inputs}
    rows = [
        _leaf(kind, name, layout, leaves.get(name))
        for kind, entries in sections.items()
        for name, layout in entries.items()
    ]
    if not rows:
        return ""
    header: list[Cell] = [
        "",
        "name",
        "stored",
        "shape",
        ("number", "n"),
        ("bytes per device", "n"),
        ("gradient, optimizer", "n"),
    ]
    return (
        f'<div class="card"><details class="more"><summary>all {len(rows)} parameters, buffers and inputs</summary>'
        f"{_table(header, rows)}</details></div>"
    )


def _leaf(kind: str, name: str, layout: str, leaf: LeafDetail | None) -> list[Cell]:
    row: list[Cell] = [
        f'<span class="dim">{kind}</span>',
        f"<code>{escape(name)}</code>",
        _layout(layout),
    ]
    if leaf is None:
        return [*row, "", "", "", ""]
    return [
        *row,
        f'<span class="soft">{"×".join(map(str, leaf.shape)) or "scalar"} {escape(leaf.dtype)}</span>',
        (str(leaf.count), "n"),
        (in_bytes(leaf.local_bytes * leaf.count), "n"),
        (in_bytes(leaf.state_bytes * leaf.count) if leaf.state_bytes else "", "n"),
    ]


def _table(header: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; a cell is HTML, or HTML and a class."""

    def cell(tag: str, content: Cell) -> str:
        html, kind = content if isinstance(content, tuple) else (content, "")
        return f'<{tag} class="{kind}">{html}</{tag}>' if kind else f"<{tag}>{html}</{tag}>"

    head = "".join(cell("th", content) for content in header)
    body = "".join(f"<tr>{''.join(cell('td', content) for content in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
