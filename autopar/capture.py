"""Capture: from an ``nn.Module`` and example inputs to one flat ATen graph.

``torch.export`` (non-strict, on fake tensors, so nothing is computed and meta-device models work) gives
the training graph; this module makes it flat, functional and free of assertions, and remembers how the
user's nested inputs and outputs map onto it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from planner.errors import CaptureError, InputError

LossFn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph: flat functional ATen graph; placeholders are the leaves.
        leaves: placeholder name -> (kind, original name), kind one of ``input``, ``param``, ``buffer``, ``const``.
        constants: tensors that the model's code holds, by placeholder name.
        updates: (buffer name, name of the node that holds its new value).
        outputs: names of the nodes that leave the model, ``None`` where the output is a static value.
        static_outputs: the static values, aligned with ``outputs``.
        in_spec, out_spec: how nested inputs (args, kwargs) and outputs are flattened.
        input_names: aligned with the flattened inputs: a placeholder's name, or ``None`` for a static value.
        training: whether any module was in training mode.
        static_inputs: the static values, aligned with ``input_names``.
    """

    graph: torch.fx.Graph
    leaves: Mapping[str, tuple[str, str]]
    constants: Mapping[str, torch.Tensor]
    updates: tuple[tuple[str, str], ...]
    outputs: tuple[str | None, ...]
    static_outputs: tuple[Any, ...]
    input_names: tuple[str | None, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    training: bool
    static_inputs: tuple[Any, ...] = ()


class _WithLoss(nn.Module):
    """A model and the loss on its outputs, as one module whose output is the loss."""

    def __init__(self, module: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.module = module
        self._loss_fn = loss_fn
        self._accepted = _accepted_names(module)
        self.training = module.training

    def forward(self, **batch: Any) -> torch.Tensor:
        outputs = self.module(**{name: value for name, value in batch.items() if name in self._accepted})
        return self._loss_fn(outputs, batch)


def _accepted_names(module: nn.Module) -> frozenset[str]:
    """The inputs that ``module.forward`` names; what else is in a batch goes to the loss alone."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(module.forward).parameters.values()
    named = frozenset(p.name for p in parameters if p.kind in kinds)
    if not named:
        raise InputError(
            f"{type(module).__name__}.forward names none of its inputs (*args, **kwargs), so loss_fn cannot tell them "
            "from the loss's: wrap the model in a module whose forward names its inputs"
        )
    return named


def capture(
    model: nn.Module,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
) -> Captured:
    """Capture ``model`` on example inputs (the global batch).

    Args:
        model: on any device, the meta device included; in the mode (train or eval) it is to run in.
        example_args, example_kwargs: inputs of global shape; left out, the model's ``dummy_inputs`` are used.
        loss_fn: ``loss_fn(outputs, batch)`` where batch is ``example_kwargs``; names that ``model.forward``
            does not accept go to the loss alone.

    Raises:
        InputError: no example inputs and no ``dummy_inputs``.
        CaptureError: the model cannot be exported; the message names the line and the way out.
    """
    args, kwargs = _example_inputs(model, example_args, example_kwargs)
    whole = model
    if loss_fn is not None:
        if args:
            raise InputError("loss_fn needs the example inputs by name: pass example_kwargs instead of example_args")
        whole = _WithLoss(model, loss_fn)
    device = _device_of(model)
    # Export takes one tensor passed twice (labels=input_ids) for one input; copies keep them apart.
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(device, copy=True), (args, kwargs))
    with _quick_tracing():
        exported = _export(whole, args, kwargs)
        if _mutates(exported):
            exported = exported.run_decompositions({})
    return _flatten(exported, model, prefix="module." if loss_fn is not None else "")


def _example_inputs(
    model: nn.Module, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args is None and kwargs is None:
        dummy = getattr(model, "dummy_inputs", None)
        if dummy is None:
            raise InputError(
                f"{type(model).__name__} brings no dummy_inputs, so its inputs are unknown: pass "
                "example_kwargs={...} (or example_args=(...)) holding one global batch; only shapes and dtypes matter"
            )
        return (), dict(dummy)
    return tuple(args or ()), dict(kwargs or {})


def _device_of(model: nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    with warnings.catch_warnings(), _caches_off(model):
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            raise CaptureError(_explain(model, error)) from error


def _explain(model: nn.Module, error: Exception) -> str:
    """Which module and line stopped the export, and what to do."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    where = f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}" if frames else "?"
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"{type(model).__name__} cannot be captured as a graph.\n"
        f"  at  {where}\n  why {type(error).__name__}: {reason}\n"
        "  fix a graph holds one path through the code: branch on shapes or configuration, not on tensor values "
        "(torch.where instead of if; no .item(), .tolist() or data-dependent loops), pass every input that the code "
        "needs as an example input, and put code that cannot be traced in a torch.library.custom_op with a fake "
        "implementation."
    )


@contextlib.contextmanager
def _caches_off(model: nn.Module) -> Iterator[None]:
    """Transformers configurations ask for key-value caches by default; training graphs have none."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", False)}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


@contextlib.contextmanager
def _quick_tracing() -> Iterator[None]:
    """Leave out what only people who debug an export look at: it takes two fifths of the time.

    That is a Python stack for every node, Python code for every intermediate graph, and looking for garbage
    among objects that all live until the end.
    """
    before, collecting = getattr(torch.fx.config, "do_not_emit_stack_traces", False), gc.isenabled()
    torch.fx.config.do_not_emit_stack_traces = True
    gc.disable()
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before
        if collecting:
            gc.enable()


def _mutates(exported: ExportedProgram) -> bool:
    """Whether the graph writes to a tensor in place (running statistics, ``x += y``, ``x[i] = y``)."""
    for module in exported.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, torch._ops.OpOverload) and (
                    node.target._schema.is_mutable or node.target is torch.ops.aten.batch_norm.default
                ):
                    return True
    return False


def _flatten(exported: ExportedProgram, model: nn.Module, prefix: str) -> Captured:
    graph = exported.graph_module.graph
    _inline_no_grad(exported.graph_module)
    _drop_assertions(graph)
    signature = exported.graph_signature
    canonical = canonical_names(model)
    kinds = {InputKind.PARAMETER: "param", InputKind.BUFFER: "buffer"}
    leaves: dict[str, tuple[str, str]] = {}
    constants: dict[str, torch.Tensor] = {}
    input_names: list[str | None] = []
    static_inputs: list[Any] = []
    for spec in signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            name = spec.arg.name if isinstance(spec.arg, TensorArgument) else None
            input_names.append(name)
            static_inputs.append(getattr(spec.arg, "value", None))
            if name is not None:
                leaves[name] = ("input", name)
        elif spec.kind in kinds:
            original = str(spec.target).removeprefix(prefix)
            leaves[spec.arg.name] = (kinds[spec.kind], canonical.get(original, original))
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            leaves[spec.arg.name] = ("const", str(spec.target))
            constants[spec.arg.name] = exported.constants[str(spec.target)]
        else:
            raise CaptureError(
                f"the model holds an input of kind {spec.kind.name} ({spec.target}), which has no graph form"
            )
    _merge_shared(graph, leaves)
    _drop_contiguous(graph)
    updates, outputs, static = [], [], []
    for spec in signature.output_specs:
        name = spec.arg.name if isinstance(spec.arg, TensorArgument) else None
        if spec.kind == OutputKind.BUFFER_MUTATION:
            assert name is not None
            updates.append((str(spec.target).removeprefix(prefix), name))
        elif spec.kind == OutputKind.USER_OUTPUT:
            outputs.append(name)
            static.append(getattr(spec.arg, "value", None))
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            raise CaptureError(
                f"the model writes into its input {spec.target!r} in place; clone the input before writing"
            )
        else:
            raise CaptureError(
                f"the model's forward writes into {spec.target!r} in place ({spec.kind.name.lower()}), which a plan "
                "cannot carry: write to parameters between steps (constraints, max_norm), not in forward"
            )
    graph.eliminate_dead_code()
    return Captured(
        graph,
        leaves,
        constants,
        tuple(updates),
        tuple(outputs),
        tuple(static),
        tuple(input_names),
        exported.call_spec.in_spec,
        exported.call_spec.out_spec,
        any(module.training for module in model.modules()),
        tuple(static_inputs),
    )


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> the first name of the same tensor (tied weights share one)."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names[name] = first.setdefault(id(tensor), name)
    return names


def _merge_shared(graph: torch.fx.Graph, leaves: dict[str, tuple[str, str]]) -> None:
    """One placeholder per tensor: uses of a tied weight's second name go to the first."""
    first: dict[tuple[str, str], torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "placeholder" or node.name not in leaves:
            continue
        leaf = leaves[node.name]
        if leaf[0] in ("param", "buffer") and leaf in first:
            node.replace_all_uses_with(first[leaf])
            graph.erase_node(node)
            del leaves[node.name]
        else:
            first[leaf] = node


def _inline_no_grad(module: torch.fx.GraphModule) -> None:
    """Inline ``torch.no_grad()`` regions; their nodes carry ``meta["no_grad"]``."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled":
            continue
        enabled, body, *operands = node.args
        inner = getattr(module, str(body.target))
        _inline_no_grad(inner)
        mapping = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            for inner_node in inner.graph.nodes:
                if inner_node.op == "output":
                    results = inner_node.args[0]
                elif inner_node.op != "placeholder":
                    mapping[inner_node] = graph.node_copy(inner_node, mapping.__getitem__)
                    mapping[inner_node].meta["no_grad"] = not enabled
        for user in list(node.users):
            assert user.target.__name__ == "getitem", "a no_grad region is read only through its results"
            user.replace_all_uses_with(mapping[results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(node)


def _drop_contiguous(graph: torch.fx.Graph) -> None:
    """How memory is ordered depends on the device that captured; leave it out, so that graphs do not."""
    contiguous = torch.ops.aten.contiguous.default
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is contiguous and len(node.args) == 1 and not node.kwargs:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _drop_assertions(graph: torch.fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            graph.erase_node(node)
