"""Encode: a plan document as JSON for people, and back.

What decides comes first, what was predicted of it last; whatever fits on a line is one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, get_args

from planner.cluster import ClusterSpec
from planner.conversion import Collective
from planner.detail import Account, BlockDetail, LeafDetail, Move, OpDetail
from planner.document import BlockPlan, Document, PipelinePlan, Search
from planner.errors import ClusterError, PlanError
from planner.exchange import Exchange
from planner.layout import Axis, Mesh
from planner.mesh import MAX_AXES
from planner.names import parse_runs, runs
from planner.predict import Prediction
from planner.quantity import nearest
from planner.timetable import Timetable
from planner.training import Gathers
from planner.turns import TurnTimes

FORMAT, VERSION = "autopar-plan", 2
WIDTH = 110
FIELDS = (
    *("format", "version", "model", "cluster", "optimizer_bytes_per_element", "pipeline", "timetable", "mesh", "pin"),
    *("inputs", "blocks", "parameters", "buffers", "values", "outputs", "coverage"),
    *("search", "predicted", "details", "leaves"),
)
BLOCK_FIELDS = {"name", "count", "at", "recompute", "keeps", "ops", "values"}


def encode(document: Document) -> dict[str, Any]:
    """A document as JSON values."""
    search, predicted, account = document.search, document.predicted, document.account
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": dict(document.model),
        "cluster": document.cluster.to_dict(),
        "optimizer_bytes_per_element": document.optimizer_bytes_per_element,
        **decisions(document),
        "search": {**asdict(search), "candidates": list(search.candidates)},
        "predicted": _prediction(predicted),
        "details": [
            {"ops": {name: _sparse(op) for name, op in d.ops.items()}, "collectives": _calls(d.collectives)}
            for d in account.blocks
        ],
        "leaves": {name: _sparse(leaf) for name, leaf in account.leaves.items()},
    }


def decisions(document: Document) -> dict[str, Any]:
    """The part that decides what is run: what a person edits, and what all ranks must agree on."""
    return {
        **({"pipeline": _pipeline(document.pipeline)} if document.pipeline is not None else {}),
        **({"timetable": _timetables(document.timetables)} if document.timetables else {}),
        "mesh": [asdict(axis) for axis in document.mesh.axes],
        "pin": dict(document.pin),
        "inputs": dict(document.inputs),
        "blocks": [
            {
                "name": b.name,
                "count": b.count,
                "at": runs(b.at),
                **({"recompute": dict(b.recompute)} if b.recompute else {}),
                **({"keeps": {level: list(names) for level, names in b.keeps.items()}} if b.keeps else {}),
                "ops": dict(b.ops),
                "values": dict(b.values),
            }
            for b in document.blocks
        ],
        "parameters": dict(document.parameters),
        "buffers": dict(document.buffers),
        "values": dict(document.values),
        "outputs": list(document.outputs),
        "coverage": dict(document.coverage),
    }


def decode(data: Any) -> dict[str, Any]:
    """The fields of the document that :func:`encode` wrote.

    Raises:
        PlanError: not a plan, of another version, or with a field missing or wrong.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError('this is no autopar plan: it lacks "format": "autopar-plan"')
    if data.get("version") != VERSION:
        raise PlanError(
            f"the plan is of version {data.get('version')!r}, this autopar reads version {VERSION}: plan again"
        )
    for name in data:
        if name not in FIELDS:
            raise PlanError(f"a plan has no field {name!r}: remove it; {nearest(str(name), FIELDS)}")
    return _read_document(data)


def _prediction(predicted: Prediction) -> dict[str, Any]:
    """A prediction as JSON; only a step in turns has its times, and only a pipeline exchanges."""
    found = {field.name: getattr(predicted, field.name) for field in fields(predicted)}
    found["collectives"] = _calls(predicted.collectives)
    found["exchanges"] = [{**_sparse(each), "calls": count} for each, count in predicted.exchanges]
    found["turns"] = None if predicted.turns is None else asdict(predicted.turns)
    return {name: value for name, value in found.items() if value or name not in ("exchanges", "turns")}


def _pipeline(pipeline: PipelinePlan) -> dict[str, Any]:
    """A pipeline as JSON; stages as runs of block numbers."""
    return {
        "schedule": pipeline.schedule,
        "ranks": pipeline.ranks,
        "virtual_stages": pipeline.virtual_stages,
        "stages": [runs(tuple(range(low, high))) for low, high in pairwise(pipeline.bounds)],
        "recompute": {level: runs(numbers) for level, numbers in pipeline.recompute.items()},
        "gathers": pipeline.gathers,
        "waits": pipeline.waits,
    }


