"""Capture an ``nn.Module`` and example inputs as one flat ATen graph.

``torch.export`` (non-strict, on fake tensors, so nothing is computed and meta-device models work) gives
the training graph; this module makes it flat, functional and free of assertions, and remembers how the
user's nested inputs and outputs map onto it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from autopar.capture.buffer_assignment import assigned, buffers, written_in_place
from autopar.capture.export_errors import failure, on_values, reads_values, without_torchs_notes
from autopar.capture.flatten import flatten
from autopar.capture.held_tensors import held_among
from autopar.capture.model_state import Snapshot
from autopar.capture.passes.functionalization import mutates
from autopar.capture.repeats.candidates import nominate
from autopar.capture.repeats.markers import NotFoldable
from autopar.capture.repeats.repeats import Repeats
from autopar.capture.transformers_attention import soft_caps_whole
from autopar.capture.transformers_experts import experts_whole
from autopar.functions.applying import Applied, carrying
from autopar.functions.carry import Carried
from autopar.graph import dump
from autopar.graph.module_walk import ModuleWalk
from autopar.graph.program import Program, expand
from autopar.graph.slabs import Slabs
from autopar.graph.tensors import storage_of
from planner.base.cpython import no_garbage
from planner.base.errors import CaptureError, InputError

LossFn = Callable[..., torch.Tensor]
ONLY = "output"
"""The name of the only output of a model."""


@runtime_checkable
class WritesProgram(Protocol):
    """A model that captures another one to write its own forward, once for inputs of one form."""

    def write_program(self, *args: Any, **kwargs: Any) -> None:
        """Write the program of these inputs."""


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        program: its operators; what is repeated is held once.
        static_outputs: the static values, aligned with ``outputs``.
        in_spec, out_spec: how nested inputs (args, kwargs) and outputs are flattened.
        input_names: aligned with the flattened inputs: a placeholder's name, or ``None`` for a static value.
        training: whether any module was in training mode.
        static_inputs: the static values, aligned with ``input_names``.
        functions: the Functions whose operators the program calls; they are there as long as this is, or what is made
            of it.
        held: the tensors among the constants that modules hold, see :mod:`autopar.capture.held_tensors`, by path.
        slabs: parameters that hold several of the model's, see :mod:`autopar.graph.slabs`.
    """

    program: Program
    static_outputs: tuple[Any, ...]
    input_names: tuple[str | None, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    training: bool
    static_inputs: tuple[Any, ...] = ()
    functions: tuple[Carried, ...] = ()
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)
    slabs: tuple[Slabs, ...] = ()

    @cached_property
    def graph(self) -> torch.fx.Graph:
        """The program written out: a flat functional ATen graph, whose placeholders are the leaves."""
        return expand(self.program)

    @cached_property
    def leaves(self) -> Mapping[str, tuple[str, str]]:
        """Name of a leaf -> (kind, original name), kind one of ``input``, ``param``, ``buffer``, ``const``."""
        return {leaf.name: (leaf.kind, leaf.target) for leaf in self.program.leaves}

    @cached_property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """Tensors that the model's code holds, by name of leaf."""
        return self.program.constants

    @property
    def outputs(self) -> tuple[str | None, ...]:
        """Names of the nodes that leave the model, ``None`` where the output is a static value."""
        return self.program.outputs

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """What the model calls each of its outputs, see :func:`output_name`; aligned with ``outputs``."""
        places = pytree.tree_unflatten(list(range(len(self.outputs))), self.out_spec)
        names = {place: output_name(path) for path, place in pytree.tree_flatten_with_path(places)[0]}
        return tuple(names[place] for place in range(len(self.outputs)))

    @property
    def updates(self) -> tuple[tuple[str, str], ...]:
        """(Buffer name, name of the node that holds its new value)."""
        return self.program.updates


