"""Rewrites a captured model so that one large parameter, and one look-up in it, stand for many embedding tables.

A plan says which tables lie one below the other in which slab. The ids of all tables are put side by side, looked up
slab by slab, and the bags given to those that read them. Which slab is on which rank is not decided here: the slab is a
dim, which a plan shards.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.capture import Captured
from autopar.graph.program import Body, Call, Leaf, Program, expand
from autopar.graph.slabs import SlabPart, Slabs
from autopar.operators.embedding_slabs import checked_ids, embedding_slabs
from planner.base.errors import PlanError
from planner.tables.lookups import TableLookup
from planner.tables.tables_plan import SLABS, SLABS_NAME, TablePlan

aten = torch.ops.aten


def in_slabs(
    captured: Captured, found: Sequence[TableLookup], plans: Mapping[str, TablePlan], ranks: int, nodes: int
) -> Captured:
    """The program with some tables in slabs.

    Args:
        found: the look-ups of its graph.
        plans: of the tables that lie in slabs, by the name of their parameter.
        ranks, nodes: of the cluster, which have a slab each.

    Raises:
        PlanError: the model has no such tables.
    """
    by_name = {each.table.name: each for each in found}
    if missing := [name for name in plans if name not in by_name]:
        raise PlanError(
            f"the plan has table {missing[0]!r} in a slab, and the model does not look it up by itself, in plain "
            "bags: plan again"
        )
    placed = {name: by_name[name] for name in plans}  # in the plan's order, in which they lie in slabs
    graph = expand(captured.program)
    grouping = _Grouping(graph, captured.program, placed, plans)
    counts = {"rank": ranks, "node": nodes}
    slabs = grouping.put_in({kind: counts[each] for kind, each in SLABS.items()}, multiple=ranks // nodes)
    leaves = [leaf for leaf in captured.program.leaves if leaf.target not in placed or leaf.kind != "param"]
    operators = tuple(node for node in graph.nodes if node.op == "call_function")
    body = Body(operators)
    names = tuple(node.name for node in operators)
    call = Call(body, tuple(node.name for node in body.operands), names)
    program = replace(captured.program, leaves=(*leaves, *grouping.leaves), calls=(call,))
    return replace(captured, program=program, slabs=slabs)


@dataclass(frozen=True)
class _Columns:
    """Columns of a table in a slab, with the place of its ids among those of a sample."""

    lookup: TableLookup
    slab: int
    column: int
    first: int


class _Grouping:
    """A graph in which look-ups are put together."""

    def __init__(
        self, graph: fx.Graph, program: Program, placed: Mapping[str, TableLookup], plans: Mapping[str, TablePlan]
    ):
        self.graph, self.placed, self.plans = graph, placed, plans
        self.node = {node.name: node for node in graph.nodes}
        self.leaf = {leaf.target: leaf for leaf in program.leaves if leaf.kind == "param"}
        self.leaves: list[Leaf] = []
        self.taken = {*self.node, *(leaf.target for leaf in program.leaves)}

    def put_in(self, counts: Mapping[str, int], multiple: int) -> tuple[Slabs, ...]:
        """Look all tables up at once; the slabs."""
        lookups = [self.node[each.node] for each in self.placed.values()]
        self._hoist([node.args[1] for node in lookups], min(lookups, key=[*self.graph.nodes].index))
        columns = self._columns()
        ids = self._ids(columns)
        bags: dict[str, fx.Node] = {}
        slabs = []
        for (each, count, features, *_), parts in self._groups(counts, columns).items():
            name = f"{SLABS_NAME}_{each}s_{features}"
            made, found = self._look_up(ids, name, count, features, parts, multiple)
            slabs.append(made)
            bags |= found
        for name, lookup in self.placed.items():
            old = self.node[lookup.node]
            old.replace_all_uses_with(self._as(bags[name], old, lookup))
        for node in lookups:
            self.graph.erase_node(node)
        for leaf in [self.leaf[name] for name in self.placed]:
            self.graph.erase_node(self.node[leaf.name])
        self.graph.lint()
        return tuple(slabs)

    def _hoist(self, wanted: Sequence[Any], first: fx.Node) -> None:
        """Move what ids are computed from in front of the first look-up; none of it reads one."""
        needed = {*wanted}
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        behind = False
        for node in [*self.graph.nodes]:
            behind = behind or node is first
            if behind and node in needed:
                first.prepend(node)
        self.graph.inserting_before(first)

    def _columns(self) -> dict[str, int]:
        """The first column of each table among the ids of a sample."""
        found, at = {}, 0
        for name, lookup in self.placed.items():
            found[name] = at
            at += int(lookup.table.lookups(1))
        return found

    def _ids(self, columns: Mapping[str, int]) -> fx.Node:
        """The ids of all tables side by side, ``[batch, ids]``; each is a row of its table, or an error."""
        each = []
        for lookup in self.placed.values():
            ids: Any = self.node[lookup.node].args[1]
            each.append(ids if ids.meta["val"].dim() == 2 else self._call(aten.unsqueeze.default, ids, 1))
        ids = self._call(aten.cat.default, each, 1)
        tables = [lookup.table for lookup in self.placed.values()]
        counts = [int(table.lookups(1)) for table in tables]
        return self._call(checked_ids, ids, [t.name for t in tables], [t.rows for t in tables], counts)

    def _groups(
        self, counts: Mapping[str, int], columns: Mapping[str, int]
    ) -> dict[tuple[str, int, int, bool, torch.dtype], list[_Columns]]:
        """Parts that lie in the slabs of one parameter: what has a slab each, how many there are, their features,
        whether they are trained, and their dtype.
        """
        found: dict[tuple[str, int, int, bool, torch.dtype], list[_Columns]] = defaultdict(list)
        for name, lookup in self.placed.items():
            plan, table = self.plans[name], lookup.table
            features, left = divmod(table.features, max(1, len(plan.slabs)))
            count = counts[plan.kind]
            if left or not plan.slabs or len({*plan.slabs}) < len(plan.slabs) or not {*plan.slabs} <= {*range(count)}:
                raise PlanError(
                    f"the plan has the {table.features} features of table {name!r} in slabs {list(plan.slabs)} of "
                    f"{count}: slabs are different ones, and share them evenly; plan again"
                )
            weight = self.leaf[name].value
            key = SLABS[plan.kind], count, features, weight.requires_grad, weight.dtype
            for number, slab in enumerate(plan.slabs):
                found[key].append(_Columns(lookup, slab, number * features, columns[name]))
        return found

    def _look_up(
        self, ids: fx.Node, name: str, count: int, features: int, parts: Sequence[_Columns], multiple: int
    ) -> tuple[Slabs, dict[str, fx.Node]]:
        """The bags of all tables of some slabs, ``[batch, bags * features]``."""
        inside = [[part for part in parts if part.slab == slab] for slab in range(count)]
        rows = max(sum(part.lookup.table.rows for part in each) for each in inside) + 1
        rows = -(-rows // multiple) * multiple
        first = self.leaf[parts[0].lookup.table.name].value  # whose dtype, and whether it trains, all of them share
        name, dtype, trains = name if first.requires_grad else f"{name}_frozen", first.dtype, first.requires_grad
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        weight = torch.empty(count, rows, features, dtype=dtype, device="meta", requires_grad=trains)
        slabs = Slabs(name, (count, rows, features), dtype, tuple(_places(inside, parts)))
        held = self._leaf("param", name, weight)
        lists = {key: self._leaf("const", f"{name}_{key}", value) for key, value in _lists(inside, parts, rows).items()}
        batch = ids.meta["val"].shape[0]
        found = self._call(aten.index_select.default, ids, 1, lists["columns"])
        found = self._call(aten.mul.Tensor, found, lists["there"])
        found = self._call(aten.add.Tensor, found, lists["tops"])
        found = self._call(aten.view.default, found, [batch, count, -1])
        bags = self._call(embedding_slabs, held, found, lists["starts"])
        bags = self._call(aten.view.default, bags, [batch, -1, features])
        bags = self._call(aten.index_select.default, bags, 1, lists["order"])
        bags = self._call(aten.view.default, bags, [batch, -1])
        tables = {part.lookup.table.name: part.lookup.table for part in parts}
        widths = [table.bags * table.features for table in tables.values()]
        split = self._call(aten.split_with_sizes.default, bags, widths, 1)
        return slabs, {name: self._call(operator.getitem, split, at) for at, name in enumerate(tables)}

    def _as(self, bags: fx.Node, old: fx.Node, lookup: TableLookup) -> fx.Node:
        """The bags of a table as the look-up gave them."""
        shape = list(old.meta["val"].shape)
        if len(shape) > 2:
            bags = self._call(aten.view.default, bags, shape)
        return self._call(aten.div.Tensor, bags, lookup.table.pooling) if lookup.is_mean else bags

    def _leaf(self, kind: str, name: str, value: Tensor) -> fx.Node:
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.leaves.append(Leaf(node.name, kind, name, value))
        return node

    def _call(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(op, args)
        values = fx.node.map_arg(args, lambda n: _on_meta(n.meta["val"]))
        with torch.no_grad():
            made = op(*values)
        node.meta = {"val": made, "nn_module_stack": {SLABS_NAME: (SLABS_NAME, "EmbeddingSlabs")}}
        return node


def _on_meta(value: Any) -> Any:
    """A value of shape and strides alone; what is there already stays the memory that it is."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _places(inside: Sequence[Sequence[_Columns]], parts: Sequence[_Columns]) -> Iterator[SlabPart]:
    """Where the parts lie, in their order."""
    tops = {}
    for each in inside:
        top = 0
        for part in each:
            tops[part] = top
            top += part.lookup.table.rows
    for part in parts:
        table = part.lookup.table
        yield SlabPart(table.name, part.slab, tops[part], table.rows, part.column)


