"""Every format, by name."""

from __future__ import annotations

import re

from planner.base.errors import ConfigError
from planner.base.units import nearest
from planner.interchange import accelerate, deepspeed, fsdp2, huggingface, megatron, torchtitan
from planner.interchange.format import Format
from planner.interchange.parallelism import resolved

FORMATS: dict[str, Format] = {
    each.FORMAT.name: each.FORMAT for each in (fsdp2, huggingface, accelerate, torchtitan, megatron, deepspeed)
}


def format_of(name: str) -> Format:
    """The format of a name; raises :class:`ConfigError` where there is none."""
    if name not in FORMATS:
        raise ConfigError(f"there is no format {name!r}; {nearest(name, FORMATS)}")
    return FORMATS[name]


def stated_sizes(text: str, name: str | None, devices: int, default: tuple[int, int]) -> tuple[int, int]:
    """Batch and sequence that a configuration is for, as far as it can be read and says so."""
    form = guess(text) if name is None else format_of(name)
    try:
        found = resolved(form.read(text), devices, None)
    except ConfigError:
        return default
    return found.batch or default[0], found.sequence or default[1]


def guess(text: str) -> Format:
    """The format of a text, by the words that only it has.

    Raises:
        ConfigError: it is of none that is known, or of several.
    """
    found = [form for form in FORMATS.values() if any(re.search(rf"(?<![\w.-]){mark}", text) for mark in form.marks)]
    if len(found) != 1:
        told = f"may be {' or '.join(form.name for form in found)}" if found else "is of no format that is known here"
        raise ConfigError(f"the configuration {told}: say which with --format, one of {', '.join(FORMATS)}")
    return found[0]
