"""The proof of the op table: every strategy of a row, run by hand and compared with the whole operator.

A factor rule claims that an operator can run on slices, copies or terms of its operands, and that the
gradients of these are slices, copies or terms too. :func:`check_row` takes the claim literally, in one
process and without any distributed code: it cuts the operands as the local types say, runs the operator
once per rank, joins the results, and compares them with the unsharded operator; then the same for the
vector-Jacobian products. All it knows of the type system is this table:

=========  =================  ================  ====================  ===================
type       operands are cut   results are       cotangents are cut    gradients are
           into               joined            into                  joined
=========  =================  ================  ====================  ===================
``S(d)``   slices             side by side      slices                side by side
``R``      copies             all equal         terms of a sum        by summing
``I``      copies             all equal         copies                all equal
``P``      terms of a sum     by summing        copies                all equal
=========  =================  ================  ====================  ===================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autopar.graph.local_arguments import local_call
from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import I, LocalType, P, R, Shard, local_shape
from planner.ops import OPS
from planner.ops.sharding_rule import AxisStrategy, Rule, axis_strategies
from planner.ops.table import OWN, Saved

Args = dict[str, Any]
LocalForm = Callable[[AxisStrategy, list[Args]], list[Any] | None]


def check_row(
    op: OpOverload[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    sizes: Sequence[int] = (2, 4),
    local_form: LocalForm | None = None,
) -> list[AxisStrategy]:
    """Assert that every strategy of ``OPS[str(op)]`` computes what the whole operator computes.

    Give floating-point operands as float64; the gradients of all of them are compared, where torch has some.

    Args:
        op: the overload, such as ``torch.ops.aten.add.Tensor``.
        args, kwargs: one application of it, as one would call it.
        sizes: axis sizes to try. Each factor is also tried in strips, ``S(dim, outer)``.
        local_form: what the ranks run instead of ``op``. Given the strategy and every rank's arguments by
            schema name, it returns every rank's result, or ``None`` for "just run ``op``". Gradients flow
            back through whatever it computes from several ranks' arguments (the joint VJP).

    Returns:
        The strategies that were checked, for tests that want to see a particular one among them.
    """
    call = Call.bind(op, args, kwargs or {})
    operands, results = call.operands, call.run()
    trained = has_derivative(op, args, kwargs or {})
    node = call.node(results)
    rule = OPS[node.op].rule(node, tuple(map(tensor_type, operands)))
    check_rule(rule, operands, results)
    check_saves(OPS[node.op].saved(node, tuple(map(tensor_type, operands))), operands, results)
    checked = []
    for size in sizes:
        for strategy in axis_strategies(rule, size, strip_counts(rule)):
            try:
                check_strategy(call, strategy, size, local_form, trained)
            except Exception as error:
                types = f"{strategy.operands} -> {strategy.results}"
                raise AssertionError(f"{node.op}, {strategy} on {size} ranks, {types}: {error}\n{rule}") from error
            checked.append(strategy)
    return checked


def check_strategy(
    call: Call, strategy: AxisStrategy, size: int, local_form: LocalForm | None = None, trained: bool = True
) -> None:
    """Assert that ``size`` ranks, cut and joined as ``strategy`` says, compute results and, if trained, gradients."""
    whole = call.on(leaves(call.operands))
    results = whole.run()
    shapes = local_shapes(results, strategy.results, size)
    ranks = [call.on(leaves(xs)).localised(shapes) for xs in cut_all(call.operands, strategy.operands, size)]
    outcomes = local_form(strategy, [rank.args for rank in ranks]) if local_form else None
    local_results = [list(tensors(y)) for y in outcomes] if outcomes is not None else [rank.run() for rank in ranks]
    for position, local_type in enumerate(strategy.results):
        parts = [rank[position].detach() for rank in local_results]
        assert_same(join(parts, local_type), results[position].detach(), f"result {position}")
    if not trained:
        return

    cotangents = [random_like(y) if y.requires_grad else torch.zeros(y.shape) for y in results]
    local_cotangents = cut_all(cotangents, gradient_types(strategy.results), size)
    gradients = vjp(results, cotangents, whole.operands)
    local_gradients = vjp(flat(local_results), flat(local_cotangents), flat(rank.operands for rank in ranks))
    for position, local_type in enumerate(gradient_types(strategy.operands)):
        parts = local_gradients[position :: len(gradients)]
        assert_same(join(parts, local_type), gradients[position], f"gradient of operand {position}")


def has_derivative(op: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether this torch can take gradients of an operator; it says that it cannot when it is asked to."""
    call = Call.bind(op, args, kwargs)
    whole = call.on(leaves(call.operands))
    results = whole.run()
    try:
        vjp(results, [torch.zeros_like(y) for y in results], whole.operands)
    except RuntimeError as error:
        if not re.search(r"derivative for .* is not implemented", str(error)):
            raise
        return False
    return True