def _timetables(tables: Iterable[Timetable]) -> Any:
    """The only timetable, or those of several ranks, as JSON."""
    found = [table.to_dict() for table in tables]
    return found[0] if len(found) == 1 else found


def _read_timetables(data: Any) -> tuple[Timetable, ...]:
    return tuple(map(Timetable.from_dict, data if isinstance(data, list) else [data]))


def _read_pipeline(data: Mapping[str, Any], default: Gathers) -> PipelinePlan:
    gathers: Gathers = data.get("gathers", default)
    if gathers not in get_args(Gathers):
        known = " or ".join(map(repr, get_args(Gathers)))
        raise ValueError(f'the pipeline\'s "gathers" is {gathers!r}, and takes {known}')
    # Before there was a choice, what each micro-batch gathered was waited for.
    waits = data.get("waits", gathers == "each")
    if not isinstance(waits, bool):
        raise ValueError(f'the pipeline\'s "waits" is {waits!r}, and takes true or false')
    stages = [parse_runs(text) for text in data["stages"]]
    numbers = [number for stage in stages for number in stage]
    if not stages or not all(stages) or numbers != list(range(len(numbers))):
        raise ValueError(f"the pipeline's stages are {data['stages']}, which is not every block once, in order")
    return PipelinePlan(
        data["schedule"],
        int(data["ranks"]),
        int(data["virtual_stages"]),
        (0, *(stage[-1] + 1 for stage in stages)),
        {level: parse_runs(text) for level, text in data["recompute"].items()},
        gathers,
        waits,
    )


def parse(text: str) -> Any:
    """JSON values from text; raises :class:`PlanError` where it breaks off, or holds NaN or infinity."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"this is not a whole plan: JSON ends or breaks at line {error.lineno}, column {error.colno} "
            f"({error.msg}); save the plan again"
        ) from error


def dump(value: Any) -> str:
    """JSON for people: whatever fits on a line is one line; raises ``ValueError`` on NaN and infinity."""
    return _dump(value, "") + "\n"


def _dump(value: Any, indent: str, used: int = 0) -> str:
    flat = json.dumps(value, allow_nan=False, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or len(indent) + used + len(flat) <= WIDTH:
        return flat
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _dump(item, inner) for item in value) + f"\n{indent}]"
    keys = {key: json.dumps(str(key), ensure_ascii=False) + ": " for key in value}
    items = [inner + keys[key] + _dump(item, inner, len(keys[key])) for key, item in value.items()]
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def _refuse_constant(text: str) -> None:
    raise PlanError(f"the plan holds {text}, which is not a number to plan with: restore it, or plan again")


def _calls(calls: Iterable[tuple[Collective, int]]) -> list[dict[str, Any]]:
    return [{**asdict(call), "calls": count} for call, count in calls]


def _sparse(value: Any) -> Any:
    """A dataclass as JSON without the fields that hold their default."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _sparse(getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default}
    return [_sparse(item) for item in value] if isinstance(value, tuple) else value


