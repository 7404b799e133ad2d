"""Joint: forward and backward of a ``torch.autograd.Function`` as one graph of ATen operators, in the planner's words.

The Function is applied to tensors without data, autograd runs its backward, and both are traced: so what it saves,
which gradients it leaves out and what it does not differentiate are as autograd has them. Writes in place are made
functional, and operators without a row become others that have one, where torch knows which.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.functions.carry import Carried, draws
from autopar.functions.outside import Watching
from autopar.graph.aten import arguments, shares_of, storages_of, tensor_type, values_of
from planner.base.errors import CaptureError
from planner.ir.graph import Graph, Node, Ref
from planner.ops import OPS


class NotTraced(Exception):
    """A Function that has no joint graph; says why."""


@dataclass(frozen=True)
class Operand:
    """A tensor that a Function takes: what must be known of it to trace that."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(compare=False)
    trained: bool


def operands_of(node: fx.Node, trained: Sequence[bool]) -> tuple[Operand, ...]:
    """The tensors that a traced call takes; ``trained``: whether gradients are asked of each."""
    tensors = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    return tuple(Operand(tuple(t.shape), t.dtype, t.device, asked) for t, asked in zip(tensors, trained, strict=True))


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a Function, as one graph.

    Attributes:
        graph: its inputs are the operands, then the gradients that are given; literals are constants.
        targets: the operator of every node, by name.
        operands, results: of forward.
        given: for each result, its gradient; ``None`` where that has none.
        gradients: for each operand, its gradient; ``None`` where it gets none.
        backward: names of the nodes that backward runs.
        zeros: constants that are 0.
    """

    graph: Graph
    targets: dict[str, Any]
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    given: tuple[Ref | None, ...]
    gradients: tuple[Ref | None, ...]
    backward: frozenset[str]
    zeros: frozenset[str]


def trace(carried: Carried, operands: Sequence[Operand], left_out: frozenset[int] = frozenset()) -> Joint:
    """The joint graph.

    Args:
        left_out: results to which no gradient comes.

    Raises:
        NotTraced: it cannot be traced.
        CaptureError: it draws random numbers, or finds parameters or buffers by itself.
    """
    try:
        with alone(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            traced = _Trace(carried, operands, left_out)
            module, forward = traced.functional()
        return traced.joint(module, forward)
    except (NotTraced, CaptureError):
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise NotTraced("it decides on the values of tensors") from error
    except Exception as error:
        text = str(error).strip()
        raise NotTraced(f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}") from error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, no mode of those around a call (simulated ranks, exact dtypes) sees what is traced."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class _Trace:
    """Traces twice: what runs, then the same without writes in place."""

    def __init__(self, carried: Carried, operands: Sequence[Operand], left_out: frozenset[int]):
        self.carried, self.left_out = carried, left_out
        self.inputs = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in operands]
        self.trained = [place for place, o in enumerate(operands) if o.trained]
        results, trained = self._forward(self.inputs)
        self.given = [place for place, is_trained in enumerate(trained) if is_trained and place not in left_out]
        self.gradients = [torch.empty_like(results[place]) for place in self.given]
        self.names: set[str] = set()
        self.has_gradient: list[bool] = []

    def functional(self) -> tuple[fx.GraphModule, int]:
        """Both without writes in place, and how many nodes run before backward."""
        everything = [*self.inputs, *self.gradients]
        again = _Again(make_fx(self._run)(*everything), self.names)
        run = torch.func.functionalize(again.run, remove="mutations")
        module = make_fx(run, decomposition_table=_decompositions())(*everything)
        before = list(module.graph.nodes)[: again.forward]
        # Only zeros in the place of gradients that do not come: what else nobody reads runs all the same.
        module.graph.eliminate_dead_code(lambda node: node.op != "call_function" or bool(node.all_input_nodes))
        return module, len({*before} & {*module.graph.nodes})

    def _forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        given = [t.detach() for t in inputs]
        for place in self.trained:
            given[place].requires_grad_()
        results = self.carried.apply(given)
        return results, [t.requires_grad for t in results]

    def _run(self, *tensors: Tensor) -> list[Tensor]:
        inputs, gradients = list(tensors[: len(self.inputs)]), tensors[len(self.inputs) :]
        for place in self.trained:
            inputs[place] = inputs[place].detach().requires_grad_()
        mode = get_proxy_mode()
        assert mode is not None
        found: Sequence[Tensor | None] = [None] * len(self.trained)
        with _Arguments(self.carried.name, tensors):
            results = self.carried.apply(inputs)
            self.names.update(node.name for node in mode.tracer.graph.nodes)
            if self.given and self.trained:
                roots, wanted = [results[place] for place in self.given], [inputs[place] for place in self.trained]
                found = torch.autograd.grad(roots, wanted, list(gradients), allow_unused=True)
        self.has_gradient = [gradient is not None for gradient in found]
        return [*results, *(gradient for gradient in found if gradient is not None)]

    def joint(self, module: fx.GraphModule, forward: int) -> Joint:
        """The graph in the planner's words."""
        nodes: list[Node] = []
        targets: dict[str, Any] = {}
        backward, zeros = set(), set()
        refs: dict[fx.Node, Ref] = {}
        memory: dict[Ref, int] = {}
        leaves: list[Ref] = []
        left: list[Any] = []
        for at, node in enumerate(module.graph.nodes):
            if node.op == "output":
                left = list(node.args[0])
                continue
            if node.target is operator.getitem:
                refs[node] = Ref(refs[node.args[0]].node, node.args[1])
                continue
            if node.op == "placeholder":
                made = Node(node.name, "input", (), (tensor_type(node.name, node.meta["val"], False),))
                leaves.append(Ref(node.name))
            elif node.op == "get_attr":
                value = _literal(getattr(module, node.target))
                node.meta["val"] = value
                text = (("value", repr(value.item())),)
                made = Node(node.name, "const", text, (tensor_type(node.name, value, False),))
                if value.item() == 0:
                    zeros.add(node.name)
            else:
                if torch.Tag.nondeterministic_seeded in node.target.tags:
                    raise draws(self.carried.name, node.target)
                types = tuple(tensor_type(node.name, t, False) for t in values_of(node, node.meta["val"]))
                args = arguments(node, refs)
                made = Node(node.name, str(node.target), args, types)
                own = storages_of(node)
                made = Node(made.name, made.op, args, types, shares=shares_of([memory[r] for r in made.inputs], own))
                targets[node.name] = node.target
            nodes.append(made)
            refs[node] = Ref(node.name)
            memory.update({Ref(node.name, i): storage for i, storage in enumerate(storages_of(node))})
            if at >= forward:
                backward.add(node.name)
        count = len(left) - sum(self.has_gradient)
        results, found = [refs[node] for node in left[:count]], iter([refs[node] for node in left[count:]])
        given = iter(leaves[len(self.inputs) :])
        gradients = dict(zip(self.trained, self.has_gradient, strict=True))
        return Joint(
            Graph(tuple(nodes), tuple(refs[node] for node in left)),
            targets,
            tuple(leaves[: len(self.inputs)]),
            tuple(results),
            tuple(next(given) if place in self.given else None for place in range(count)),
            tuple(next(found) if gradients.get(place) else None for place in range(len(self.inputs))),
            frozenset(backward),
            frozenset(zeros),
        )