def _lists(inside: Sequence[Sequence[_Columns]], parts: Sequence[_Columns], rows: int) -> dict[str, Tensor]:
    """What the ids of slabs are made of: for each place of each slab the column of its id among those of a sample,
    whether there is one, and the first row of its table; where each bag begins among the places of its slab; and the
    bags of all slabs in the order in which they are read.
    """
    ids = max(sum(int(part.lookup.table.lookups(1)) for part in each) for each in inside)
    bags = max(sum(part.lookup.table.bags for part in each) for each in inside)
    columns, there = torch.zeros(2, len(inside), ids, dtype=torch.int64)
    tops, starts = torch.full((len(inside), ids), rows - 1), torch.zeros(len(inside), bags, dtype=torch.int64)
    number: dict[tuple[_Columns, int], int] = {}
    for slab, each in enumerate(inside):
        at = bag = top = 0
        for part in each:
            table = part.lookup.table
            count = int(table.lookups(1))
            columns[slab, at : at + count] = torch.arange(part.first, part.first + count)
            there[slab, at : at + count], tops[slab, at : at + count] = 1, top
            for own in range(table.bags):
                starts[slab, bag], number[part, own] = at + own * table.pooling, slab * bags + bag
                bag += 1
            at, top = at + count, top + table.rows
        starts[slab, bag:] = at
    of_table: dict[str, list[_Columns]] = defaultdict(list)
    for part in parts:
        of_table[part.lookup.table.name].append(part)
    order = [number[part, bag] for own in of_table.values() for bag in range(own[0].lookup.table.bags) for part in own]
    return {
        "columns": columns.flatten(),
        "there": there.flatten(),
        "tops": tops.flatten(),
        "starts": starts,
        "order": torch.tensor(order),
    }
