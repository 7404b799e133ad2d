"""How each operator is called on one rank's parts.

Most operators run unchanged on local tensors. The exceptions are rows of two tables: operators whose
arguments name a size (:mod:`autopar.graph.local_arguments`), and operators whose sharding needs a runtime layer
(:data:`autopar.runtime.layers.LOCAL_FORMS`). Operators that draw random numbers or behave otherwise in
training ask the run state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.graph.local_arguments import local_call
from autopar.runtime.layers import CONTRACTED, LOCAL_FORMS, LocalForm
from autopar.runtime.layers.float8_linear import float8_linear
from autopar.runtime.layers.random import draw, draw_attention
from planner.base.errors import PlanError
from planner.cost.kernels import Scaling
from planner.formulation.strategies import Choice
from planner.ir.graph import Node, TensorType
from planner.ir.layout import MICRO, Layout, Mesh, Shard, local_outer, local_shape
from planner.ops import OPS, attends
from planner.ops.sharding_rule import Rule, find


@dataclass
class LocalCall:
    """One operator call being emitted.

    Attributes:
        node, rule, choice: what the planner says of it.
        target: the operator.
        args: arguments by schema name; tensors are fx nodes of the local program.
        group: emits the fx node of a mesh axis's process group.
        state: emits the fx node of the program's run state (training mode and random numbers).
        sent: what the operator's layer began to send, if it did.
        scaling: how its products are scaled to float8, if they are.
        count: of how many tokens a loss is the mean, where that is found before a micro-batched step.
    """

    graph: fx.Graph
    node: Node
    operand_types: tuple[TensorType, ...]
    rule: Rule
    choice: Choice
    mesh: Mesh
    target: torch._ops.OpOverload
    args: dict[str, Any]
    group: Callable[[int], fx.Node]
    state: Callable[[], fx.Node]
    count: fx.Node | None = None
    sent: fx.Node | None = None
    scaling: Scaling | None = None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, trailing defaults left out."""
        schema = self.target._schema.arguments
        positional = [a for a in schema if not a.kwarg_only]
        while positional and self._is_default(positional[-1]):
            positional.pop()
        keywords = {a.name: self.args[a.name] for a in schema if a.kwarg_only and not self._is_default(a)}
        return tuple(self.args[a.name] for a in positional), keywords

    def _is_default(self, argument: Any) -> bool:
        value = self.args[argument.name]
        if argument.name == "pin_memory":
            return not value
        return (
            argument.has_default_value()
            and type(value) is type(argument.default_value)
            and (value == argument.default_value)
        )

    def emit(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """The call, under the name that the model's graph gives the operator."""
        return self.graph.create_node("call_function", function, args, kwargs, name=self.node.name)

    def sharded(self, ways: tuple[str, ...]) -> tuple[int, ...]:
        """Axes on which a factor is sharded in one of ``ways``, major first."""
        return tuple(i for i, s in enumerate(self.choice.axes) if s.sharded in ways and self.mesh.axes[i].size > 1)

    def groups(self, axes: tuple[int, ...]) -> tuple[fx.Node, ...]:
        return tuple(self.group(axis) for axis in axes)

    def operand_shapes(self) -> list[tuple[int, ...]]:
        """Rank-local shapes of the tensor operands."""
        return self._local(self.operand_types, self.choice.operands)

    def result_shapes(self) -> list[tuple[int, ...]]:
        """Rank-local shapes of the results."""
        return self._local(self.node.results, self.choice.results)

    def _local(self, types: tuple[TensorType, ...], layouts: tuple[Layout, ...]) -> list[tuple[int, ...]]:
        shapes = [local_shape(t.shape, layout, self.mesh.sizes) for t, layout in zip(types, layouts, strict=True)]
        assert None not in shapes, "the planner keeps even layouts only"
        return shapes  # type: ignore[return-value]


def local_form(call: LocalCall) -> fx.Node:
    """Emit ``call`` on local tensors."""
    call.target, call.args = local_call(call.target, call.args, call.operand_shapes(), call.result_shapes())
    _ask_whether_training(call)
    form = LOCAL_FORMS.get(call.node.op)
    groups = _layer_groups(call, form) if form is not None else {}
    if draws(call.node, call.target):
        varying = call.groups(
            tuple(i for i, s in enumerate(call.choice.axes) if s.factor and call.mesh.axes[i].size > 1)
        )
        if attends(call.node.op):
            positional = tuple(
                call.args[name] for name in ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            )
            keywords = {name: value for name, value in call.args.items() if name in ATTENTION_KEYWORDS}
            return call.emit(draw_attention, (call.state(), varying, *positional), {**keywords, **groups})
        positional, keywords = call.arguments()
        return call.emit(draw, (call.target, call.state(), varying, *positional), keywords)
    positional, keywords = call.arguments()
    if call.scaling is not None:
        return call.emit(float8_linear, positional, {"scaling": call.scaling})
    if form is None or not (groups or form.is_region or form.takes_path or form.always):
        return call.emit(call.target, positional, keywords)
    if form.takes_path and call.node.path:
        groups["path"] = call.node.path
    first = (call.target,) if form.takes_op else (call.state(),) if form.is_region else ()
    return call.emit(form.function, (*first, *positional), {**keywords, **groups})


SAMPLES = "sample_groups"
"""The keyword of experts that says which ranks count other tokens."""

OVER_MICRO_BATCHES = ("token_groups", "contracted_groups", SAMPLES)
"""Keywords of layers that only count: an axis may be micro-batches."""

BY_MICRO_BATCH = ("batch_groups",)
"""Keywords of layers that share among ranks what each micro-batch has of its own, where a plan has them do so."""

ATTENTION_KEYWORDS = ("scale", "enable_gqa", "window", "softcap")

COUNT = "count"
"""The keyword of losses that takes of how many tokens they are the mean."""


SENT = "sent"
"""The keyword of layers that takes what they began to send."""


def begun(call: LocalCall, operands: Sequence[fx.Node]) -> fx.Node:
    """Emit what the layer of ``call`` sends before others are computed, of these operands."""
    form = LOCAL_FORMS[call.node.op]
    assert form.begins is not None, "only layers that can begin early have collectives that others hide"
    args: tuple[Any, ...] = (call.state(), *operands, call.operand_shapes()[3][0])
    name = f"{call.node.name}_{SENT}"
    groups = {keyword: found for keyword, found in _layer_groups(call, form).items() if keyword != SAMPLES}
    return call.graph.create_node("call_function", form.begins, args, groups, name=name)


def is_random(node: Node, target: torch._ops.OpOverload) -> bool:
    """Whether an operator may draw random numbers."""
    row = OPS.get(node.op)
    return row.random if row is not None else torch.Tag.nondeterministic_seeded in target.tags


def draws(node: Node, target: torch._ops.OpOverload) -> bool:
    """Whether an operator draws random numbers, as it is called here."""
    if not is_random(node, target):
        return False
    row = OPS.get(node.op)
    return row is None or not row.drops or bool(node[row.drops])


def _ask_whether_training(call: LocalCall) -> None:
    """What was captured in training mode trains only while the module does; a norm without running statistics always
    takes those of its input.
    """
    if "momentum" in call.args and call.args.get("running_mean") is None:
        return
    for name in ("train", "training", "use_input_stats"):
        if call.args.get(name) is True:
            call.args[name] = call.graph.call_function(getattr, (call.state(), "training"))


def _layer_groups(call: LocalCall, form: LocalForm) -> dict[str, Any]:
    """Keywords that tell a layer which axes shard which factors; empty when none does."""
    found: dict[str, Any] = {}
    for keyword, factors in form.groups.items():
        if factors == (CONTRACTED,):
            factors = tuple(f for f in call.rule.sizes if find(call.rule.results[0], f, call.rule.sizes) is None)
        axes = call.sharded(factors)
        if keyword in BY_MICRO_BATCH:
            axes = tuple(axis for axis in axes if call.mesh.axes[axis].name != MICRO)
        if not axes:
            continue
        if keyword in form.strips:
            axes = tuple(sorted(axes, key=lambda axis: (_outer(call, axis), axis)))
            found[form.strips[keyword]] = tuple(_strips(call, axis) for axis in axes)
        found[keyword] = call.groups(axes)
        if keyword not in OVER_MICRO_BATCHES and any(call.mesh.axes[axis].name == MICRO for axis in axes):
            raise PlanError(f"{call.node.name} ({call.node.op}) mixes micro-batches in {call.node.path or 'the model'}")
    if call.count is not None:
        found[COUNT] = call.count
    if call.sent is not None:
        found[SENT] = call.sent
    return found


def _outer(call: LocalCall, axis: int) -> int:
    """The strips of the whole dim of the first operand that an axis cuts: wider strips are cut first."""
    shard = call.choice.operands[0][axis]
    assert isinstance(shard, Shard)
    return shard.outer


def _strips(call: LocalCall, axis: int) -> int:
    """Into how many strips an axis finds the dim of the first operand divided that it cuts."""
    return local_outer(call.choice.operands[0], axis, call.mesh.sizes)
