"""Type-check an emitted program for gradient correctness, at the plan's real mesh size, without a cluster.

The program runs once on meta tensors, which have shapes but no data, as rank 0 of a fake process group of
any size. ``spmd_types`` follows the local type of every tensor from the leaves on: an ``I`` that meets a
sharded operand, a term of a sum taken for the whole, a resharding from a type that the tensor does not
have are errors there. Beside that, every operator's operands must have the types that the plan says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed._tools.fake_collectives  # collectives of meta tensors
import torch.utils._pytree as pytree
from spmd_types.checker import typecheck as spmd_typecheck
from torch import Tensor, fx
from torch.distributed import ProcessGroup

from autopar.capture.capture import Captured
from autopar.emit.block_program import STATE
from autopar.emit.build import MicroBatched
from autopar.emit.local_ops import COUNT
from autopar.emit.rewrite import Rewritten, rewrite
from autopar.emit.stage_programs import stages_of
from autopar.runtime.autograd.recompute import gatherings_of, recompute
from autopar.runtime.host.error_notes import first_line
from autopar.runtime.spmd.mesh import device_mesh, groups_of
from autopar.runtime.spmd.micro_batch import MicroBatches
from autopar.runtime.spmd.parameters import gather_parameters, replicate_parameters
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.resharding import convert
from autopar.runtime.spmd.run_state import RunState
from autopar.verification.simulator import fake_process_group
from planner.base.errors import VerificationError
from planner.formulation.assignment import Assignment
from planner.formulation.strategies import Choice
from planner.ir.graph import Graph, Node, Ref
from planner.ir.layout import MICRO, I, Layout, LocalType, Mark, Mesh, P, R, Shard, format_layout, local_shape


@dataclass(frozen=True)
class TypeReport:
    """What was checked: calls of operators and reshardings, on a mesh of this many ranks."""

    operators: int
    conversions: int
    ranks: int

    def __str__(self) -> str:
        return (
            f"{self.operators} operator calls and {self.conversions} reshardings have the right types on "
            f"{self.ranks} ranks"
        )


def typecheck(captured: Captured, assignment: Assignment, micro_batched: MicroBatched | None = None) -> TypeReport:
    """Emit the program of rank 0, or with micro-batches those of all stages, and check them.

    Raises:
        VerificationError: names the operator or resharding whose types are wrong.
    """
    with fake_process_group(assignment.space.mesh.size):
        if micro_batched is not None:
            return _check_stages(captured, assignment, micro_batched)
        program, groups = emit(captured, assignment)
        return check_program(program, captured, assignment, groups)


def emit(captured: Captured, assignment: Assignment) -> tuple[Rewritten, Mapping[str, ProcessGroup]]:
    """The program of rank 0 for meta tensors, and the groups of the mesh's axes, in a fake process group."""
    groups = groups_of(device_mesh(assignment.space.mesh, "cpu"))
    state = RunState(RandomState(0), captured.training)
    return rewrite(captured, assignment, {**groups, STATE: state}, torch.device("meta")), groups


def check_program(
    program: Rewritten, captured: Captured, assignment: Assignment, groups: Mapping[str, ProcessGroup]
) -> TypeReport:
    """Check an emitted program, run on meta tensors; see :func:`typecheck`."""
    mesh = assignment.space.mesh
    checker = _Checker(groups, mesh, assignment.space.graph)
    leaves = [checker.made(Ref(leaf.name), assignment.produced(Ref(leaf.name))) for leaf in checker.graph.leaves]
    with spmd_typecheck():
        results = _TypedRoot(program.module, checker).run(*leaves)
        for number, (ref, result) in enumerate(zip(assignment.space.leaving, results, strict=True)):
            wanted = assignment.output_layout(number)
            checker.expect(result, wanted, assignment.space.graph.type_of(ref).shape, f"output {number}, {ref}")
    graph = assignment.space.graph
    for position in graph.roots:
        if not graph.type_of(graph.outputs[position]).shape:
            results[position].backward()
    return TypeReport(checker.operators, checker.conversions, mesh.size)