class _Arguments(Watching):
    """Allows arguments alone, and what is made of them and of numbers that the code writes (``lift_fresh``)."""

    def check(self, func: Any, tensors: list[Tensor]) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            return
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                raise _reads(tensor)


def _reads(tensor: Tensor) -> NotTraced:
    return NotTraced(f"it reads a tensor of shape {tuple(tensor.shape)} that is not among its arguments")


def _literal(tensor: Tensor) -> Tensor:
    """The tensor that a graph holds for a number that the code writes."""
    value = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if value is None or value.ndim or value.requires_grad:
        raise _reads(tensor)
    return value


class _Again(fx.Interpreter):
    """Runs what was traced once more; ``forward`` is then how many nodes were traced before backward began."""

    def __init__(self, module: fx.GraphModule, names: set[str]):
        super().__init__(module)
        self.extra_traceback = False
        self.names, self.forward = names, 0
        self._is_over = False

    def run_node(self, n: fx.Node) -> Any:
        self._is_over |= n.op == "call_function" and n.name not in self.names
        result = super().run_node(n)
        mode = get_proxy_mode()
        assert mode is not None
        if not self._is_over:
            self.forward = len(mode.tracer.graph.nodes)
        return result


@cache
def _decompositions() -> dict[Any, Any]:
    """What operators without a row are made of."""
    found = {op: made_of for op, made_of in core_aten_decompositions().items() if str(op) not in OPS}
    return {**found, torch.ops.aten.index_put.default: _filled}


def _filled(self: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """``x[mask] = 0`` as ``where``."""
    mask = indices[0]
    is_mask = len(indices) == 1 and mask is not None and mask.dtype == torch.bool and mask.shape == self.shape
    if not is_mask or values.ndim or accumulate:
        return NotImplemented
    return torch.where(mask, values.to(self.dtype), self)  # type: ignore[arg-type]
