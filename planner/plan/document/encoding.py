"""Encodes a plan document as JSON for people, and reads it back.

What decides comes first, what was predicted of it last; whatever fits on a line is one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypedDict

from planner.analysis.prediction import Prediction
from planner.base.errors import ClusterError, PlanError
from planner.base.json_schema import Misread, Readers, fields_of, read, read_fields
from planner.base.units import nearest
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import TIERS, Offload
from planner.formulation.decision_names import parse_runs, runs
from planner.formulation.resharding import Collective, Phase
from planner.formulation.stage_boundaries import Exchange
from planner.formulation.unsharding import Gathers, Unsharding
from planner.ir.layout import Axis, Mesh
from planner.plan.document.detail import Account, BlockDetail, LeafDetail
from planner.plan.document.document import BlockPlan, Document, PipelinePlan, Search
from planner.plan.document.rebinding import Rebinding
from planner.plan.document.upgrade import of_version_2
from planner.solve.transfers import TransferSchedule
from planner.tables.tables_plan import TablesPlan

FORMAT, VERSION = "autopar-plan", 3
WIDTH = 110
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Half of a character, as JSON may escape it; half of them alone cannot be written."""
FIELDS = (
    *(
        "format",
        "version",
        "model",
        "cluster",
        "optimizer_bytes_per_element",
        "pipeline",
        "transfer_schedule",
        "mesh",
        "pin",
        "offload",
        "tables",
    ),
    *("inputs", "blocks", "parameters", "buffers", "values", "outputs", "discards", "coverage", "unknown_share"),
    *("notes", "rebinding", "search", "predicted", "details", "leaves"),
)


class Mode(TypedDict, total=False):
    """In which mode and dtypes a model was captured; files of before do not say."""

    mode: Literal["train", "eval"]
    dtypes: Mapping[str, str]


# "class" is no name for an attribute.
Facts = TypedDict("Facts", {"class": str, "parameters": int, "fingerprint": str})


class Model(Facts, Mode):
    """What identifies a model, see :func:`planner.plan.document.fingerprint.model_facts`."""


class Gathering(TypedDict, total=False):
    """When a micro-batched candidate gathers parameters."""

    gathers: Gathers


class CandidateEntry(Gathering):
    """A mesh, and what is known of its plans, see :class:`planner.plan.document.document.Search`."""

    mesh: Mapping[str, int]
    status: str
    step_time_s: float | None
    bound_s: float | None
    peak_bytes: int
    proof: str


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
        **({"notes": list(document.notes)} if document.notes else {}),
        **({"rebinding": asdict(document.rebinding)} if document.rebinding is not None else {}),
        "search": _search(search),
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
        **(
            {"transfer_schedule": _transfer_schedules(document.transfer_schedules)}
            if document.transfer_schedules
            else {}
        ),
        "mesh": [asdict(axis) for axis in document.mesh.axes],
        "pin": dict(document.pin),
        **({} if document.offload == document.pin.get("offload", "none") else {"offload": document.offload}),
        **({"tables": _tables(document.tables)} if document.tables is not None else {}),
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
        **({"discards": list(document.discards)} if document.discards else {}),
        "coverage": dict(document.coverage),
        **({"unknown_share": document.unknown_share} if document.unknown_share else {}),
    }


def decode(data: Any) -> dict[str, Any]:
    """The fields of the document that :func:`encode` wrote.

    Raises:
        PlanError: not a plan, of another version, or with a field missing or wrong.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanError('this is no autopar plan: it lacks "format": "autopar-plan"')
    if data.get("version") not in (2, VERSION):
        raise PlanError(
            f"the plan is of version {data.get('version')!r}, this autopar reads versions 2 and {VERSION}: plan again"
        )
    if data["version"] == 2:
        data = of_version_2(data)
    for name in data:
        if name not in FIELDS:
            raise PlanError(f"a plan has no field {name!r}: remove it; {nearest(str(name), FIELDS)}")
    return _read_document(data)


def _search(search: Search) -> dict[str, Any]:
    """What the search did as JSON; nothing left out, and no limit but the device's, are not said."""
    found = {**asdict(search), "candidates": list(search.candidates)}
    return {name: value for name, value in found.items() if value or name not in ("left_out", "limit_bytes")}