class _WithLoss(nn.Module):
    """A model and the loss on its outputs, as one module whose output is the loss.

    It stands in the model's place: parameters, buffers and submodules are the model's own, under the same names.
    """

    def __init__(self, module: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.training = module.training
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self._model = (module,)  # in a tuple: it is no submodule
        self._loss_fn = loss_fn
        self._accepted = accepted_names(module)

    def forward(self, **batch: Any) -> torch.Tensor:
        (model,) = self._model
        outputs = model(**{name: value for name, value in batch.items() if name in self._accepted})
        loss = self._loss_fn(outputs, batch)
        is_tensor = isinstance(loss, torch.Tensor)
        if not is_tensor or loss.shape or not loss.is_floating_point():
            what = f"a tensor of shape {tuple(loss.shape)}, {loss.dtype}" if is_tensor else f"a {type(loss).__name__}"
            raise InputError(
                f"loss_fn returned {what}; it must return the loss of the global batch, one floating number: a tensor "
                "of shape (), for example .mean()"
            )
        return loss


def output_name(path: tuple[Any, ...]) -> str:
    """``loss``, ``hidden_states.0``: where an output stands among all; :data:`ONLY` where it is the only one."""
    keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return ".".join(keys) or ONLY


def accepted_names(module: nn.Module) -> frozenset[str]:
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
    *,
    fold: bool = False,
) -> Captured:
    """Capture ``model`` on example inputs (the global batch).

    Args:
        model: on any device, the meta device included; in the mode (train or eval) it is to run in.
        example_args, example_kwargs: inputs of global shape; left out, the model's ``dummy_inputs`` are used.
        loss_fn: ``loss_fn(outputs, batch)`` where batch is ``example_kwargs``; names that ``model.forward``
            does not accept go to the loss alone.
        fold: trace submodules that repeat once (:mod:`autopar.capture.repeats.repeats`); the graph is the same.

    Raises:
        InputError: no example inputs and no ``dummy_inputs``, inputs on which the model fails, or a loss that is none.
        CaptureError: the model cannot be exported; the message names the line and the way out.
    """
    dump.folder()  # one that cannot be written to is told of before the work
    args, kwargs = _example_inputs(model, example_args, example_kwargs)
    _check_inputs(args, kwargs)
    whole = model
    if loss_fn is not None:
        if not callable(loss_fn):
            raise InputError(f"loss_fn is {loss_fn!r}; give a function loss_fn(outputs, batch) that returns the loss")
        if args:
            raise InputError("loss_fn needs the example inputs by name: pass example_kwargs instead of example_args")
        whole = _WithLoss(model, loss_fn)
    walk, device = ModuleWalk(whole), _device_of(model)
    # Export takes one tensor passed twice (labels=input_ids) for one input; copies keep them apart.
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(device, copy=True), (args, kwargs))
    if isinstance(model, WritesProgram):
        model.write_program(*args, **kwargs)  # here, since no export may run inside another
    if fold and not _keeps_statistics(walk):
        # Where folding fails, capturing the whole either succeeds or says why in terms of the model alone.
        with contextlib.suppress(NotFoldable, CaptureError):
            return _capture_folded(model, walk, args, kwargs)
    with _quick_tracing():
        captured = _capture_whole(model, walk, args, kwargs)
    node = reads_values(captured.program)
    if node is not None:
        with _restored(walk):
            raise on_values(model, node, lambda: _export(model, walk, whole, args, kwargs, {}))
    return captured