def _check_stages(captured: Captured, assignment: Assignment, micro_batched: MicroBatched) -> TypeReport:
    """Check every program of every stage: what enters it is as the plan says, and so must be what leaves it."""
    space, mesh = assignment.space, assignment.space.mesh
    groups = groups_of(device_mesh(mesh.micro_batched(1), "cpu"))
    state = RunState(RandomState(0), captured.training)
    holder = {**groups, STATE: state, MICRO: MicroBatches(mesh.micro_batches)}
    checker = _Checker(groups, mesh, space.graph)
    for outline in stages_of(captured, assignment, micro_batched.bounds, holder, torch.device("meta")):
        stage, joints = outline.stage(), outline.joints
        stored = [checker.made(Ref(name), assignment.produced(Ref(name))) for name in stage.parameters]
        with spmd_typecheck():
            gathered = stored if stage.gather is None else _TypedRoot(stage.gather, checker).run(*stored)
        used = []
        for (ref, layout), value in zip(joints.used, gathered, strict=True):
            checker.expect(value, layout, space.graph.type_of(ref).shape, f"{ref}, as operators use it")
            used.append(checker.made(ref, layout))
        leaves = [checker.made(Ref(name), assignment.produced(Ref(name))) for name in stage.leaves]
        received = [checker.made(ref, assignment.consumer_layout(ref)) for ref in joints.received]
        with spmd_typecheck():
            counts = () if stage.count is None else _TypedRoot(stage.count, checker).run(*leaves)
            results = _TypedRoot(stage.program, checker).run(*used, *leaves, *received, *counts)
        wanted = [(ref, assignment.consumer_layout(ref)) for ref in joints.sent]
        wanted += [(space.leaving[position], assignment.output_layout(position)) for position in stage.outputs]
        for (ref, layout), value in zip(wanted, results, strict=True):
            shape = space.graph.type_of(ref).shape
            whole = mesh.micro_batches > 1 and ref not in joints.sent  # the runtime puts micro-batches together
            checker.expect(value, layout, None if whole else shape, f"what leaves stage {stage.number}, {ref}")
        trained = [value for value in results if value.requires_grad]
        torch.autograd.backward(trained, [torch.empty_like(value) for value in trained])
    return TypeReport(checker.operators, checker.conversions, mesh.size)


class _Checker:
    """Sets and compares the types of tensors, one local type per mesh axis."""

    def __init__(self, groups: Mapping[str, ProcessGroup], mesh: Mesh, graph: Graph):
        self.graph = graph
        # Axes of one rank have no types, and micro-batches none that a program sees.
        self.axes = {
            number: spmd.normalize_axis(groups[axis.name])
            for number, axis in enumerate(mesh.axes)
            if axis.size > 1 and axis.name != MICRO
        }
        self.names, self.sizes = mesh.names, mesh.sizes
        self.operators, self.conversions = 0, 0

    def made(self, ref: Ref, layout: Layout) -> Tensor:
        """A part of a value on the meta device; with micro-batches, of one micro-batch."""
        tensor = self.graph.type_of(ref)
        shape = local_shape(tensor.shape, layout, self.sizes)
        assert shape is not None
        value = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device="meta")
        return self.stamp(value.requires_grad_(tensor.grad), layout)

    def stamp(self, value: Tensor, types: Layout) -> Tensor:
        """Give ``value`` these types, whatever it had."""
        spmd.runtime._set_local_type(value, {axis: _spmd(types[number]) for number, axis in self.axes.items()})
        return value

    def has(self, value: Tensor, number: int) -> object:
        """The type of ``value`` on an axis; ``None`` where it has none."""
        return spmd.get_local_type(value).get(self.axes[number])

    def alike(self, value: Tensor, other: Tensor, what: str) -> None:
        """Assert that two tensors are the same part of the same tensor."""
        for number in self.axes:
            have, wanted = self.has(other, number), self.has(value, number)
            if have is not wanted:
                raise VerificationError(
                    f"{what}: on axis {self.names[number]!r} it has type {have or 'none'} instead of {wanted or 'none'}"
                )
        if value.shape != other.shape:
            raise VerificationError(f"{what}: it has shape {tuple(other.shape)} instead of {tuple(value.shape)}")

    @contextlib.contextmanager
    def pretending(self, values: list[Tensor], numbers: list[int]) -> Iterator[None]:
        """Inside, ``values`` are ``R`` on the axes ``numbers``."""
        before = [dict(spmd.get_local_type(value)) for value in values]
        for value, types in zip(values, before, strict=True):
            spmd.runtime._set_local_type(value, types | {self.axes[number]: spmd.R for number in numbers})
        try:
            yield
        finally:
            for value, types in zip(values, before, strict=True):
                spmd.runtime._set_local_type(value, types)

    def expect(self, value: Tensor, types: Layout, shape: tuple[int, ...] | None, what: str) -> None:
        """Assert that ``value`` is such a part of a tensor of ``shape``; without a gradient I is as good as R."""
        for number in self.axes:
            have, wanted = self.has(value, number), _spmd(types[number])
            alike = not value.requires_grad and {have, wanted} == {spmd.R, spmd.I}
            if have is not wanted and not alike:
                raise VerificationError(
                    f"{what}: on axis {self.names[number]!r} it has type {have or 'none'}, the plan says {wanted}"
                )
        if shape is not None and value.shape != local_shape(shape, types, self.sizes):
            raise VerificationError(
                f"{what}: it has shape {tuple(value.shape)} on a rank, which as {format_layout(types)} is no part of "
                f"{shape} on {self.sizes} ranks"
            )


