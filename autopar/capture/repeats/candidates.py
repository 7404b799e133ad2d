"""Finds submodules that may be repeats of one another, by structure and parameters alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from autopar.graph.module_walk import ModuleWalk
from autopar.graph.tensors import first_with, storage_of, tensor_kind


@dataclass(frozen=True)
class Submodule:
    """A nominated submodule.

    Attributes:
        path: its name in the model.
        modules: itself, then those below it.
        tensors: its parameters and buffers, each once.
        ties: for each name of a tensor, which of ``tensors`` it is, and for each of these, whose memory it lies in.
    """

    path: str
    modules: tuple[nn.Module, ...]
    tensors: tuple[Tensor, ...]
    ties: tuple[int, ...]

    @cached_property
    def own(self) -> frozenset[int]:
        """Its parameters and buffers by identity."""
        return frozenset(map(id, self.tensors))


def nominate(walk: ModuleWalk) -> list[list[Submodule]]:
    """Submodules of a model, of equal structure, largest first; none lies within another."""
    keys: dict[int, object] = {}
    numbers: dict[object, int] = {}
    for _, module in reversed(walk.modules):
        keys[id(module)] = numbers.setdefault(_structure(module, keys), len(numbers))
    count = Counter(keys.values())
    groups: dict[tuple[object, tuple[int, ...]], list[Submodule]] = {}
    seen: set[int] = {id(walk.model)}

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
                seen.update(map(id, found.modules))

    visit(walk.model, "")
    return [group for group in groups.values() if len(group) > 1]


def _submodule(path: str, module: nn.Module) -> Submodule | None:
    """What is known of a submodule before it is called; ``None`` if it holds another one twice."""
    modules, seen = [module], {id(module)}
    for above in modules:
        for child in above._modules.values():
            if id(child) in seen:
                return None
            if child is not None:
                seen.add(id(child))
                modules.append(child)
    held = [t for m in modules if m._parameters or m._buffers for t in _own(m).values() if t is not None]
    tensors = tuple({id(t): t for t in held}.values())
    ties = (*first_with(list(map(id, held))), *first_with(list(map(storage_of, tensors))))
    return Submodule(path, tuple(modules), tensors, ties)


def _structure(module: nn.Module, keys: Mapping[int, object]) -> object:
    """What two submodules must have equal to be nominated together: all that is there before they are called."""
    tensors, children = [], []
    if module._parameters or module._buffers:
        tensors = [(name, _kind(t)) for name, t in _own(module).items()]
    if module._modules:
        children = [(name, keys.get(id(m))) for name, m in module._modules.items()]
    return type(module), tuple(tensors), tuple(children), frozenset(module._non_persistent_buffers_set)


def _own(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}


def _kind(tensor: Tensor | None) -> object:
    return None if tensor is None else tensor_kind(tensor)


def _worthwhile(module: nn.Module) -> bool:
    """Whether a submodule is called as one, and is more than an operator or two."""
    if type(module).forward is nn.Module.forward:
        return False
    if isinstance(module, nn.Sequential):
        return not any(map(_worthwhile, module.children()))
    return bool(module._modules) or not type(module).__module__.startswith("torch.nn.")