def _prediction(predicted: Prediction) -> dict[str, Any]:
    """A prediction as JSON; only a micro-batched step has its times, and only a pipeline exchanges."""
    found = {field.name: getattr(predicted, field.name) for field in fields(predicted)}
    found["collectives"] = _calls(predicted.collectives)
    found["exchanges"] = [{**_sparse(each), "calls": count} for each, count in predicted.exchanges]
    found["micro_batch_times"] = None if predicted.micro_batch_times is None else asdict(predicted.micro_batch_times)
    return {name: value for name, value in found.items() if value or name not in ("exchanges", "micro_batch_times")}


def _pipeline(pipeline: PipelinePlan) -> dict[str, Any]:
    """A pipeline as JSON; stages as runs of block numbers."""
    return {
        "schedule": pipeline.schedule,
        "ranks": pipeline.ranks,
        "virtual_stages": pipeline.virtual_stages,
        "stages": [runs(tuple(range(low, high))) for low, high in pairwise(pipeline.bounds)],
        "recompute": {level: runs(numbers) for level, numbers in pipeline.recompute.items()},
        "gathers": pipeline.unsharding.name,
        "waits": not pipeline.unsharding.prefetch,
    }


def _tables(tables: TablesPlan) -> dict[str, Any]:
    """Where tables lie, as JSON."""
    each = {name: {**asdict(table), "slabs": list(table.slabs)} for name, table in tables.tables.items()}
    return {"status": tables.status, "gap": tables.gap, "other_s": tables.other_s, "tables": each}


def _transfer_schedules(tables: Iterable[TransferSchedule]) -> Any:
    """The only transfer schedule, or those of several ranks, as JSON."""
    found = [table.to_dict() for table in tables]
    return found[0] if len(found) == 1 else found


def _read_transfer_schedules(data: Any) -> tuple[TransferSchedule, ...]:
    return tuple(map(TransferSchedule.from_dict, data if isinstance(data, list) else [data]))


def _read_pipeline(data: Any, default: Gathers) -> PipelinePlan:
    kinds, _ = fields_of(PipelinePlan)
    texts = {"stages": tuple[str, ...], "recompute": Mapping[str, str]}
    kinds = {name: kind for name, kind in kinds.items() if name not in ("bounds", "unsharding")} | texts
    kinds |= {"gathers": Gathers, "waits": bool}
    found = read_fields(data, kinds, frozenset({"schedule", "ranks", "virtual_stages", *texts}))
    stages = [_read_runs(text, "stages", number) for number, text in enumerate(found.pop("stages"))]
    numbers = [number for stage in stages for number in stage]
    if not stages or not all(stages) or numbers != list(range(len(numbers))):
        raise Misread(f"is {data['stages']}, which is not every block once, in order", ("stages",))
    found["recompute"] = {level: _read_runs(text, "recompute", level) for level, text in found["recompute"].items()}
    gathers = found.pop("gathers", default)
    # Before there was a choice, what each micro-batch gathered was waited for.
    found["unsharding"] = Unsharding.named(gathers, found.pop("waits", gathers == "each"))
    return PipelinePlan(bounds=(0, *(stage[-1] + 1 for stage in stages)), **found)


def _read_runs(text: str, *place: str | int) -> tuple[int, ...]:
    try:
        return parse_runs(text)
    except ValueError:
        raise Misread(f"is {text!r}, and takes numbers of blocks, such as '0-3, 7'", place) from None