VARYING = Mark("V")
_MARKS: dict[Mark, Any] = {R: spmd.R, I: spmd.I, P: spmd.P, VARYING: spmd.V}


def _spmd(local_type: LocalType) -> Any:
    return spmd.V if isinstance(local_type, Shard) else _MARKS[local_type]


class _TypedRoot(fx.Interpreter):
    """The root program: blocks are interpreted too."""

    def __init__(self, module: fx.GraphModule, checker: _Checker):
        super().__init__(module)
        self.extra_traceback = False
        self.checker = checker

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _TypedRoot(self.fetch_attr(target), self.checker).run(*args)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not recompute:
            return super().call_function(target, args, kwargs)
        program, again, *inputs = args
        outputs, discarded, kept = _TypedRoot(program, self.checker).run(*inputs)
        with torch.no_grad():
            made = _TypedRoot(again, self.checker).run(*kept, *gatherings_of(inputs))
        for old, new in zip(discarded, made, strict=True):
            self.checker.alike(old, new, f"{again.__class__.__name__}: a value that is recomputed")
        return outputs

    def run_node(self, n: fx.Node) -> Any:
        node = n.meta.get("node")
        if node is not None:
            return self.operator(n, node)
        if n.op == "call_function" and n.target in (convert, replicate_parameters, gather_parameters):
            self.checker.conversions += 1
        if n.target is torch.ops.aten.detach.default:
            with spmd.no_typecheck():
                result = super().run_node(n)
            spmd.assert_type_like(result, *self.fetch_args_kwargs_from_env(n)[0])
            return result
        try:
            return super().run_node(n)
        except spmd.SpmdTypeError as error:
            raise VerificationError(f"{n.name} = {n.format_node()}: {first_line(error)}") from error

    def operator(self, n: fx.Node, node: Node) -> Any:
        """One operator: operands as the plan says, then the checker's own rule, then the plan's result types."""
        checker, choice = self.checker, n.meta["choice"]
        where = f"{node.path or '(root)'}: {node.op} ({n.name}), run as {choice.label}"
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        operands = (args, {name: value for name, value in kwargs.items() if name != COUNT})
        given = [value for value in pytree.tree_leaves(operands) if isinstance(value, Tensor)]
        assert len(given) == len(node.inputs), f"{n.name} takes other tensors than {node.name}"
        shapes = [t.shape for t in self.checker.graph.input_types(node)]
        for position, (value, shape) in enumerate(zip(given, shapes, strict=True)):
            types = tuple(s.operands[position] for s in choice.axes)
            checker.expect(value, types, shape, f"{where}: operand {position}")
        checker.operators += 1
        # That an operator is linear where the plan says so is proved by the op table's tests; the checker knows it of
        # torch functions, not of operators: on such an axis it is shown whole tensors.
        terms = [number for number in checker.axes if any(s == P for s in choice.axes[number].operands)]
        # A constant is the same wherever it is made.
        constant = not given or "aten.new_" in node.op
        try:
            with checker.pretending(given, terms):
                with spmd.no_typecheck() if constant else contextlib.nullcontext():
                    results = self.call_function(n.target, args, kwargs)
                several = isinstance(results, (tuple, list))
                values = list(results) if several else [results]
                for index, value in enumerate(values):
                    if not constant:
                        types = tuple(s.results[index] for s in choice.axes)
                        checker.expect(value, self.seen(value, types, choice, terms), None, f"{where}: result {index}")
                    if any(value is operand for operand in given):
                        with spmd.no_typecheck():
                            values[index] = value.view_as(value)
        except spmd.SpmdTypeError as error:
            raise VerificationError(f"{where}: {first_line(error)}") from error
        read = {user.args[1] for user in n.users} if several else {0}
        for index, value in enumerate(values):
            types = tuple(s.results[index] for s in choice.axes)
            checker.stamp(value, types)
            # What a kernel makes for its own backward may differ between devices.
            whole = node.results[index].shape if index in read else None
            checker.expect(value, types, whole, f"{where}: result {index}")
        return values if several else values[0]

    def seen(self, value: Tensor, types: Layout, choice: Choice, terms: list[int]) -> Layout:
        """The plan's types of a result as the checker sees them.

        Local types do not tell a slice from a term of a sum: where the plan shards a factor that the result lacks,
        the plan's ``P`` is the checker's ``V``. And equal slices (of what is spread along a sharded factor) are ``R``
        to it; the gradients of both are per rank.
        """
        found = list(types)
        for number in self.checker.axes:
            have = self.checker.has(value, number)
            if number in terms:
                found[number] = R
            elif types[number] == P and choice.axes[number].factor and have is spmd.V:
                found[number] = VARYING
            elif isinstance(types[number], Shard) and have is spmd.R:
                found[number] = R
        return tuple(found)
