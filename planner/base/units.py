"""Quantities as people write them, and frozen descriptions whose errors name the field, the value and the way out.

``"80 GiB"``, ``"25 GB/s"``, ``"200 Gb/s"``, ``"312 TFLOP/s"`` and ``"5 us"`` are read into bytes, bytes per second,
operations per second and seconds.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from planner.base.errors import ClusterError

_SMALL = {"": "1", "m": "1e-3", "u": "1e-6", "µ": "1e-6", "μ": "1e-6", "n": "1e-9"}
_LARGE = {"": "1", "k": "1e3", "K": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15", "E": "1e18"} | {
    f"{letter}i": str(1024**power) for power, letter in enumerate("KMGTP", start=1)
}
_PER_S = {"B/s": "1", "Bps": "1", "b/s": "0.125", "bps": "0.125", "bit/s": "0.125"}
_FLOPS = dict.fromkeys(("FLOP/s", "FLOPs/s", "FLOPS", "FLOPs"), "1")


def _quantity(value: object, units: Mapping[str, str], prefixes: Mapping[str, str]) -> object:
    """A number in base units from text such as ``"25 GB/s"``; anything that is not text passes unchanged."""
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "").replace("_", "")
    for unit, scale in units.items():
        for prefix, factor in prefixes.items():
            number = text.removesuffix(prefix + unit)
            if number != text and (parsed := _decimal(number)) is not None:
                return float(parsed * Decimal(scale) * Decimal(factor))
    # YAML reads 1e9 (no dot) as text: a bare number in exponent form is in base units.
    if "e" in text.lower() and (parsed := _decimal(text)) is not None:
        return float(parsed)
    raise ValueError("not a number with a unit that is known here")


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _whole(value: object) -> object:
    """A float that counts bytes, as an int."""
    return round(value) if isinstance(value, float) and math.isfinite(value) else value


def _frozen(value: object) -> object:
    """Lists, as YAML and JSON have them, as tuples at any depth."""
    return tuple(_frozen(each) for each in value) if isinstance(value, list | tuple) else value


Bytes = Annotated[
    int,
    Field(lt=2**63),
    BeforeValidator(_whole),
    BeforeValidator(lambda v: _quantity(v, {"B": "1", "bytes": "1"}, _LARGE)),
]
BytesPerS = Annotated[float, BeforeValidator(lambda v: _quantity(v, _PER_S, _LARGE))]
FlopsPerS = Annotated[float, BeforeValidator(lambda v: _quantity(v, _FLOPS, _LARGE))]
Seconds = Annotated[float, BeforeValidator(lambda v: _quantity(v, {"s": "1"}, _SMALL))]
Count = Annotated[float, BeforeValidator(lambda v: _quantity(v, {}, {}))]
Fraction = Annotated[float, Field(gt=0, le=1, examples=["0.8"])]
DEEPEST, MOST = 20, 10**6
"""How many lists and fields lie within one another in a description at most, and how many values it has."""
FROZEN = BeforeValidator(_frozen)
"""Validator of a field that holds tuples: lists are taken too."""


class Described(BaseModel):
    """A frozen, strict part of a description whose errors are :class:`ClusterError`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ClusterError("\n".join(_complaints(type(self), error))) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise ClusterError(
            f"{type(self).__name__} cannot be changed, so that plans of it stay true: make another one with "
            f".model_copy(update={{{name!r}: {value!r}}})"
        )


def _complaints(model: type[BaseModel], error: ValidationError) -> Iterable[str]:
    """One line per wrong field: its name, its value, the way out."""
    problems = error.errors()
    for problem in problems:
        inside = [each["loc"] for each in problems if len(each["loc"]) > len(problem["loc"])]
        if any(place[: len(problem["loc"])] == problem["loc"] for place in inside):
            continue  # what is wrong with the whole follows from a part that is wrong
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"]).lstrip(".")
        name = str(problem["loc"][0]) if problem["loc"] else ""
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ClusterError):  # a nested part, or a check of several fields, has explained itself
            yield from (f"{path}.{line}".lstrip(".") for line in str(cause).split("\n"))
        elif problem["type"] == "extra_forbidden":
            yield f"{path}: there is no such field; {nearest(name, model.model_fields)}"
        else:
            examples = model.model_fields[name].examples
            way_out = f"; write for example {name}: {examples[0]}" if examples else ""
            if problem["type"] == "missing":
                yield f"{path} is missing{way_out}"
            else:
                yield f"{path} is {problem['input']!r}: {_expected(problem)}{way_out}"


_EXPECTED = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be less than or equal to {le}",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "literal_error": "must be {expected}",
    "tuple_type": "must be a list",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "model_type": "must be a mapping with fields",
    "value_error": "{error}",
}
"""What a field takes, in our words, by the kind of complaint."""


def _expected(problem: Mapping[str, Any]) -> str:
    """What a field takes, where it was given something else."""
    words = _EXPECTED.get(problem["type"])
    return "cannot be read" if words is None else words.format(**problem.get("ctx", {}))


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` and what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"there are: {', '.join(names)}"


def check_data(data: object) -> None:
    """Refuse what no description can hold: a key that is not text, half a character, lists without end."""
    seen = 0
    waiting = [(data, 0)]
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if depth > DEEPEST or seen > MOST:
            what = f"over {DEEPEST} lists or fields within one another" if depth > DEEPEST else f"over {MOST:,} values"
            raise ClusterError(f"this has {what}, and a description has few: write it anew")
        if isinstance(value, Mapping):
            for key, each in value.items():
                if not isinstance(key, str):
                    raise ClusterError(f"{key!r} cannot be the name of a field; field names are text")
                waiting += [(key, depth), (each, depth + 1)]
        elif isinstance(value, list | tuple):
            waiting += [(each, depth + 1) for each in value]
        elif isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ClusterError(f"{value!a} holds half a character: write the text anew") from error