def _capture_folded(model: nn.Module, walk: ModuleWalk, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Capture with the calls of equal submodules traced once.

    Raises:
        CaptureError: the model cannot be captured at all.
        NotFoldable: it cannot be captured so, or would not be the same.
    """
    applied: Applied = {}
    with _quick_tracing(), _restored(walk) as before:
        held = buffers(walk)
        try:
            repeats = Repeats(walk, nominate(walk))
            exported = _export(model, walk, repeats.opaque(), args, kwargs, applied)
        except Exception as error:
            raise NotFoldable("the export failed") from error
        if assigned(held):
            raise NotFoldable("the model assigns to buffers")
    if before.had_new_tensors:
        raise NotFoldable("the model keeps tensors that it made")
    if mutates(exported):
        raise NotFoldable("the model writes in place")
    if _shares_memory(exported.constants.values(), [*repeats.tensors_held, *repeats.copies]):
        raise NotFoldable("a parameter or a copied result is used in another form")
    captured = _captured(exported, model, repeats, applied)
    if reads_values(captured.program) is not None:
        raise NotFoldable("the model reads the values of tensors")
    return captured


def _shares_memory(constants: Iterable[Any], tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a constant lies in the memory of a tensor."""
    found = [value for value in constants if isinstance(value, torch.Tensor) and value.layout == torch.strided]
    memory = {storage_of(value) for value in found}
    return bool(found) and any(t.layout == torch.strided and storage_of(t) in memory for t in tensors)


def _capture_whole(model: nn.Module, walk: ModuleWalk, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    whole = walk.model
    applied: Applied = {}
    try:
        with _restored(walk), written_in_place(whole):
            exported = _export(model, walk, whole, args, kwargs, applied)
    except CaptureError:
        raise
    except Exception as error:
        with _caches_off(model), _masks_not_read(), _restored(walk):
            raise failure(model, whole, args, kwargs, error) from error
    return _captured(exported, model, Repeats(walk, []), applied)


def _keeps_statistics(walk: ModuleWalk) -> bool:
    """Whether the forward writes running statistics, which only a whole graph follows."""
    norms = tuple(kind for kind in {type(m) for _, m in walk.modules} if issubclass(kind, _NormBase))
    return any(m.training and m.track_running_stats for _, m in walk.modules if isinstance(m, norms))


def _example_inputs(
    model: nn.Module, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args is None and kwargs is None:
        dummy = getattr(model, "dummy_inputs", None)
        if dummy is None:
            raise InputError(
                f"{type(model).__name__} brings no dummy_inputs, so its inputs are unknown: pass "
                "example_kwargs={...} (or example_args=(...)), or --input on the command line, holding one global "
                "batch; only shapes and dtypes matter"
            )
        return (), dict(dummy)
    return tuple(args or ()), dict(kwargs or {})


def _check_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for path, value in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
        if not isinstance(value, (torch.Tensor, int, float, str, NoneType, torch.ScriptObject)):
            raise InputError(
                f"input {pytree.keystr(path[1:])} is of type {type(value).__name__}; give tensors (torch.as_tensor), "
                "numbers, text, or tuples, lists and dicts of them"
            )
        if isinstance(value, torch.Tensor) and (value.is_nested or value.layout != torch.strided):
            raise InputError(
                f"input {pytree.keystr(path[1:])} is a {'nested' if value.is_nested else 'sparse'} tensor, and a plan "
                "shards dense ones: give x.to_dense(), or what torch.nested.to_padded_tensor makes of it"
            )


def _device_of(model: nn.Module) -> torch.device:
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _export(
    model: nn.Module,
    walk: ModuleWalk,
    called: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    applied: Applied,
) -> ExportedProgram:
    """Export ``called``, which is the walk's model or calls it; ``model`` is the user's."""
    with (
        warnings.catch_warnings(),
        _caches_off(model, walk),
        _masks_not_read(),
        _batch_norms_not_synced(),
        experts_whole(),
        soft_caps_whole(),
        without_torchs_notes(),
    ):
        warnings.simplefilter("ignore")
        with carrying(model, walk, applied):
            return torch.export.export(called, args, kwargs, strict=False)


@contextlib.contextmanager
def _restored(walk: ModuleWalk) -> Iterator[Snapshot]:
    """Leave the model as it was."""
    before = Snapshot(walk)
    try:
        yield before
    finally:
        before.restore()


@contextlib.contextmanager
def _caches_off(model: nn.Module, walk: ModuleWalk | None = None) -> Iterator[None]:
    """Transformers configurations ask for key-value caches by default; training graphs have none."""
    modules = (walk or ModuleWalk(model)).modules
    each = {id(config): config for config in _configs([model, *(module for _, module in modules)])}
    configs = [config for config in each.values() if getattr(config, "use_cache", False)]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _configs(modules: Sequence[nn.Module]) -> list[Any]:
    """What modules call their configuration, of those that have one."""
    kinds: set[Any] = set(map(type, modules))
    asked = {kind for kind in kinds if hasattr(kind, "config") or kind.__getattr__ is not nn.Module.__getattr__}
    found = [getattr(m, "config", None) if type(m) in asked else vars(m).get("config") for m in modules]
    return [config for config in found if config is not None]


@contextlib.contextmanager
def _masks_not_read() -> Iterator[None]:
    """While inside, nn.TransformerEncoder and -Decoder use a mask as it is where nobody told them whether it is causal.

    They would read its values to find that out, which a graph does not know. The result is the same; what is provably
    causal is found later (:mod:`autopar.capture.passes.causal_masks`).
    """
    before = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = before


@contextlib.contextmanager
def _batch_norms_not_synced() -> Iterator[None]:
    """While inside, nn.SyncBatchNorm is batch norm: the batch that is captured is the global one, and a plan shares its
    statistics among ranks.
    """
    before = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _quick_tracing() -> Iterator[None]:
    """Leave out what only people who debug an export look at: it takes two fifths of the time.

    That is a Python stack for every node, Python code for every intermediate graph, and looking for garbage.
    """
    before = getattr(torch.fx.config, "do_not_emit_stack_traces", False)
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        with _use_lazy_graph_module(True), no_garbage():
            yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def _captured(exported: ExportedProgram, model: nn.Module, repeats: Repeats, applied: Applied) -> Captured:
    """The program, and what the signature says of inputs and outputs."""
    program = flatten(exported, model, repeats)
    given = [spec.arg for spec in exported.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    inputs = iter([leaf.name for leaf in program.leaves if leaf.kind == "input"])
    returned = [spec.arg for spec in exported.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    return Captured(
        program,
        tuple(getattr(arg, "value", None) for arg in returned),
        tuple(next(inputs) if isinstance(arg, TensorArgument) else None for arg in given),
        exported.call_spec.in_spec,
        exported.call_spec.out_spec,
        any(module.training for module in model.modules()),
        tuple(getattr(arg, "value", None) for arg in given),
        tuple(applied.values()),
        held_among(exported.constants.values(), model),
    )
