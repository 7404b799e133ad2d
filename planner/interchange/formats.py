"""Every format, by name."""

from __future__ import annotations

from planner.base.errors import ConfigError
from planner.base.units import nearest
from planner.interchange import accelerate, deepspeed, huggingface, megatron, torchtitan
from planner.interchange.format import Format

FORMATS: dict[str, Format] = {
    each.FORMAT.name: each.FORMAT for each in (huggingface, accelerate, torchtitan, megatron, deepspeed)
}


def format_of(name: str) -> Format:
    """The format of a name; raises :class:`ConfigError` where there is none."""
    if name not in FORMATS:
        raise ConfigError(f"there is no format {name!r}; {nearest(name, FORMATS)}")
    return FORMATS[name]