def _read_document(data: Mapping[str, Any]) -> dict[str, Any]:
    def field(name: str, read: Callable[[Any], Any]) -> Any:
        if name not in data:
            raise PlanError(f"the plan lacks the field {name!r}; restore it, or plan again")
        try:
            return read(data[name])
        except KeyError as error:
            raise PlanError(f"the plan's field {name!r} lacks {error}; restore it, or plan again") from error
        except ClusterError as error:
            raise PlanError(f"the plan's {name}: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"the plan's field {name!r} is wrong: {error}; restore it, or plan again") from error

    # Before there was a choice, parameters were gathered once a step, unless they came from elsewhere.
    gathers: Gathers = "each" if "timetable" in data else "once"
    pipeline, pin = data.get("pipeline"), data.get("pin")
    is_old = isinstance(pipeline, Mapping) and "gathers" not in pipeline
    if gathers == "once" and is_old and isinstance(pin, Mapping) and pin.get("zero") == 3:
        raise PlanError(
            "the plan is from before pin 'zero' 3 meant to gather parameters in every micro-batch: it gathers them "
            "once a step, which is 'zero' 1 or 2. Change the pin in the file, or plan again"
        )
    names = ("model", "pin", "inputs", "parameters", "buffers", "values", "coverage")
    return {
        **{name: field(name, _mapping) for name in names},
        "cluster": field("cluster", ClusterSpec.from_dict),
        "mesh": field("mesh", _read_mesh),
        "blocks": field("blocks", lambda blocks: tuple(map(_read_block, _list(blocks)))),
        "outputs": field("outputs", lambda outputs: tuple(_list(outputs))),
        "predicted": field("predicted", _read_prediction),
        "search": field("search", _read_search),
        "pipeline": field("pipeline", partial(_read_pipeline, default=gathers)) if "pipeline" in data else None,
        "timetables": field("timetable", _read_timetables) if "timetable" in data else (),
        "optimizer_bytes_per_element": field("optimizer_bytes_per_element", _read_bytes)
        if "optimizer_bytes_per_element" in data
        else Document.optimizer_bytes_per_element,
        "recorded": Account(
            field("details", lambda details: tuple(map(_read_details, _list(details)))),
            field("leaves", lambda leaves: {name: _read_leaf(leaf) for name, leaf in _mapping(leaves).items()}),
        ),
    }


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a mapping")
    return value


def _read_bytes(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of bytes")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def _read_mesh(axes: Any) -> Mesh:
    return Mesh(tuple(Axis(axis["name"], axis["size"], axis["stride"]) for axis in map(_mapping, _list(axes))))


def _read_block(data: Any) -> BlockPlan:
    name, at = _mapping(data)["name"], parse_runs(data["at"])
    unknown = data.keys() - BLOCK_FIELDS
    if unknown:
        raise ValueError(
            f"block {name!r} has {', '.join(map(repr, sorted(unknown)))}, and takes {sorted(BLOCK_FIELDS)}"
        )
    for section in ("ops", "values", "recompute", "keeps"):
        if not isinstance(data.get(section, {}), dict):
            raise TypeError(f"block {name!r}: {section!r} is {data[section]!r}, not a mapping")
    for section in ("ops", "values"):
        if not all(isinstance(text, str) for text in data[section].values()):
            raise TypeError(f"block {name!r}: {section!r} maps names to text")
    keeps = data.get("keeps", {})
    if not all(isinstance(names, list) and all(isinstance(each, str) for each in names) for names in keeps.values()):
        raise TypeError(f"block {name!r}: 'keeps' maps levels to lists of operators, named as in 'ops'")
    if len(at) != data["count"]:
        raise ValueError(f'block {name!r} has "count" {data["count"]}, and "at" {data["at"]!r} numbers {len(at)}')
    kept = {level: tuple(names) for level, names in keeps.items()}
    return BlockPlan(name, data["count"], data["ops"], data["values"], at, data.get("recompute", {}), kept)


def _read_prediction(data: Any) -> Prediction:
    return Prediction(
        float(data["step_time_s"]),
        int(data["peak_bytes"]),
        data["time_s"],
        data["memory_bytes"],
        _read_calls(data["collectives"]),
        data.get("fullest_at", ""),
        tuple((name, size) for name, size in data.get("largest", ())),
        tuple((_read_exchange(each), each["calls"]) for each in data.get("exchanges", ())),
        _read_turns(data["turns"]) if "turns" in data else None,
    )


def _read_turns(data: Mapping[str, Any]) -> TurnTimes:
    return TurnTimes(*(tuple(map(float, data[each.name])) for each in fields(TurnTimes)))


def _read_search(data: Any) -> Search:
    candidates, unseen, axes = tuple(data["candidates"]), data.get("unseen", 0), data.get("max_axes", MAX_AXES)
    limit_s = data.get("time_limit_s")
    return Search(data["status"], data["gap"], data["seconds"], candidates, unseen, axes, limit_s)


def _read_details(data: Any) -> BlockDetail:
    return BlockDetail({name: _read_op(op) for name, op in data["ops"].items()}, _read_calls(data["collectives"]))


def _read_calls(calls: Iterable[Mapping[str, Any]]) -> tuple[tuple[Collective, int], ...]:
    return tuple((_read_call(call), call["calls"]) for call in calls)


def _read_call(call: Mapping[str, Any]) -> Collective:
    return Collective(call["kind"], call["axis"], call["bytes_in"], call["phase"])


def _read_exchange(data: Mapping[str, Any]) -> Exchange:
    ranks = tuple(data["ranks"])
    return Exchange(data["kind"], ranks, data["bytes_in"], data["phase"], data.get("boundary"))


def _read_move(data: Mapping[str, Any]) -> Move:
    tuples = {"steps": tuple(data.get("steps", ())), "calls": tuple(map(_read_call, data.get("calls", ())))}
    return Move(**{**data, **tuples})


def _read_op(data: Mapping[str, Any]) -> OpDetail:
    found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    found["operands"] = tuple((value, layout) for value, layout in data["operands"])
    for key in ("before", "after"):
        found[key] = tuple(map(_read_move, data.get(key, ())))
    found["inner"] = tuple(map(_read_call, data.get("inner", ())))
    return OpDetail(**found)


def _read_leaf(data: Mapping[str, Any]) -> LeafDetail:
    shape, after = tuple(data["shape"]), tuple(map(_read_move, data.get("after", ())))
    return LeafDetail(**{**data, "shape": shape, "after": after})
