"""Compares one call of a repeated submodule with earlier calls, and replays the trace of an equal one.

While a call is traced, every torch function that its code calls is written down. A later call runs its own code, but
the functions that it calls only have to be the next ones of what was written down, and give tokens instead of tensors.
Where it departs, what it has called so far is done for real, in its place in the graph, and it is traced to its end.
"""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._mode_utils import no_dispatch

from autopar.capture.repeats.candidates import Submodule
from autopar.capture.repeats.markers import (
    AGAIN,
    ENTER,
    LEAF,
    LEAVE,
    VALUE,
    Copied,
    NotFoldable,
    mark,
    node_of,
    track,
    writes_in_place,
)
from autopar.capture.repeats.proxies import Proxies, translated
from autopar.graph.identity import Same
from autopar.graph.tensor_metadata import ATOMS, FACTS, HISTORY, PLAIN
from autopar.graph.tensors import first_with, storage_of, tensor_kind

MAX_KINDS = 16
"""Kinds of calls that are told apart within one structure; what comes after is traced call by call."""

_SET_GRAD = torch._C._set_grad_enabled


@dataclass
class Record:
    """What a traced call did.

    Attributes:
        number: of the call.
        key: what the next call of this kind must have equal from the start.
        memory: what each input lies in.
        sources: what computes each.
        calls: functions called, with their arguments, the module in which, and whether with gradients.
        results: what each gave.
        stacks: the modules in which each was called, from the submodule on.
        outputs: value number -> what makes tensors like it, for results that leave.
        rebound: value number of inputs and parameters that a node of the call now computes, as ``x.to(x.dtype)`` does.
    """

    number: int
    key: tuple[object, ...]
    memory: list[int]
    sources: list[fx.Node | Copied | None]
    calls: list[tuple[object, ...]] = field(default_factory=list)
    results: list[object] = field(default_factory=list)
    stacks: list[tuple[tuple[str, Any], ...]] = field(default_factory=list)
    outputs: dict[int, OutputTemplate] = field(default_factory=dict)
    rebound: list[int] = field(default_factory=list)

    def next(self, at: int) -> tuple[object, ...] | None:
        """The function called after ``at`` others, ``None`` at the end."""
        return self.calls[at] if at < len(self.calls) else None


class OutputTemplate:
    """Makes fake tensors like one that a call returned, at little cost."""

    def __init__(self, tensor: Tensor):
        assert isinstance(tensor, FakeTensor)
        self.mode, self.device, self.dtype = tensor.fake_mode, tensor.device, tensor.dtype
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.requires_grad = tensor.requires_grad
        self.storage, self.nbytes = storage_of(tensor), tensor.untyped_storage().nbytes()
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        self.is_whole = self.nbytes == tensor.itemsize * (self.offset + last + 1) and not self.offset

    def another(self, memory: dict[int, Any]) -> Tensor:
        """Another tensor, in the memory that stands for the first one's: new, unless ``memory`` has it already."""
        with no_dispatch():
            if self.is_whole and self.storage not in memory:
                meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
                memory[self.storage] = meta.untyped_storage()
            else:
                if self.storage not in memory:
                    memory[self.storage] = torch.UntypedStorage(self.nbytes, device="meta")
                meta = torch.empty(0, dtype=self.dtype, device="meta")
                meta.set_(memory[self.storage], self.offset, self.shape, self.stride)
            meta.requires_grad_(self.requires_grad)
        return FakeTensor(self.mode, meta, self.device)


