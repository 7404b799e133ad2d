"""Repeats: submodules that occur several times are traced once, and their further calls stand for copies.

Submodules of one structure (classes, names, shapes, ties) are *nominated*; whether two calls are the same is then
found out, not guessed. While the first call of a kind is traced, every torch function that it calls is written down:
the function, its static arguments, and which input, own parameter or earlier result each tensor argument is. A later
call runs its own Python code, hooks included, but the functions that it calls only have to be the next ones of what
was written down, and give tokens instead of tensors. So all that Python decides on (configuration, layer numbers,
hooks, counters, caches, masks) is decided by running it, once per call and in the order of the model. Where a call
departs from what was written down, what it has called so far is done again for real, in its place in the graph, and
it is traced to its end; then it is a kind of its own.

Parameters and buffers of nominated submodules are hidden from export, whose time grows with their number; the first
use brings them in. Whatever does not fit this scheme (writes in place, autocast inside a block, tokens that survive
their call) raises :class:`NotFoldable`, and the model is captured as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._mode_utils import no_dispatch

_LIBRARY = torch.library.Library("autopar_capture", "DEF")
_LIBRARY.define("enter(int call, Tensor[] inputs) -> ()")
_LIBRARY.define("leave(int call, int[] values, Tensor[] outputs) -> ()")
_LIBRARY.define("again(int call, int output, Tensor[] inputs) -> Tensor")
_LIBRARY.define("leaf(int tensor) -> Tensor")
_OPS: Any = torch.ops.autopar_capture
ENTER, LEAVE, AGAIN, LEAF = _OPS.enter.default, _OPS.leave.default, _OPS.again.default, _OPS.leaf.default
"""Marks in the exported graph: a traced call begins and ends, a call like an earlier one, a hidden parameter."""

MAX_KINDS = 16
"""Kinds of calls that are told apart within one structure; what comes after is traced call by call."""


class NotFoldable(BaseException):
    """The model does something that only capturing it whole gets right. No ``except Exception`` may swallow it."""


@dataclass(frozen=True)
class Submodule:
    """A nominated submodule.

    Attributes:
        path: its name in the model.
        tensors: its parameters and buffers, each once.
        inner: the modules below it, by name.
        ties: for each name of a tensor, which of ``tensors`` it is.
    """

    path: str
    module: nn.Module
    tensors: tuple[Tensor, ...]
    inner: tuple[tuple[str, nn.Module], ...]
    ties: tuple[int, ...]


@dataclass(frozen=True)
class Occurrence:
    """One call of a nominated submodule.

    Attributes:
        submodule: what was called.
        path: the module path of the nodes that it made, or would have made.
        like: number of the call whose nodes stand for this one's; its own if it was traced.
    """

    submodule: Submodule
    path: str
    like: int


class _Mould:
    """Makes fake tensors like one, at little cost."""

    def __init__(self, tensor: Tensor):
        assert isinstance(tensor, FakeTensor)
        self.mode, self.device = tensor.fake_mode, tensor.device
        with no_dispatch():
            self.meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            self.meta.requires_grad_(tensor.requires_grad)

    def another(self) -> Tensor:
        return FakeTensor(self.mode, self.meta, self.device)


@dataclass
class _Record:
    """What a traced call did.

    Attributes:
        number: of the call.
        key: what the next call of this kind must have equal from the start.
        calls: functions called, with their arguments.
        results: what each gave.
        stacks: the modules in which each was called, from the submodule on.
        outputs: value number -> what makes tensors like it, for results that leave.
    """

    number: int
    key: object
    calls: list[tuple[object, ...]] = field(default_factory=list)
    results: list[object] = field(default_factory=list)
    stacks: list[tuple[tuple[str, Any], ...]] = field(default_factory=list)
    outputs: dict[int, _Mould] = field(default_factory=dict)


# --- nominating ----------------------------------------------------------------------------------------


def nominate(model: nn.Module) -> list[list[Submodule]]:
    """Submodules below ``model`` of equal structure, largest first; none lies within another."""
    keys: dict[int, object] = {}
    numbers: dict[object, int] = {}
    for module in reversed(list(model.modules())):
        keys[id(module)] = numbers.setdefault(_structure(module, keys), len(numbers))
    count = Counter(keys[id(module)] for module in model.modules())
    groups: dict[tuple[object, tuple[int, ...]], list[Submodule]] = {}
    seen: set[int] = {id(model)}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            below = f"{path}.{name}" if path else name
            found = _submodule(below, child) if count[keys[id(child)]] > 1 and _worthwhile(child) else None
            if found is None:
                visit(child, below)
            else:
                groups.setdefault((keys[id(child)], found.ties), []).append(found)
                seen.update(id(m) for _, m in found.inner)

    visit(model, "")
    return [group for group in groups.values() if len(group) > 1]


def _submodule(path: str, module: nn.Module) -> Submodule | None:
    """What is known of a submodule before it is called; ``None`` if it holds another one twice."""
    inner = [(name, m) for name, m in module.named_modules(remove_duplicate=False) if m is not module]
    if len({id(m) for _, m in inner}) < len(inner):
        return None
    held = [t for m in (module, *(m for _, m in inner)) for t in _own(m).values() if t is not None]
    tensors = {id(t): t for t in held}
    number = {key: at for at, key in enumerate(tensors)}
    return Submodule(path, module, tuple(tensors.values()), tuple(inner), tuple(number[id(t)] for t in held))


def _structure(module: nn.Module, keys: Mapping[int, object]) -> object:
    """What two submodules must have equal to be nominated together: all that is there before they are called."""
    tensors = tuple((name, _kind(t)) for name, t in _own(module).items())
    children = tuple((name, None if m is None else keys.get(id(m))) for name, m in module._modules.items())
    return type(module), tensors, children, frozenset(module._non_persistent_buffers_set)


def _own(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}


def _kind(tensor: Tensor | None) -> object:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _worthwhile(module: nn.Module) -> bool:
    """Whether a submodule is called as one, and is more than an operator or two."""
    if type(module).forward is nn.Module.forward:
        return False
    if isinstance(module, nn.Sequential):
        return not any(map(_worthwhile, module.children()))
    return bool(module._modules) or not type(module).__module__.startswith("torch.nn.")


# --- hiding --------------------------------------------------------------------------------------------


class _Hidden(dict[str, Any]):
    """Stands for a module's parameters, buffers or children: empty, but asking for one of them is noticed."""

    def __init__(self, kept: Mapping[str, Any]):
        super().__init__()
        self.kept = kept

    def __contains__(self, name: object) -> bool:
        if name in self.kept:
            raise NotFoldable(f"{name} is read from outside its block")
        return False


