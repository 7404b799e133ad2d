"""The distinct blocks: what each of their operators does, communicates, takes and saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from planner.base.formatting import by_module, in_bytes, in_percent, in_seconds, recomputed
from planner.formulation.resharding import Collective
from planner.plan.document.detail import OpDetail
from planner.plan.document.document import Document
from planner.plan.page.parts import Cell, axis_chip, bar, call_lines, card, folded, layout_chips, table
from planner.plan.report.summary import BlockSummary, blocks, is_notable, op_calls, shared, stored, traffic

KEY = (
    "One line per operator that has parameters, does the heavy work or communicates. Layouts give one type per "
    "axis: <b>S(d)</b> sharded along dim d, <b>S(d,o)</b> each of o equal parts of it, <b>R</b> replicated with "
    "partial gradient, <b>I</b> replicated with whole gradient, <b>P</b> partial sums. Collectives run forward "
    "(→) and backward (←); bytes are what each rank passes in, over all instances of the block."
)


def blocks_card(document: Document) -> str:
    """All of them; the one that takes most is open."""
    summaries = blocks(document)
    heaviest = max(summaries, key=lambda block: block.share, default=None)
    cards = "".join(_block(document, block, block is heaviest) for block in summaries)
    return card("Distinct blocks", f'<p class="key">{KEY}</p>{cards}{_shared(document)}')


def _shared(document: Document) -> str:
    """What is converted once for several blocks, or several operators of one, and what that communicates."""
    rows: list[list[Cell]] = [
        [f"<code>{escape(leaf.name)}</code>", layout_chips(leaf.layout), call_lines(leaf.calls), in_percent(leaf.share)]
        for leaf in shared(document)
    ]
    if not rows:
        return ""
    return '<p class="key">read by several</p>' + table(["leaf", "as stored", "collectives", "of the step"], rows)


def _block(document: Document, block: BlockSummary, is_open: bool) -> str:
    plan = block.plan
    total = document.predicted.step_time_s
    uses = {"compute": block.compute_s, "communication": block.communication_s, "gradients": block.gradients_s}
    shares = bar(uses, total) if total else ""
    share = f'<span class="mini">{shares}{in_percent(block.share)}</span>' if block.detail.ops else "<span></span>"
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
        body += folded(f"all {len(block.detail.ops)} operators", _ops(document, block, block.detail.ops))
    parts = "".join(
        f'<p class="key">{escape(f"{level} keeps {by_module(names)}")}</p>' for level, names in plan.keeps.items()
    )
    opened = " open" if is_open else ""
    return f'<details class="block"{opened}><summary>{summary}</summary><div class="body">{parts}{body}</div></details>'


def _ops(document: Document, block: BlockSummary, ops: Mapping[str, OpDetail]) -> str:
    header: list[Cell] = [
        "operator",
        *(axis_chip(name, i) for i, name in enumerate(document.mesh.names)),
        "result",
        "parameters as stored",
        "collectives",
        ("time", "n"),
        ("saved", "n"),
    ]
    return table(header, (_op(document, block, name, op) for name, op in ops.items()))


def _op(document: Document, block: BlockSummary, name: str, op: OpDetail) -> list[Cell]:
    path, _, operator = name.rpartition(": ")
    label = f"<code>{escape(path)}</code> " if path else ""
    shape = "×".join(map(str, op.shape)) or "scalar"
    result = f'{layout_chips(op.results[0])} <span class="dim">{shape}</span>' if op.results else ""
    kept = "<br>".join(f"<code>{escape(short)}</code> {layout_chips(layout)}" for short, layout in stored(document, op))
    seconds = (op.forward_s + op.backward_s) * block.plan.count
    return [
        f'{label}<code class="soft">{escape(operator)}</code>',
        *(_strategy(word, i) for i, word in enumerate(op.meaning)),
        result,
        kept,
        call_lines(op_calls(op, block.plan.count)),
        (in_seconds(seconds) if seconds else "", "n"),
        (in_bytes(op.saved_bytes * block.plan.count) if op.saved_bytes else "", "n"),
    ]


def _strategy(word: str, axis: int) -> str:
    return f'<span class="chip">{escape(word)}</span>' if word == "whole" else axis_chip(word, axis)


def _traffic(calls: Sequence[tuple[Collective, int]]) -> str:
    if not calls:
        return ""
    rows: list[list[Cell]] = [
        [row.phase, escape(row.kind), escape(row.axis), (f"{row.calls:,}", "n"), (in_bytes(row.bytes_in), "n")]
        for row in traffic(calls)
    ]
    header: list[Cell] = ["phase", "kind", "axis", ("calls", "n"), ("bytes in, per rank", "n")]
    return folded(f"{sum(count for _, count in calls):,} collective calls", table(header, rows))


def _plain(document: Document, ops: Mapping[str, str]) -> str:
    """What a plan without details says."""
    header = ["operator", *map(escape, document.mesh.names)]
    rows = ([escape(name), *(escape(part.partition(":")[2]) for part in label.split())] for name, label in ops.items())
    return table(header, rows)
