"""What a format is: two functions, the fields they use, and the limits of the program that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from planner.base.errors import ConfigError
from planner.base.units import nearest
from planner.interchange.parallelism import WORDS, Lost, Parallelism, changed, told


@dataclass(frozen=True)
class Limit:
    """Something that a format cannot say, or that its program refuses.

    Attributes:
        why: which, for people, and where to say it instead, if anywhere.
        applies: whether a description asks for it.
        rounds: the nearest description that does not; the same one where it is only said elsewhere.
        about: the field that it is about, or what else, where it is said elsewhere.
        refused: a program that reads such a configuration fails; else there is no way to write one.
    """

    why: str
    applies: Callable[[Parallelism], bool]
    rounds: Callable[[Parallelism], Parallelism] = lambda description: description
    about: str = ""
    refused: bool = False


@dataclass(frozen=True)
class Format:
    """A format of configurations.

    Attributes:
        name: as ``--to`` takes it.
        tool: what reads it, with the version whose field names these are.
        suffix: what names of files end in.
        write: a description within the limits as text.
        read: text as a description; raises :class:`planner.base.errors.ConfigError`.
        fields: field of a description -> how the format calls it.
        limits: in the order in which they are looked at.
        note: how the text is used, in a line.
        even_stages: stages have equally many layers, unless they are said one by one.
        marks: words of which a text of this format has one, and no other format's has.
    """

    name: str
    tool: str
    suffix: str
    write: Callable[[Parallelism], str]
    read: Callable[[str], Parallelism]
    fields: Mapping[str, str]
    limits: tuple[Limit, ...]
    note: str
    marks: tuple[str, ...]
    even_stages: bool = False

    @property
    def elsewhere(self) -> set[str]:
        """Fields that code says, or the tool: a text of this format does not."""
        return {limit.about for limit in self.limits if limit.about in WORDS} - self.fields.keys()

    def round(self, description: Parallelism) -> tuple[Parallelism, list[Lost]]:
        """The nearest description that the format can say, and what is lost on the way."""
        lost = []
        for limit in self.limits:
            if not limit.applies(description):
                continue
            rounded = limit.rounds(description)
            what = "; ".join(changed(description, rounded))
            if not what:
                what = limit.about
            if what in WORDS:
                what = f"{WORDS[what]} {told(what, getattr(description, what))}"
            lost.append(Lost(what, limit.why))
            description = rounded
        return description, lost


# ---- reading ---------------------------------------------------------------------------------------------------------


def check_known(found: Collection[str], known: Collection[str], where: str) -> None:
    """Refuse names that a program does not know.

    Raises:
        ConfigError: names the first, and what is close.
    """
    for name in found:
        if name not in known:
            raise ConfigError(f"{where} has no field {name!r}; {nearest(str(name), known)}")


def take(data: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field of a mapping, of the type that it must have; raises :class:`ConfigError` where it is of another."""
    value = data.get(name, default)
    is_wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if value is not default and is_wrong:
        wanted = {int: "a whole number", bool: "true or false", str: "text", dict: "a mapping"}.get(kind, kind.__name__)
        raise ConfigError(f"{name!r} is {value!r}; it takes {wanted}")
    return value


def degree(data: Mapping[str, Any], name: str, default: int = 1) -> int:
    """A field that counts ranks or samples; raises :class:`ConfigError` unless it is a whole number from 1."""
    value: int = take(data, name, int, default)
    if value < 1 and value is not default:
        raise ConfigError(f"{name!r} is {value}; it is a whole number from 1")
    return value


def parse_json(text: str, what: str) -> dict[str, Any]:
    """A JSON object; raises :class:`ConfigError` where the text is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"this is no {what}: it is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"this is no {what}: it is a {type(found).__name__}, not an object")
    return found


def parse_yaml(text: str, what: str) -> dict[str, Any]:
    """A YAML mapping; raises :class:`ConfigError` where the text is none."""
    try:
        found = yaml.safe_load(text)
    except Exception as error:  # besides its own, the reader raises what a wrong number, date or tag makes it meet
        raise ConfigError(f"this is no {what}: it is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ConfigError(f"this is no {what}: it is a {type(found).__name__}, not a mapping")
    return found