class Repeats:
    """The nominated submodules of a model (none without a model), and what became of their calls in its export.

    Attributes:
        occurrences: every call, by number.
        tensors: hidden tensors that were brought in, by number.
    """

    def __init__(self, model: nn.Module | None):
        self._groups = nominate(model) if model is not None else []
        self._records: list[list[_Record]] = [[] for _ in self._groups]
        self._index: dict[int, int] = {}
        self._lifted: dict[int, Tensor] = {}
        self._busy = False
        self._blank = torch.empty(0)
        self.tokens: list[Tensor] = []
        self.occurrences: list[Occurrence] = []
        self.tensors: list[Tensor] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hide what nominated submodules hold, and intercept their calls."""
        with contextlib.ExitStack() as stack:
            for number, group in enumerate(self._groups):
                for submodule in group:
                    stack.enter_context(self._intercepted(number, submodule))
            yield

    @contextlib.contextmanager
    def _intercepted(self, group: int, submodule: Submodule) -> Iterator[None]:
        module = submodule.module
        forward = module.forward
        overridden = module.__dict__.get("forward")
        names = ("_parameters", "_buffers", "_modules")
        kept = {name: module.__dict__[name] for name in names}
        hidden = {name: _Hidden(held) for name, held in kept.items()}

        @functools.wraps(forward)
        def intercept(*args: Any, **kwargs: Any) -> Any:
            if self._busy:
                raise NotFoldable(f"{submodule.path} is called inside another block")
            module.__dict__.update(kept)
            self._busy = True
            try:
                return self._call(self._records[group], submodule, forward, args, kwargs)
            finally:
                self._busy = False
                module.__dict__.update(hidden)

        module.__dict__.update(hidden, forward=intercept)
        try:
            yield
        finally:
            module.__dict__.update(kept)
            if overridden is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = overridden

    def _call(
        self,
        records: list[_Record],
        submodule: Submodule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        mode = get_proxy_mode()
        assert mode is not None, "blocks are intercepted only while the model is exported"
        with torch._C.DisableTorchFunction():
            call = _Call(self, mode.tracer, submodule, records, args, kwargs)
        with call:
            result = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            result, tokens = call.finish(result)
        del call
        if any(sys.getrefcount(self.tokens[at]) > 2 for at in tokens):
            raise NotFoldable(f"{submodule.path} keeps a tensor after its call")
        return result

    def token(self, number: int) -> Tensor:
        """Stands for value ``number`` of a call that is not traced."""
        while number >= len(self.tokens):
            self.tokens.append(torch.Tensor._make_subclass(Tensor, self._blank))
        return self.tokens[number]

    def lift(self, tensor: Tensor, tracer: Any) -> Tensor:
        """A hidden tensor as export has parameters: fake, and known to the tracer."""
        if id(tensor) not in self._lifted:
            context = TracingContext.try_get()
            assert context is not None and context.fake_mode is not None
            with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
                fake = context.fake_mode.from_tensor(tensor, static_shapes=True)
            node = mark(tracer, LEAF, (len(self.tensors),), fake)
            track(tracer, fake, node)
            self.tensors.append(tensor)
            self._lifted[id(tensor)] = fake
        return self._lifted[id(tensor)]


def mark(tracer: Any, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    """A node of our own in the graph that is being traced, in the module that is being called."""
    node: fx.Node = tracer.graph.create_node("call_function", target, args, {})
    stack = tracer.module_stack.items()
    kinds = {key: (path, f"{kind.__module__}.{kind.__qualname__}") for key, (path, kind) in stack}
    node.meta.update(val=value, nn_module_stack=kinds)
    return node


def track(tracer: Any, tensor: Tensor, node: fx.Node) -> None:
    """Tell the tracer that a node computes a tensor."""
    set_proxy_slot(tensor, tracer, _ProxyTensor(tracer.proxy(node), None))


def node_of(tracer: Any, tensor: Tensor) -> fx.Node | None:
    """The node that computes a tensor, if the tracer knows it."""
    found = get_proxy_slot(tensor, tracer, None)
    return None if found is None else found.proxy.node


# --- a call --------------------------------------------------------------------------------------------


class _Same:
    """An object, equal only to itself."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@functools.cache