def parse(text: str) -> Any:
    """JSON values from text; raises :class:`PlanError` where it breaks off, or holds what a plan cannot."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise PlanError(
            f"this is not a whole plan: JSON ends or breaks at line {error.lineno}, column {error.colno} "
            f"({error.msg}); save the plan again"
        ) from error
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise PlanError(f"the plan holds {half}, half a character: restore it, or plan again") from error
    except RecursionError as error:
        raise PlanError(
            "this is not a plan: its lists lie within one another without end; save the plan again"
        ) from error
    except PlanError:
        raise
    except ValueError as error:  # of whole numbers of thousands of digits
        raise PlanError(
            f"the plan holds a number that is too long to read: restore it, or plan again ({error})"
        ) from error
    return found


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
    def field(name: str, reader: Callable[[Any], Any]) -> Any:
        if name not in data:
            raise PlanError(f"the plan lacks the field {name!r}; restore it, or plan again")
        try:
            return reader(data[name])
        except ClusterError as error:
            raise PlanError(f"the plan's {name}: {error}") from error
        except ValueError as error:
            raise PlanError(f"the plan's field {name!r} is wrong: {error}; restore it, or plan again") from error

    # Before there was a choice, parameters were gathered once a step, unless they came from elsewhere.
    gathers: Gathers = "each" if "transfer_schedule" in data else "once"
    pipeline, pin = data.get("pipeline"), data.get("pin")
    is_old = isinstance(pipeline, Mapping) and "gathers" not in pipeline
    if gathers == "once" and is_old and isinstance(pin, Mapping) and pin.get("zero") == 3:
        raise PlanError(
            "the plan is from before pin 'zero' 3 meant to gather parameters in every micro-batch: it gathers them "
            "once a step, which is 'zero' 1 or 2. Change the pin in the file, or plan again"
        )
    layouts = ("inputs", "parameters", "buffers", "values")
    return {
        **{name: field(name, partial(read, Mapping[str, str])) for name in layouts},
        "model": field("model", partial(read, Model)),
        "pin": field("pin", partial(read, Mapping[str, Any])),
        "offload": field("offload", partial(read, Offload)) if "offload" in data else _pinned_offload(pin),
        "coverage": field("coverage", partial(read, Mapping[str, int])),
        "unknown_share": field("unknown_share", partial(read, float)) if "unknown_share" in data else 0.0,
        "cluster": field("cluster", ClusterSpec.from_dict),
        "mesh": field("mesh", lambda axes: Mesh(read(tuple[Axis, ...], axes))),
        "blocks": field("blocks", partial(read, tuple[BlockPlan, ...], readers={BlockPlan: _read_block})),
        "outputs": field("outputs", partial(read, tuple[str, ...])),
        "discards": field("discards", partial(read, tuple[str, ...])) if "discards" in data else (),
        "predicted": field("predicted", partial(read, Prediction, readers=CALLS)),
        "search": field("search", partial(read, Search, readers={Mapping[str, Any]: _read_candidate})),
        "pipeline": field("pipeline", partial(_read_pipeline, default=gathers)) if "pipeline" in data else None,
        "transfer_schedules": field("transfer_schedule", _read_transfer_schedules)
        if "transfer_schedule" in data
        else (),
        "optimizer_bytes_per_element": field("optimizer_bytes_per_element", _read_bytes),
        "notes": field("notes", partial(read, tuple[str, ...])) if "notes" in data else (),
        "tables": field("tables", partial(read, TablesPlan)) if "tables" in data else None,
        "rebinding": field("rebinding", partial(read, Rebinding)) if "rebinding" in data else None,
        "recorded": Account(
            field("details", partial(read, tuple[BlockDetail, ...], readers=CALLS)),
            field("leaves", partial(read, Mapping[str, LeafDetail], readers=CALLS)),
        ),
    }


def _pinned_offload(pin: object) -> object:
    """Where model data is at home as pinned; of malformed pins, which are refused later, nothing."""
    found = pin.get("offload") if isinstance(pin, Mapping) else None
    return found if isinstance(found, str) and found in TIERS else "none"


def _read_candidate(data: Any) -> dict[str, Any]:
    found: dict[str, Any] = read(CandidateEntry, data)
    if found["bound_s"] is None and found["status"] != "infeasible":
        raise Misread(f"is None, and takes a finite number where the status is {found['status']!r}", ("bound_s",))
    return found


def _read_bytes(value: Any) -> int:
    if read(int, value) < 0:
        raise Misread(f"is {value!r}, which is no number of bytes")
    return int(value)


def _read_block(data: Any) -> BlockPlan:
    kinds, required = fields_of(BlockPlan)
    try:
        found = read_fields(data, {**kinds, "at": str}, required | {"at"})
        at = _read_runs(found["at"], "at")
        if len(at) != found["count"]:
            raise Misread(f'has "count" {found["count"]}, and "at" {found["at"]!r} numbers {len(at)}')
    except Misread as error:
        if isinstance(data, dict) and isinstance(data.get("name"), str):
            raise ValueError(f"block {data['name']!r}: {error}") from None
        raise
    return BlockPlan(**{**found, "at": at})


def _read_counted(kind: Any, data: Any) -> tuple[Any, int]:
    """A call, and how often a step makes it."""
    kinds, required = fields_of(kind)
    found = read_fields(data, {**kinds, "phase": Phase, "calls": int}, required | {"calls"})
    count = found.pop("calls")
    return kind(**found), count


def _read_call(data: Any) -> Collective:
    kinds, required = fields_of(Collective)
    return Collective(**read_fields(data, {**kinds, "phase": Phase}, required))


CALLS: Readers = {
    Collective: _read_call,
    tuple[Collective, int]: partial(_read_counted, Collective),
    tuple[Exchange, int]: partial(_read_counted, Exchange),
}