# The application of an operator, whole and on a rank.


@dataclass(frozen=True)
class Call:
    """An operator applied to arguments: every argument by schema name, defaults included."""

    op: OpOverload[..., Any]
    args: Args

    @staticmethod
    def bind(op: OpOverload[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
        by_name = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | dict(kwargs)
        return Call(op, {a.name: by_name.get(a.name, a.default_value) for a in op._schema.arguments})

    @property
    def operands(self) -> list[Tensor]:
        """The tensor arguments in schema order, lists flattened: positions as in ``Node.inputs``."""
        return list(tensors(list(self.args.values())))

    def run(self) -> list[Tensor]:
        return list(tensors(self.op(**self.args)))

    def on(self, operands: Sequence[Tensor]) -> Call:
        """The same application to other operands."""
        remaining = iter(operands)

        def put(value: object) -> object:
            if isinstance(value, Tensor):
                return next(remaining)
            return [put(item) for item in value] if isinstance(value, (list, tuple)) else value

        return Call(self.op, {name: put(value) for name, value in self.args.items()})

    def localised(self, result_shapes: Shapes) -> Call:
        """The same application, with sizes among its arguments as they are on a rank."""
        operand_shapes = [tuple(operand.shape) for operand in self.operands]
        return Call(*local_call(self.op, self.args, operand_shapes, result_shapes))

    def node(self, results: Sequence[Tensor]) -> Node:
        """The planner's view of this application; the same tensor twice is the same ``Ref`` twice."""
        names: dict[int, str] = {}

        def lower(value: object) -> object:
            if isinstance(value, Tensor):
                return Ref(names.setdefault(id(value), f"x{len(names)}"))
            if isinstance(value, (list, tuple)):
                return tuple(lower(item) for item in value)
            if value is None or isinstance(value, (bool, int, float, str)):
                return value
            return str(value).removeprefix("torch.")

        args = tuple((name, lower(value)) for name, value in self.args.items())
        return Node("node", str(self.op), args, tuple(map(tensor_type, results)))


Shapes = Sequence[tuple[int, ...]]


# The type system: how tensors are cut into, and joined from, what the ranks hold.


def gradient_types(types: Sequence[LocalType]) -> list[LocalType]:
    """The local types of gradients: a shard's is the same shard, a copy's a term (R) or a copy (I), a term's a copy."""
    return [t if isinstance(t, Shard) else {R: P, I: I, P: I}[t] for t in types]


def cut(whole: Tensor, local_type: LocalType, size: int) -> list[Tensor]:
    """What each of ``size`` ranks holds of ``whole``."""
    if isinstance(local_type, Shard):
        strips = torch.unflatten(whole, local_type.dim, (local_type.outer, -1))
        return [part.flatten(local_type.dim, local_type.dim + 1) for part in strips.chunk(size, local_type.dim + 1)]
    if local_type == P:
        terms = [random_like(whole) for _ in range(size - 1)]
        return [*terms, whole - sum(terms)]
    return [whole] * size


def join(parts: Sequence[Tensor], local_type: LocalType) -> Tensor:
    """The inverse of :func:`cut`; copies must agree."""
    if isinstance(local_type, Shard):
        strips = [torch.unflatten(part, local_type.dim, (local_type.outer, -1)) for part in parts]
        return torch.cat(strips, local_type.dim + 1).flatten(local_type.dim, local_type.dim + 1)
    if local_type == P:
        return torch.stack(list(parts)).sum(0, dtype=parts[0].dtype)
    for part in parts[1:]:
        assert_same(part, parts[0], "ranks differ in what should be a copy")
    return parts[0]


def cut_all(whole: Sequence[Tensor], types: Sequence[LocalType], size: int) -> list[list[Tensor]]:
    """Per rank, what it holds of each tensor."""
    parts = [cut(tensor, local_type, size) for tensor, local_type in zip(whole, types, strict=True)]
    return [[part[rank] for part in parts] for rank in range(size)]


def local_shapes(whole: Sequence[Tensor], types: Sequence[LocalType], size: int) -> list[tuple[int, ...]]:
    """The shape of one rank's part of each tensor; asserts that the types divide them evenly."""
    shapes = [local_shape(tuple(x.shape), (t,), (size,)) for x, t in zip(whole, types, strict=True)]
    assert None not in shapes, f"{types} do not divide {[tuple(x.shape) for x in whole]} by {size}"
    return [shape for shape in shapes if shape is not None]


def vjp(results: Sequence[Tensor], cotangents: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of every operand; zero where none flows."""
    flowing = [(y, g) for y, g in zip(results, cotangents, strict=True) if y.requires_grad]
    wanted = [x for x in operands if x.requires_grad]
    if not flowing or not wanted:
        return [torch.zeros_like(x) for x in operands]
    ys, gs = zip(*flowing, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, gs, allow_unused=True, materialize_grads=True))
    return [next(found) if x.requires_grad else torch.zeros_like(x) for x in operands]


# What a rule must satisfy before it is worth running.


def check_rule(rule: Rule, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Assert that the rule fits the shapes and speaks only of factors and operands that exist."""
    rule.check(tuple(tuple(x.shape) for x in operands), tuple(tuple(y.shape) for y in results))
    used: set[str] = set()
    for dims in (*rule.operands, *rule.results):
        factors = [factor for dim in dims for factor in dim]
        assert len(factors) == len(set(factors)), f"a factor occurs twice in {dims}"
        used.update(factors)
    assert used == set(rule.sizes), f"factors {used} are used, {set(rule.sizes)} have sizes"
    assert rule.whole <= used and set(rule.ways) <= used, "whole factors, or factors with ways, that do not exist"
    assert 1 not in rule.sizes.values(), f"a dim of size 1 is (), it has no factor: {rule.sizes}"
    for positions in (rule.addends, *rule.linear):
        assert positions <= set(range(len(operands))), f"{positions} are not operands"
    inexact = all(y.is_floating_point() or y.is_complex() for y in results)
    assert inexact or not rule.linear, "sums of integers and booleans do not survive reshardings"


def check_saves(saves: Sequence[Saved], operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Assert that the tensors that backward is said to need exist."""
    given = {*(Saved("in", i) for i in range(len(operands))), *(Saved("out", i) for i in range(len(results)))}
    assert {saved for saved in saves if saved.kind not in OWN} <= given, f"saves {saves} of {sorted(given)}"


def strip_counts(rule: Rule) -> dict[str, frozenset[int]]:
    """Every way to see a factor as strips of equal length."""
    return {f: frozenset(n for n in range(1, size) if size % n == 0) for f, size in rule.sizes.items()}


# Small things.


def tensors(value: object) -> Iterator[Tensor]:
    """The tensors in a value, nested lists and tuples flattened."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def tensor_type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.is_floating_point())


def leaves(values: Sequence[Tensor]) -> list[Tensor]:
    """Fresh copies that gradients can be taken of."""
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in values]


def random_like(tensor: Tensor) -> Tensor:
    """Random multiples of 1/8, of which sums are exact in any floating-point dtype; of 1, for integers."""
    eighths = torch.randint(-16, 17, tensor.shape)
    return (eighths / 8 if tensor.is_floating_point() else eighths).to(tensor.dtype)


def flat(rows: Sequence[Sequence[Tensor]] | Iterator[list[Tensor]]) -> list[Tensor]:
    return [tensor for row in rows for tensor in row]


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True, msg=lambda message: f"{what}: {message}")
