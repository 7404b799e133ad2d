"""A fleet's schedule as an SVG picture that needs nothing else: a row per device, a colour per job."""

from __future__ import annotations

from html import escape
from itertools import groupby

from planner.base.formatting import in_duration
from planner.fleet.schedule import FleetSchedule

WIDTH, LEFT, TOP = 1000, 40, 28
HIGH = 512
"""So high are all rows together at most."""
HUE = 137.5
"""Degrees between the hues of one job and the next: the golden angle, so that neighbours differ."""


def svg(found: FleetSchedule) -> str:
    """Boxes of jobs on devices over time, darker while they are moved; what each is stands under the pointer."""
    devices = found.cluster.world_size
    high, scale = min(22.0, HIGH / devices), (WIDTH - LEFT) / found.last_end_s
    bottom = TOP + devices * high
    title = f"{len(found.jobs)} jobs on {devices} devices, {in_duration(found.mean_completion_s)} on average"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 20:g}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="11" fill="#7b8698">',
        f'<text x="0" y="14" font-size="13" font-weight="600">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT}" height="{devices * high:g}" fill="#8a94a626"/>',
    ]
    colours = {job.name: f"hsl({number * HUE % 360:.0f} 45% 52%)" for number, job in enumerate(found.jobs)}
    for each in found.segments:
        told = (
            f"{each.job.name}: {each.allocation.devices} devices, batch {each.allocation.batch}, "
            f"{in_duration(each.start_s)} to {in_duration(each.end_s)}"
        )
        for rows in _runs(each.devices):
            x, y = LEFT + each.start_s * scale, TOP + rows[0] * high
            wide, tall = (each.end_s - each.start_s) * scale, len(rows) * high
            box = f'x="{x:.2f}" y="{y:.2f}" height="{tall:.2f}"'
            parts.append(
                f'<rect {box} width="{wide:.2f}" fill="{colours[each.job.name]}" stroke="#fff" stroke-width=".5">'
                f"<title>{escape(told)}</title></rect>"
            )
            if each.moving_s:
                parts.append(f'<rect {box} width="{each.moving_s * scale:.2f}" fill="#0006"/>')
            if wide > 7 * len(each.job.name) and tall >= 12:
                where = f'x="{x + wide / 2:.1f}" y="{y + tall / 2 + 4:.1f}" text-anchor="middle"'
                parts.append(f'<text {where} fill="#fff">{escape(each.job.name)}</text>')
    for device in range(0, devices, found.cluster.spans[0]):
        parts.append(f'<text x="{LEFT - 6}" y="{TOP + device * high + 10:g}" text-anchor="end">{device}</text>')
    parts.append(f'<text x="{LEFT}" y="{bottom + 14:g}">0</text>')
    parts.append(f'<text x="{WIDTH}" y="{bottom + 14:g}" text-anchor="end">{in_duration(found.last_end_s)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _runs(devices: tuple[int, ...]) -> list[list[int]]:
    """Devices that lie next to one another, together."""
    return [[device for _, device in run] for _, run in groupby(enumerate(devices), key=lambda at: at[1] - at[0])]
