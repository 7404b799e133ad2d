"""Plans: decisions as a document that a person can read, edit, diff, and apply again.

A plan names everything by module path and operator, never by internal ids, and every distinct block
once. :func:`describe` writes an assignment down; :func:`restore` turns the document back into one for
the same model, checking every entry.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planner.cluster import ClusterSpec
from planner.conversion import Collective
from planner.errors import PlanError
from planner.formulate import Assignment, Role, Space
from planner.graph import Graph, Node, Ref
from planner.layout import Axis, Layout, Mesh, format_layout
from planner.ops import OPS
from planner.predict import Prediction
from planner.strategy import Choice

FORMAT, VERSION = "autopar-plan", 1


@dataclass(frozen=True)
class Search:
    """What the search did: ``status`` is ``optimal`` with gap 0, or ``feasible`` with the proven gap."""

    status: str
    gap: float
    seconds: Mapping[str, float]
    candidates: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class BlockPlan:
    """One distinct block: how often it occurs, and the decision of each of its operators and values.

    ``ops`` maps ``"module path: operator"`` to the strategy on every axis (``"data:m tensor:n"``);
    ``values`` maps the same keys to the layout in which a result with several readers is delivered.
    """

    name: str
    count: int
    ops: Mapping[str, str]
    values: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """A plan for one model on one cluster.

    Attributes:
        model: class name, number of parameters, and fingerprint of the captured graph.
        cluster: what it was planned for.
        mesh: the axes, major first.
        pin: what the user had fixed.
        inputs, parameters, buffers: layout of every leaf, one local type per axis, by original name
            (``*`` where the instances of a block share it).
        blocks: every distinct block once.
        outputs: layout of every output.
        predicted: the step's time, memory and collectives.
        search: status, bound and seconds.
        coverage: operators that the op table does not know -> how often they occur; they run replicated.
        assignment: the decisions themselves, where the plan was made in this process; not part of the file.
    """

    model: Mapping[str, Any]
    cluster: ClusterSpec
    mesh: Mesh
    pin: Mapping[str, Any]
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    values: Mapping[str, str]
    blocks: tuple[BlockPlan, ...]
    outputs: tuple[str, ...]
    predicted: Prediction
    search: Search
    coverage: Mapping[str, int] = field(default_factory=dict)
    assignment: Assignment | None = field(default=None, compare=False, repr=False)

    # ---- files -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The document, of JSON values only."""
        predicted = asdict(self.predicted)
        predicted["collectives"] = [{**asdict(call), "calls": count} for call, count in self.predicted.collectives]
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": dict(self.model),
            "cluster": self.cluster.to_dict(),
            "mesh": [asdict(axis) for axis in self.mesh.axes],
            "pin": dict(self.pin),
            "inputs": dict(self.inputs),
            "blocks": [
                {"name": b.name, "count": b.count, "ops": dict(b.ops), "values": dict(b.values)} for b in self.blocks
            ],
            "parameters": dict(self.parameters),
            "buffers": dict(self.buffers),
            "values": dict(self.values),
            "outputs": list(self.outputs),
            "predicted": predicted,
            "search": {**asdict(self.search), "candidates": list(self.search.candidates)},
            "coverage": dict(self.coverage),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically: the file is either whole or as it was."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan.

        Raises:
            PlanError: no such file, not JSON, not a plan, of another version, or with a field missing.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {str(path)!r}: {error.strerror}") from error
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{str(path)!r} is not a whole plan: JSON ends or breaks at line {error.lineno}, column {error.colno} "
                f"({error.msg}); save the plan again"
            ) from error
        return Plan.from_dict(data)

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """The inverse of :meth:`to_dict`; raises :class:`PlanError` as :meth:`load` does."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError('this is no autopar plan: it lacks "format": "autopar-plan"')
        if data.get("version") != VERSION:
            raise PlanError(
                f"the plan is of version {data.get('version')!r}, this autopar reads version {VERSION}: plan again"
            )
        try:
            predicted = dict(data["predicted"])
            calls = tuple(
                (Collective(c["kind"], c["axis"], c["bytes_in"], c["phase"]), c["calls"])
                for c in predicted.pop("collectives")
            )
            return Plan(
                data["model"],
                ClusterSpec.from_dict(data["cluster"]),
                Mesh(tuple(Axis(**axis) for axis in data["mesh"])),
                data["pin"],
                data["inputs"],
                data["parameters"],
                data["buffers"],
                data["values"],
                tuple(BlockPlan(b["name"], b["count"], b["ops"], b["values"]) for b in data["blocks"]),
                tuple(data["outputs"]),
                Prediction(**predicted, collectives=calls),
                Search(
                    data["search"]["status"],
                    data["search"]["gap"],
                    data["search"]["seconds"],
                    tuple(data["search"]["candidates"]),
                ),
                data["coverage"],
            )
        except (KeyError, TypeError) as error:
            what = f"lacks the field {error}" if isinstance(error, KeyError) else f"has a wrong field: {error}"
            raise PlanError(f"the plan {what}; restore it, or plan again") from error

    def digest(self) -> str:
        """A short name of what the plan decides; equal on all ranks that run the same plan."""
        decisions = {k: v for k, v in self.to_dict().items() if k not in ("search", "predicted", "cluster")}
        return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path = path.absolute()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def fingerprint(graph: Graph) -> str:
    """A hash of what is computed: operators, arguments, shapes, dtypes and names of leaves."""
    hasher = hashlib.sha256()
    number: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        number[node.name] = i
        inputs = tuple((number[ref.node], ref.index) for ref in node.inputs)
        static = tuple((k, str(v)) for k, v in node.args if not _mentions_nodes(v))
        hasher.update(repr((node.op, node.target, static, inputs, node.results)).encode())
    hasher.update(repr([(number[ref.node], ref.index) for ref in graph.outputs]).encode())
    return hasher.hexdigest()[:16]


def _mentions_nodes(value: object) -> bool:
    return isinstance(value, Ref) or (isinstance(value, tuple) and any(_mentions_nodes(v) for v in value))


def model_facts(graph: Graph, name: str) -> dict[str, Any]:
    """What identifies a model in a plan."""
    params = sum(node.results[0].numel for node in graph.leaves if node.op == "param")
    return {"class": name, "parameters": params, "fingerprint": fingerprint(graph)}


def coverage(graph: Graph) -> dict[str, int]:
    """Operators without a row -> how often they occur."""
    return dict(sorted(Counter(n.op for n in graph.nodes if not n.is_leaf and n.op not in OPS).items()))


# ---- from assignments to documents and back --------------------------------------------------------------------------


def describe(
    assignment: Assignment,
    model: Mapping[str, Any],
    pin: Mapping[str, Any],
    predicted: Prediction,
    search: Search,
) -> Plan:
    """Write an assignment down."""
    space = assignment.space
    names = role_names(space)
    sections: dict[str, dict[str, str]] = {"inputs": {}, "parameters": {}, "buffers": {}, "values": {}}
    blocks: list[BlockPlan] = []
    ops: dict[int, dict[str, str]] = {}
    values: dict[int, dict[str, str]] = {}
    outputs: list[str] = []
    for role in space.roles:
        text = _write(assignment.chosen[role])
        section, name = names[role]
        if section == "outputs":
            outputs.append(text)
        elif isinstance(section, tuple):
            {"ops": ops, "values": values}[section[0]].setdefault(section[1], {})[name] = text
        else:
            sections[section][name] = text
    for kind, (block_name, instances) in enumerate(zip(space.folded.names, space.folded.kinds, strict=True)):
        blocks.append(BlockPlan(block_name, len(instances), ops.get(kind, {}), values.get(kind, {})))
    return Plan(
        model,
        space.cost.cluster,
        space.mesh,
        pin,
        sections["inputs"],
        sections["parameters"],
        sections["buffers"],
        sections["values"],
        tuple(blocks),
        tuple(outputs),
        predicted,
        search,
        coverage(space.graph),
    )


def restore(plan: Plan, space: Space, model: Mapping[str, Any]) -> Assignment:
    """The assignment that a plan describes, for the model at hand.

    Args:
        space: every decision to take for this model on the plan's mesh.
        model: facts of the model at hand, see :func:`model_facts`.

    Raises:
        PlanError: the plan is of another model, or an entry is missing or impossible; names what differs.
    """
    names = role_names(space)
    known = [b.name for b in plan.blocks]
    if plan.model.get("fingerprint") != model["fingerprint"]:
        raise PlanError(_difference(plan, space, model))
    chosen: dict[Role, Choice | Layout] = {}
    for role in space.roles:
        section, name = names[role]
        if section == "outputs":
            text, where = _entry(plan.outputs, int(name)), f"outputs[{name}]"
        elif isinstance(section, tuple):
            block = plan.blocks[section[1]] if section[1] < len(known) else None
            entries = getattr(block, section[0]) if block is not None else {}
            text, where = entries.get(name), f"block {space.folded.names[section[1]]!r}, {section[0]}, {name!r}"
        else:
            text, where = getattr(plan, section).get(name), f"{section}, {name!r}"
        if text is None:
            raise PlanError(f"the plan has no entry for {where}; restore it, or plan again")
        chosen[role] = _read(text, space.options[role], where)
    return Assignment(space, chosen)


def _entry(values: tuple[str, ...], position: int) -> str | None:
    return values[position] if position < len(values) else None


def _write(decision: Choice | Layout) -> str:
    return decision.label if isinstance(decision, Choice) else format_layout(decision)


def _read(text: str, options: Iterable[Choice | Layout], where: str) -> Choice | Layout:
    known = {_write(option): option for option in options}
    if text not in known:
        near = difflib.get_close_matches(text, known, n=4, cutoff=0.0)
        raise PlanError(
            f"the plan says {text!r} for {where}, which is impossible there; possible are: {', '.join(near)}, ..."
        )
    return known[text]


def _difference(plan: Plan, space: Space, model: Mapping[str, Any]) -> str:
    facts = [
        f"{what}: plan {plan.model.get(what)}, model {model[what]}"
        for what in ("class", "parameters")
        if plan.model.get(what) != model[what]
    ]
    for mine, theirs in zip(
        [(name, len(i)) for name, i in zip(space.folded.names, space.folded.kinds, strict=True)],
        [(b.name, b.count) for b in plan.blocks],
        strict=False,
    ):
        if mine != theirs:
            facts.append(f"block: plan {theirs[1]} x {theirs[0]}, model {mine[1]} x {mine[0]}")
            break
    shown = "; ".join(facts) or "the same structure, but other shapes, arguments or input sizes"
    return f"the plan was made for another model or batch ({shown}): plan again for this one"


Section = str | tuple[str, int]


def role_names(space: Space) -> dict[Role, tuple[Section, str]]:
    """Where each role stands in the document: (section, name).

    A section is ``inputs``, ``parameters``, ``buffers``, ``values`` (of leaves), ``outputs``, or
    ``("ops" | "values", block number)``.
    """
    found: dict[Role, tuple[Section, str]] = {}
    taken: set[tuple[Section, str]] = set()
    op_names: dict[Role, str] = {}
    for role in space.roles:
        if role[0] == "op":
            node = space.graph.by_name[space.members[role][0]]
            section: Section = ("ops", int(str(role[1])))
            name = _op_name(node, space.folded.names[int(str(role[1]))])
        elif role[0] == "leaf":
            members = [space.graph.by_name[n] for n in space.members[role]]
            section = {"param": "parameters", "input": "inputs"}.get(members[0].op, "buffers")
            name = pattern([m.target or m.name for m in members])
        elif role[0] == "relay":
            producer = role[1]
            assert isinstance(producer, tuple)
            suffix = f" result {role[2]}" if role[2] else ""
            if producer[0] == "op":
                section, name = ("values", int(str(producer[1]))), op_names[producer] + suffix
            else:
                section, name = "values", found[producer][1] + suffix
        else:
            section, name = "outputs", str(role[1])
        unique, times = name, 1
        while (section, unique) in taken:
            times += 1
            unique = f"{name} #{times}"
        taken.add((section, unique))
        found[role] = (section, unique)
        if role[0] == "op":
            op_names[role] = unique
    return found


def _op_name(node: Node, block: str) -> str:
    """``"mlp.down_proj: linear"``: the path below the block, and the operator."""
    op = node.op.removeprefix("aten.").removesuffix(".default")
    parts = node.path.split(".") if node.path else []
    for own in block.split("#")[0].split("."):
        if parts and (own == "*" or parts[0] == own):
            parts = parts[1:]
        else:
            break
    return f"{'.'.join(parts)}: {op}" if parts else op


def pattern(names: list[str]) -> str:
    """One name for several that differ in places: ``layers.*.weight``."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) != 1:
        return names[0]
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))