class RepeatedCall:
    """One call of a nominated submodule: follows what an earlier call did for as long as it does the same.

    Args:
        number: of the call.
        records: of the earlier calls in its group; a call that can be followed is added.

    Attributes:
        path: the name under which it is called; if that is not the submodule's own, it is traced.
        faithful: whether all that it does is written down.
        result: what its code returned.
        copied: places of inputs that calls which are not traced gave -> what these are.
        follows: whether it is not traced, right after another one.
    """

    def __init__(
        self,
        proxies: Proxies,
        number: int,
        submodule: Submodule,
        records: list[Record],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.proxies, self.tracer = proxies, proxies.tracer
        self.number, self.submodule, self.records = number, submodule, records
        self.stack = dict(self.tracer.module_stack)
        self.own_path = next(reversed(self.stack.values()))[0]
        self.path = self.own_path.removeprefix("_export_root").removeprefix(".")
        self.grad, self.ambient = torch.is_grad_enabled(), _ambient()
        leaves: list[Any] = []
        nesting = _flattened((args, kwargs), leaves)
        given = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in submodule.own}
        traced = [(leaf, *proxies.traced(leaf)) for leaf in given.values()]
        traced = [(leaf, real, source) for leaf, real, source in traced if source is not None or real is not leaf]
        self.inputs = tuple([leaf for leaf, _, _ in traced])
        real = [real for _, real, _ in traced]
        self.values: list[Tensor] = [*self.inputs, *submodule.tensors]
        self.base = len(self.values)
        self.number_of = {id(value): at for at, value in enumerate(self.values)}
        self.sources = [source for _, _, source in traced]
        self.nodes_before = len(self.tracer.graph.nodes)
        self.foreign: dict[int, tuple[Tensor, fx.Node | Copied | None]] = {}
        memory = [storage_of(value) for value in real]
        key = (
            nesting,
            tuple(self.number_of.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in leaves),
            tuple(map(tensor_kind, real)),
            first_with(memory),
            self.grad,
            self.ambient,
            tuple(map(Same, _get_current_function_mode_stack())),
        )
        self.record = Record(number, key, memory, self.sources)
        fresh = not any(map(proxies.is_rebound, submodule.tensors)) and proxies.memory.isdisjoint(memory)
        self.faithful = fresh and self.path == submodule.path
        self.candidates = [r for r in records if r.key == key] if self.faithful else []
        self.following: Record | None = self.candidates[0] if self.candidates else None
        self.done = 0
        self.result: Any = None
        self.copied: dict[int, Copied] = {}
        self.follows = False
        self._at = self.own_path, ""
        if self.following is None:
            self._enter()

    @property
    def like(self) -> int:
        """Number of the call whose nodes stand for this one's; its own if it was traced."""
        return self.number if self.following is None else self.following.number

    def has_path(self, module: nn.Module) -> bool:
        """Whether the tracer knows where a module is."""
        return module in self.tracer.submodule_paths

    def module_called(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an inner module as the tracer does, but for what it notes of it for the nodes that it makes."""
        path, calls, stack = self.tracer.submodule_paths[module], self.tracer.num_calls, self.tracer.module_stack
        times = calls.get(path, 0)
        calls[path] = times + 1
        stack[f"{path}@{times}" if times else path] = path, type(module)
        result = forward(*args, **kwargs)
        stack.popitem()
        return result

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a torch function gives that the submodule's code calls."""
        if self.following is not None:
            if _ambient() != self.ambient:
                raise NotFoldable(f"{self.path} changes the state around it")
            if self._is_next(self._call(func, args, kwargs)):
                if func is _SET_GRAD:
                    with torch._C.DisableTorchFunction():
                        func(*args)
                self.done += 1
                return self._token_of(self.following.results[self.done - 1])
            self._trace_from_here()
        return self._trace(func, args, kwargs)

    # ---- following ---------------------------------------------------------------------------------------------

    def _is_next(self, call: tuple[object, ...] | None) -> bool:
        """Whether some earlier call that did all that this one did so far does ``call`` next (``None``: ends)."""
        assert self.following is not None
        at = self.done
        if self.following.next(at) == call:
            return True
        for other in self.candidates:
            if other.next(at) == call and len(other.calls) >= at:
                same = other.calls[:at] == self.following.calls[:at]
                if same and other.results[:at] == self.following.results[:at]:
                    self.following = other
                    return True
        return False

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
        """A call as something to compare: the function, its arguments, the module in which, whether with gradients."""
        return func, self._encode(args), self._encode(kwargs), self._place(), torch.is_grad_enabled()

    def _place(self) -> str:
        """The module that is being called, from the submodule on."""
        path = next(reversed(self.tracer.module_stack.values()))[0]
        if path is not self._at[0]:
            inside = path == self.own_path or path.startswith(self.own_path + ".")
            self._at = path, path[len(self.own_path) :] if inside else path
        return self._at[1]

    def _encode(self, value: Any) -> object:
        """An argument as something to compare: values with their types, tensors by what they are to this call.

        What may change without being another object (arrays, generators, closures) equals nothing.
        """
        number = self.number_of.get(id(value))
        if number is not None:
            return Tensor, number
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, Tensor):
            if id(value) not in self.foreign:
                self.foreign[id(value)] = value, self._source(value)
            return Same(value)
        if kind is tuple or kind is list or kind is torch.Size:
            return kind, *map(self._encode, value)
        if kind is dict:
            return kind, *value, *map(self._encode, value.values())
        if kind is bool or kind is complex or kind is float:
            return _Exactly(value)
        if kind is slice:
            return kind, self._encode(value.start), self._encode(value.stop), self._encode(value.step)
        return Same(value) if isinstance(value, (enum.Enum, type)) else _Unlike()

    def _source(self, tensor: Tensor) -> fx.Node | Copied | None:
        """What computes a tensor from outside: a node where this call is traced."""
        if self.following is None:
            self.proxies.real(tensor)
        return self.proxies.traced(tensor)[1]

    def _decode(self, code: Any) -> Any:
        """The argument that :meth:`_encode` was given, for this call."""
        if not isinstance(code, tuple):
            return code.value if isinstance(code, (Same, _Exactly)) else code
        kind, *parts = code
        if kind is Tensor:
            return self.values[parts[0]]
        if kind is dict:
            half = len(parts) // 2
            return dict(zip(parts[:half], map(self._decode, parts[half:]), strict=True))
        return slice(*map(self._decode, parts)) if kind is slice else kind(map(self._decode, parts))

    def _token_of(self, result: Any) -> Any:
        """What a function gave, with tokens for tensors."""
        kind, value, *device = result
        if kind == "value":
            while value >= len(self.values):
                token = self.proxies.token(*device)
                self.number_of[id(token)] = len(self.values)
                self.values.append(token)
            return self.values[value]
        return value if kind == "static" else kind(map(self._token_of, value))

    # ---- tracing -----------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if len(self.tracer.graph.nodes) != self.nodes_before:
            raise NotFoldable(f"{self.path} makes nodes of its own")
        self.sources[:] = [node_of(self.tracer, self.proxies.real(value)) for value in self.inputs]
        mark(self.tracer, ENTER, (self.number, self.sources), None)

    def _trace_from_here(self) -> None:
        """Do for real what was only compared so far; the tokens that the code has then stand for real tensors."""
        followed, self.following = self.following, None
        assert followed is not None
        grad, stack = torch.is_grad_enabled(), dict(self.tracer.module_stack)
        with torch._C.DisableTorchFunction():
            self._enter()
            self.foreign = {key: (tensor, self._source(tensor)) for key, (tensor, _) in self.foreign.items()}
        for at in range(self.done):
            func, args, kwargs, _, with_grad = followed.calls[at]
            assert callable(func) and isinstance(with_grad, bool)
            with torch._C.DisableTorchFunction():
                _SET_GRAD(with_grad)
            inner = [(self.own_path + below, kind) for below, kind in followed.stacks[at]]
            self._set_stack({**self.stack, **{path: (path, kind) for path, kind in inner}})
            given = (
                translated(self._decode(args), self.proxies.real),
                translated(self._decode(kwargs), self.proxies.real),
            )
            self._pair(followed.results[at], func(*given[0], **given[1]))
        with torch._C.DisableTorchFunction():
            _SET_GRAD(grad)
        self._set_stack(stack)
        self.record.calls = followed.calls[: self.done]
        self.record.results = followed.results[: self.done]
        self.record.stacks = followed.stacks[: self.done]

    def _pair(self, described: Any, result: Any) -> None:
        """Let the tokens of a result stand for its tensors."""
        kind, value, *_ = described
        if kind == "value":
            if value >= self.base:
                self.proxies.pair(self.values[value], result)
        elif kind != "static":
            for part, real in zip(value, result, strict=True):
                self._pair(part, real)

    def _set_stack(self, stack: Mapping[str, Any]) -> None:
        self.tracer.module_stack.clear()
        self.tracer.module_stack.update(stack)

    def _trace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function on real operands, and write it down."""
        call = self._call(func, args, kwargs)
        self.faithful &= func not in HISTORY and _ambient() == self.ambient
        returned = False
        try:
            result = self.proxies.call(func, args, kwargs)
            returned = True
        finally:
            self.faithful &= returned  # errors that the code catches are not written down
        if func is _SET_GRAD:
            result = None
        described = self._describe(result)
        self.faithful &= described[0] != "static" or func in FACTS or func is _SET_GRAD
        self.record.calls.append(call)
        self.record.results.append(described)
        inner = list(self.tracer.module_stack.values())[len(self.stack) :]
        self.record.stacks.append(tuple((path.removeprefix(self.own_path), kind) for path, kind in inner))
        return result

    def _describe(self, result: Any) -> tuple[Any, ...]:
        """What :meth:`_token_of` reads."""
        if isinstance(result, Tensor):
            if id(result) not in self.number_of:
                self.number_of[id(result)] = len(self.values)
                self.values.append(result)
            return "value", self.number_of[id(result)], result.device
        kind = type(result)
        if kind in (tuple, list) or kind.__module__ == "torch.return_types":
            return kind, tuple(map(self._describe, result))
        if kind not in PLAIN:
            self.faithful = False
        return "static", result

    # ---- leaving -----------------------------------------------------------------------------------------------

    def finish(self) -> Any:
        """What the submodule returns, for the model, when ``result`` is what its code returned.

        Runs with torch functions disabled.
        """
        flat, spec = pytree.tree_flatten(self.result)
        self.result = None
        numbers = [self.number_of.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in flat]
        flat = [leaf if number is None else None for leaf, number in zip(flat, numbers, strict=True)]
        leaving = list(dict.fromkeys(number for number in numbers if number is not None and number >= self.base))
        given = dict(enumerate(self.values[: self.base]))
        if self.following is not None and self._ends(leaving):
            made = self._copies(leaving)
        else:
            if self.following is not None:
                with self.proxies.unwatched():
                    self._trace_from_here()
            self._leave(leaving, flat)
            made = self._released()
        values = {**given, **made}
        pairs = zip(flat, numbers, strict=True)
        return pytree.tree_unflatten([leaf if number is None else values[number] for leaf, number in pairs], spec)

    def _ends(self, leaving: list[int]) -> bool:
        """Whether an earlier call ended so, and nobody has tokens but for what is returned, or marked them."""
        assert self.following is not None
        if not leaving or not self._is_next(None) or not self.following.outputs.keys() >= set(leaving):
            return False
        here = range(self.base, len(self.values))
        return not any(self.proxies.is_marked(self.values[at]) or sys.getrefcount(self.values[at]) > 2 for at in here)

    def _copies(self, leaving: list[int]) -> dict[int, Tensor]:
        """What leaves a call that is not traced."""
        assert self.following is not None
        if len(self.tracer.graph.nodes) != self.nodes_before:
            raise NotFoldable(f"{self.path} makes nodes of its own")
        first = self.following
        given = [self.proxies.unread(value).untyped_storage() for value in self.inputs]
        memory = dict(zip(first.memory, given, strict=True))
        made = {number: first.outputs[number].another(memory) for number in leaving}
        rebound = {number: self.proxies.real(self.values[number]) for number in first.rebound}
        self._mark_again(first)
        for number, tensor in made.items():
            self.proxies.copy(tensor, Copied(self.number, number))
        for number, tensor in rebound.items():
            track(self.tracer, tensor, mark(self.tracer, VALUE, (self.number, number), tensor))
        return made

    def _mark_again(self, first: Record) -> None:
        """Mark a call that is not traced, unless the mark of the one just before does for both."""
        pairs = zip(self.sources, first.sources, strict=True)
        others = {place: source for place, (source, theirs) in enumerate(pairs) if source is not theirs}
        self.copied = {place: source for place, source in others.items() if isinstance(source, Copied)}
        nodes = {place: source for place, source in others.items() if place not in self.copied}
        self.follows = not nodes and next(iter(reversed(self.tracer.graph.nodes))) is self.proxies.again
        if not self.follows:
            self.proxies.again = mark(self.tracer, AGAIN, (self.number, [*nodes], [*nodes.values()]), None)

    def _leave(self, leaving: list[int], others: list[Any]) -> None:
        """Mark the end of a call that was traced, and keep it as an example if later ones can be told from it."""
        nodes = self._nodes_made()
        made = set(nodes)
        outputs: dict[int, fx.Node] = {}
        elsewhere = self.proxies.memory | {storage_of(self.proxies.real(t)) for t, _ in self.foreign.values()}
        for number in range(self.base, len(self.values)):
            real = self.proxies.real(self.values[number])
            node = node_of(self.tracer, real)
            self.faithful &= node in made
            if number in leaving and node is not None:
                outputs[number] = node
                self.record.outputs[number] = OutputTemplate(real)
                self.faithful &= self.record.outputs[number].storage not in elsewhere
        for number, node in self._rebound():
            outputs[number] = node
            self.record.rebound.append(number)
        for leaf in others:
            if isinstance(leaf, Tensor):
                self.faithful &= id(leaf) in self.number_of or node_of(self.tracer, leaf) not in made
            else:
                self.faithful &= type(leaf) in PLAIN
        for tensor, source in self.foreign.values():
            self.faithful &= self._source(tensor) is source
        mark(self.tracer, LEAVE, (self.number, list(outputs), list(outputs.values())), None)
        if self.faithful and leaving and all(map(_is_plain, nodes)) and len(self.records) < MAX_KINDS:
            self.records.append(self.record)

    def _rebound(self) -> Iterator[tuple[int, fx.Node]]:
        """Inputs and own tensors for which another node stands by now, and that node."""
        for number, value in enumerate(self.values[: self.base]):
            is_input = number < len(self.inputs)
            if not is_input and not self.proxies.is_rebound(value):
                continue
            node = node_of(self.tracer, self.proxies.real(value))
            if node is not None and not (is_input and node is self.sources[number]):
                yield number, node

    def _released(self) -> dict[int, Tensor]:
        """The values that the call made, without the tokens that nobody else has."""
        made = dict(enumerate(self.values[self.base :], self.base))
        self.values.clear()
        numbers = [number for number, value in made.items() if self.proxies.is_token(value)]
        tokens = [made.pop(number) for number in numbers]
        return {**made, **dict(zip(numbers, self.proxies.release(tokens), strict=True))}

    def _nodes_made(self) -> list[fx.Node]:
        """Nodes since the call began."""
        found: list[fx.Node] = []
        for node in reversed(self.tracer.graph.nodes):
            if node.target is ENTER and node.args[0] == self.number:
                return found
            if writes_in_place(node):
                raise NotFoldable(f"{self.path} writes in place ({node.target})")
            if node.target not in (LEAF, VALUE):
                found.append(node)
        raise AssertionError(f"{self.path} was never entered")


def _is_plain(node: fx.Node) -> bool:
    """Whether a node means the same wherever it stands."""
    if node.op == "get_attr":
        return True
    return isinstance(node.target, torch._ops.OpOverload) or node.target in (operator.getitem, _SET_GRAD)


# --- what is compared ------------------------------------------------------------------------------------


class _Exactly:
    """A number, equal to one of its type that is written the same: not 1 to 1.0 or True, not 0.0 to -0.0."""

    def __init__(self, value: complex):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Exactly) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[type, str]:
        return type(self.value), repr(self.value)


class _Unlike:
    """Equal to nothing."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def _flattened(value: Any, leaves: list[Any]) -> object:
    """How a value is nested, to compare; adds its leaves as torch's pytrees would, in a fraction of the time."""
    kind = type(value)
    if isinstance(value, Tensor) or kind in PLAIN:
        leaves.append(value)
        return None
    if kind is tuple or kind is list:
        return kind, *[_flattened(each, leaves) for each in value]
    if kind is dict:
        return kind, tuple((type(key), key) for key in value), *[_flattened(each, leaves) for each in value.values()]
    found, spec = pytree.tree_flatten(value)
    leaves += found
    return _Spec(spec)


class _Spec:
    """A pytree spec, to compare; strings and numbers inside it count."""

    def __init__(self, spec: pytree.TreeSpec):
        self.spec = spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Spec) and bool(self.spec == other.spec)

    def __hash__(self) -> int:
        return 0


def _ambient() -> object:
    """State around a call that changes which operators are recorded, or what they compute; gradients are apart."""
    on_cpu = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    on_cuda = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return torch.is_inference_mode_enabled(), torch.get_default_dtype(), on_cpu, on_cuda