def _value(number: int) -> object:
    """Stands for value ``number`` of a call among arguments."""
    return Tensor, number


_ATOMS = frozenset(
    {int, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Kinds of values that equal none of another kind."""

_PLAIN = _ATOMS | {bool, float, complex, torch.Size}
"""Kinds of values that hold no tensors and do not change."""


class _Call(TorchFunctionMode):
    """One call of a nominated submodule: follows what an earlier call did for as long as it does the same."""

    def __init__(
        self,
        repeats: Repeats,
        tracer: Any,
        submodule: Submodule,
        records: list[_Record],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        super().__init__()
        self.repeats, self.tracer, self.submodule, self.records = repeats, tracer, submodule, records
        leaves, spec = pytree.tree_flatten((args, kwargs))
        known = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and node_of(tracer, leaf) is not None}
        self.inputs: tuple[Tensor, ...] = tuple(known.values())
        self.values: list[Tensor] = [*self.inputs, *submodule.tensors]
        self.base = len(self.values)
        self.number_of = {id(value): at for at, value in enumerate(self.values)}
        self.real: dict[int, Tensor] = {}
        self.tokens: dict[int, int] = {}
        self.grad = torch.is_grad_enabled()
        self.stack = dict(tracer.module_stack)
        self.path = next(reversed(self.stack.values()))[0].removeprefix("_export_root").removeprefix(".")
        self.called_as_a_module = self.path == submodule.path
        own = next(reversed(self.stack.values()))[0]
        tracer.submodule_paths.update((module, f"{own}.{name}") for name, module in submodule.inner)
        self.nodes_before = len(tracer.graph.nodes)
        places = tuple(self.number_of.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves)
        key = (_Spec(spec), places, tuple(map(_tensor_key, self.inputs)), _ambient())
        self.number = len(repeats.occurrences)
        self.record = _Record(self.number, key)
        self.candidates = [r for r in records if r.key == key] if self.called_as_a_module else []
        self.following: _Record | None = None
        self.log: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.faithful = self.called_as_a_module
        if self.candidates:
            self.following = self.candidates[0]
        else:
            self._enter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.following is not None:
            if self._is_next((func, self._encode(args), self._encode(kwargs))):
                self.log.append((func, args, kwargs))
                if func is torch._C._set_grad_enabled:
                    with torch._C.DisableTorchFunction():
                        func(*args)
                return self._decode(self.following.results[len(self.log) - 1])
            self._trace_from_here()
        return self._trace(func, args, kwargs)

    # ---- following ---------------------------------------------------------------------------------------------

    def _is_next(self, call: tuple[object, ...] | None) -> bool:
        """Whether some earlier call that did all that this one did so far does ``call`` next (``None``: ends)."""
        assert self.following is not None
        at = len(self.log)

        def next_of(record: _Record) -> tuple[object, ...] | None:
            return record.calls[at] if at < len(record.calls) else None

        if next_of(self.following) == call:
            return True
        for other in self.candidates:
            if next_of(other) == call and len(other.calls) >= at:
                same = other.calls[:at] == self.following.calls[:at]
                if same and other.results[:at] == self.following.results[:at]:
                    self.following = other
                    return True
        return False

    def _encode(self, value: Any) -> object:
        """An argument as something to compare: values with their types, tensors by what they are to this call."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, Tensor):
            number = self.number_of.get(id(value))
            return _Same(value) if number is None else _value(number)
        if kind is tuple or kind is list or kind is torch.Size:
            return kind, *map(self._encode, value)
        if kind is dict:
            return kind, *value, *map(self._encode, value.values())
        if kind is bool or kind is complex or kind is float:
            return kind, repr(value)
        if kind is slice:
            return kind, self._encode(value.start), self._encode(value.stop), self._encode(value.step)
        return _Same(value)

    def _decode(self, result: Any) -> Any:
        """What a function gave, with tokens for tensors."""
        kind, value = result
        if kind == "value":
            while value >= len(self.values):
                token = self.repeats.token(len(self.values))
                self.number_of[id(token)] = len(self.values)
                self.values.append(token)
            return self.values[value]
        if kind == "static":
            return value
        return kind(map(self._decode, value))

    # ---- tracing -----------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if len(self.tracer.graph.nodes) != self.nodes_before:
            raise NotFoldable(f"{self.path} makes nodes of its own")
        mark(self.tracer, ENTER, (self.number, [node_of(self.tracer, value) for value in self.inputs]), None)

    def _trace_from_here(self) -> None:
        """Do again, for real, what was only compared so far."""
        followed, self.following = self.following, None
        assert followed is not None
        tokens = self.values[self.base :]
        self.tokens = {id(token): at for at, token in enumerate(tokens, self.base)}
        del self.values[self.base :]
        grad, stack = torch.is_grad_enabled(), dict(self.tracer.module_stack)
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(self.grad)
            self._enter()
        for (func, args, kwargs), inner in zip(self.log, followed.stacks, strict=False):
            self._set_stack({**self.stack, **dict(self._placed(inner))})
            self._trace(func, args, kwargs)
        assert torch.is_grad_enabled() == grad
        assert len(self.values) == self.base + len(tokens)
        self._set_stack(stack)

    def _set_stack(self, stack: Mapping[str, Any]) -> None:
        self.tracer.module_stack.clear()
        self.tracer.module_stack.update(stack)

    def _placed(self, inner: tuple[tuple[str, Any], ...]) -> Iterator[tuple[str, Any]]:
        """Modules inside a call like this one, as modules inside this one."""
        own = next(reversed(self.stack.values()))[0]
        for below, kind in inner:
            yield own + below, (own + below, kind)

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function on real operands, and write it down."""
        call = (func, self._encode(args), self._encode(kwargs))
        try:
            result = func(*self._for_real(args), **self._for_real(kwargs))
        except Exception:
            self.faithful = False
            raise
        if func is torch._C._set_grad_enabled:
            result = None
        outer = len(self.stack)
        own = next(reversed(self.stack.values()))[0]
        self.record.calls.append(call)
        self.record.results.append(self._describe(result))
        inner = list(self.tracer.module_stack.values())[outer:]
        self.record.stacks.append(tuple((path.removeprefix(own), kind) for path, kind in inner))
        return result

    def _for_real(self, value: Any) -> Any:
        """Arguments with the tensors that tokens and hidden parameters stand for."""
        if isinstance(value, Tensor):
            if id(value) in self.real:
                return self.real[id(value)]
            if id(value) in self.tokens:
                return self.values[self.tokens[id(value)]]
            number = self.number_of.get(id(value), 0)
            if len(self.inputs) <= number < self.base and value is self.submodule.tensors[number - len(self.inputs)]:
                lifted = self.repeats.lift(value, self.tracer)
                self.number_of[id(lifted)] = number
                self.real[id(value)] = lifted
                return lifted
            return value
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(map(self._for_real, value))
        if kind is dict:
            return {name: self._for_real(v) for name, v in value.items()}
        if kind is slice:
            return slice(self._for_real(value.start), self._for_real(value.stop), self._for_real(value.step))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return kind(*map(self._for_real, value))
        return value

    def _describe(self, result: Any) -> object:
        """What :meth:`_decode` reads."""
        if isinstance(result, Tensor):
            if id(result) not in self.number_of:
                self.number_of[id(result)] = len(self.values)
                self.values.append(result)
            return "value", self.number_of[id(result)]
        kind = type(result)
        if kind in (tuple, list) or kind.__module__ == "torch.return_types":
            return kind, tuple(map(self._describe, result))
        if kind not in _PLAIN:
            self.faithful = False
        return "static", result

    # ---- leaving -----------------------------------------------------------------------------------------------

    def finish(self, result: Any) -> tuple[Any, range]:
        """What the submodule returns, for the model; and which tokens may no longer be held by anyone."""
        flat, spec = pytree.tree_flatten(result)
        del result
        if self.following is not None:
            leaving = [n for n in map(self._number, flat) if n is not None and n >= self.base]
            if not self._is_next(None) or not self.following.outputs.keys() >= set(leaving):
                with _torch_functions():
                    self._trace_from_here()
        if self.following is None:
            self._finish_traced(flat)
            like = self.number
        else:
            self._finish_followed(flat)
            like = self.following.number
        self.repeats.occurrences.append(Occurrence(self.submodule, self.path, like))
        result = pytree.tree_unflatten([self._for_real(leaf) for leaf in flat], spec)
        used = range(self.base, min(len(self.values), len(self.repeats.tokens)))
        for held in (self.log, self.values, flat, self.real, self.number_of):
            held.clear()
        return result, used

    def _number(self, leaf: Any) -> int | None:
        return self.number_of.get(id(leaf)) if isinstance(leaf, Tensor) else None

    def _finish_followed(self, flat: list[Any]) -> None:
        assert self.following is not None
        if len(self.tracer.graph.nodes) != self.nodes_before:
            raise NotFoldable(f"{self.path} makes nodes of its own")
        inputs = [node_of(self.tracer, value) for value in self.inputs]
        for leaf in flat:
            number = self._number(leaf)
            if number is not None and number >= self.base and id(leaf) not in self.real:
                made = self.following.outputs[number].another()
                track(self.tracer, made, mark(self.tracer, AGAIN, (self.number, number, inputs), made))
                self.real[id(leaf)] = made

    def _finish_traced(self, flat: list[Any]) -> None:
        nodes = self._nodes_made()
        made = set(nodes)
        for value in self.values[self.base :]:
            self.faithful &= node_of(self.tracer, value) in made
        outputs: dict[int, fx.Node] = {}
        for leaf in map(self._for_real, flat):
            if isinstance(leaf, Tensor):
                number, node = self.number_of.get(id(leaf)), node_of(self.tracer, leaf)
                if number is not None and number >= self.base and node is not None:
                    outputs[number] = node
                    self.record.outputs[number] = _Mould(leaf)
                elif number is None and node in made:
                    self.faithful = False
            elif type(leaf) not in _PLAIN:
                self.faithful = False
        mark(self.tracer, LEAVE, (self.number, list(outputs), list(outputs.values())), None)
        if self.faithful and outputs and all(map(_is_plain, nodes)) and len(self.records) < MAX_KINDS:
            self.records.append(self.record)

    def _nodes_made(self) -> list[fx.Node]:
        """Nodes since the call began."""
        found: list[fx.Node] = []
        for node in reversed(self.tracer.graph.nodes):
            if node.target is ENTER and node.args[0] == self.number:
                return found
            if writes_in_place(node):
                raise NotFoldable(f"{self.path} writes in place ({node.target})")
            found.append(node)
        raise AssertionError(f"{self.path} was never entered")


def _is_plain(node: fx.Node) -> bool:
    """Whether a node means the same wherever it stands."""
    if node.op == "get_attr":
        return True
    return isinstance(node.target, torch._ops.OpOverload) or node.target in (
        operator.getitem,
        torch._C._set_grad_enabled,
    )


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node writes to a tensor (running statistics, ``x += y``, ``x[i] = y``).

    Literals (``torch.tensor(0.5)``) are copied and detached in place, which nobody can tell.
    """
    target = node.target
    if target is torch.ops.aten.detach_.default:
        return getattr(node.args[0], "target", None) is not torch.ops.aten.lift_fresh_copy.default
    return isinstance(target, torch._ops.OpOverload) and (
        target._schema.is_mutable or target is torch.ops.aten.batch_norm.default
    )


@contextlib.contextmanager
def _torch_functions() -> Iterator[None]:
    """Inside ``DisableTorchFunction``: the modes of tracing again."""
    with torch._C._EnableTorchFunction():
        yield


class _Spec:
    """A pytree spec, to compare; strings and numbers inside it count."""

    def __init__(self, spec: pytree.TreeSpec):
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and bool(self.spec == other.spec)

    def __hash__(self) -> int:
        return 0


def _tensor_key(tensor: Tensor) -> object:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _ambient() -> object:
    """State around a call that changes which operators are recorded, or what they compute."""
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.get_default_dtype(),
        tuple(map(_Same, _get_current_function_mode_stack())),
    )
