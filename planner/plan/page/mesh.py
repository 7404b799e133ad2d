"""The mesh: its axes with the links that they cross, and as many ranks as can be told apart, drawn."""

from __future__ import annotations

import math
from html import escape

from planner.base.formatting import in_seconds
from planner.cost.cluster import ClusterSpec
from planner.ir.layout import MICRO, Mesh
from planner.plan.document.document import Document
from planner.plan.page.parts import axis_chip, pill
from planner.plan.report.summary import micro_batched, offloads, outputs, stages

MOST_RANKS = 256
"""So many ranks are drawn at most."""
ACROSS = 16
"""So many of them stand beside or below one another at most."""


def mesh_card(document: Document) -> str:
    """The axes, the ranks, the links, and what runs where."""
    micro_batches = "" if document.pipeline is None else f"<p>{escape(micro_batched(document))}</p>"
    moves = f"<p>offload: {escape(offloads(document))}</p>" if document.transfer_schedules else ""
    moves += f"<p>outputs: {escape(outputs(document))}</p>" if document.discards else ""
    if document.pipeline is not None and document.pipeline.ranks > 1:
        micro_batches += "".join(f"<p>stage {escape(own)}: {escape(text)}</p>" for own, text in stages(document))
    links = "".join(f"<li>{escape(line)}</li>" for line in _links(document.cluster))
    mesh, node = document.mesh.micro_batched(1), document.cluster.spans[0]
    stages_of = 1 if document.pipeline is None else document.pipeline.ranks
    told = f'<p class="soft">Each of {stages_of} pipeline ranks is a mesh:</p>' if stages_of > 1 else ""
    nodes = -(-mesh.size // node)
    shades = '<p class="soft">one shade a node</p>' if nodes > 1 and mesh.size <= MOST_RANKS else ""
    return (
        f'<section class="card mesh"><h2>Mesh</h2>{told}{ranks(mesh, node)}{_axes(document)}'
        f'{shades}{micro_batches}{moves}<ul class="links">{links}</ul></section>'
    )


def _axes(document: Document) -> str:
    """Each axis with a square for each of its positions, as far as they can be told apart, and the links it crosses."""
    names = document.mesh.names
    span, rows = document.cluster.world_size, []
    for name, size in document.sizes.items():
        crosses = ""
        if name != MICRO:
            crosses = _level(document.cluster, span)
            span //= size
        chip = axis_chip(f"{name} {size}", names.index(name)) if name in names else pill(f"{name} {size}")
        colour = f"s{names.index(name) % 3}" if name in names else ""
        squares = "<i></i>" * min(size, ACROSS) + ("…" if size > ACROSS else "")
        rows.append(
            f'<li>{chip}<span class="squares {colour}">{squares}</span><span class="soft">{escape(crosses)}</span></li>'
        )
    return f'<ul class="axes">{"".join(rows)}</ul>'


def _level(cluster: ClusterSpec, span: int) -> str:
    """Which links an axis crosses whose ranks lie in a group of so many."""
    names = [level.name for level in cluster.levels]
    at = next((at for at, size in enumerate(cluster.spans) if span <= size), 0)
    return f"across {names[at - 1]}s" if at else f"within a {names[0]}"


def _links(cluster: ClusterSpec) -> list[str]:
    """The levels of the network, innermost first."""
    unit, found = "devices", []
    for level in cluster.levels:
        if level.size > 1:
            speed = f"{level.bandwidth_bytes_per_s / 1e9:.4g} GB/s, {in_seconds(level.latency_s)}"
            found.append(f"{level.size} {unit} per {level.name}: {speed}")
        unit = f"{level.name}s"
    return found


def ranks(mesh: Mesh, node: int) -> str:
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
