"""The array: a module whose parameters are those of all members, and whose forward runs all of them at once."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.arrays.member_optimizer import member_optimizer
from autopar.arrays.member_rows import set_running
from autopar.arrays.members import stack, with_tensors
from autopar.arrays.stacked_program import StackedProgram, stacked_program
from autopar.capture.capture import ONLY, Captured, LossFn, accepted_names, capture
from autopar.runtime.module import ParallelModule
from planner.base.errors import InputError, PlanWarning
from planner.formulation.constraints.labels import RUNNING_MODELS


class ArrayOutput(NamedTuple):
    """What an array returns.

    Attributes:
        loss: the sum of the losses of members that are trained, to call ``backward()`` on: each member's gradient is
            that of its own loss. ``None`` where members return no loss.
        members: what a member returns, every tensor with a leading dim of members.
    """

    loss: Tensor | None
    members: Any


class ModelArray(nn.Module):
    """Models of one structure, trained as one module; see :func:`autopar.array`.

    Its parameters and buffers have the names that they have in a member, and a leading dim of members; but buffers
    that are the same in all members are held once.

    Args:
        members: the models; values are copied.
        vary: hyper-parameters of the optimizer, a value for each member.
        loss_fn: of one member.
        own_inputs: names of inputs that have a leading dim of members.
    """

    def __init__(
        self,
        members: Sequence[nn.Module],
        vary: Mapping[str, Sequence[Any]],
        loss_fn: LossFn | None,
        own_inputs: frozenset[str],
    ):
        super().__init__()
        self.size = len(members)
        self.vary = {name: tuple(values) for name, values in vary.items()}
        self.own_inputs = own_inputs
        self._loss_fn = loss_fn
        self._held_once = stack(members, self)
        device = next((tensor.device for tensor in (*self.parameters(), *self.buffers())), None)
        running = torch.ones(self.size, dtype=torch.bool, device=device)
        self.register_buffer(RUNNING_MODELS, running)
        self._member = (
            with_tensors(members[0], lambda name, like: like.detach().to("meta")),
        )  # in a tuple: it is no part of this module
        paths = [path for path, _ in members[0].named_modules(remove_duplicate=False)]
        self._holders = ({path: self.get_submodule(path) for path in paths},)
        self._programs = _Programs()
        self._trained: list[ParallelModule] = []

    def forward(self, *args: Any, **kwargs: Any) -> ArrayOutput:
        """Run all members: on the same inputs, or, of ``own_inputs``, each on its own.

        Raises:
            CaptureError: a member cannot be captured.
            InputError: one of ``own_inputs`` has no leading dim of members.
        """
        found = self._program(args, kwargs)
        given = pytree.tree_leaves((args, kwargs))
        leaves = [given[leaf] if isinstance(leaf, int) else self._held(leaf) for leaf in found.leaves]
        for place in found.written:  # backward keeps what was there before
            leaves[place] = leaves[place].clone()
        results = found.program.run.forward(*leaves)
        with torch.no_grad():
            for name, new in zip(found.updates, results[found.program.outputs :], strict=True):
                self._update(name, new)
        return found.output(results, self.get_buffer(RUNNING_MODELS))

    def _held(self, name: str) -> Tensor:
        path, _, last = name.rpartition(".")
        holder = self._holders[0][path]
        found = holder._parameters.get(last)
        return holder._buffers[last] if found is None else found  # type: ignore[return-value]

    def _update(self, name: str, new: Tensor) -> None:
        """Members that are stopped keep what they have."""
        buffer = self._held(name)
        if name not in self._held_once:
            running = self.get_buffer(RUNNING_MODELS).reshape(self.size, *[1] * (new.ndim - 1))
            new = torch.where(running, new, buffer)
        buffer.copy_(new)

    @property
    def one_by_one(self) -> Mapping[str, int]:
        """Operators that run once for each member, since there is no rule that stacks them, and how many of a member.

        They are of the forms of input that were run so far.
        """
        found: dict[str, int] = {}
        for each in self._programs.values():
            found.update(each.program.one_by_one)
        return found

    @property
    def stopped(self) -> tuple[int, ...]:
        """The members that are no longer trained."""
        return tuple(place for place, runs in enumerate(self.get_buffer(RUNNING_MODELS).tolist()) if not runs)

    def stop(self, member: int) -> None:
        """Stop training a member: neither its parameters nor its buffers change any more.

        All members are still computed together. What :meth:`optimizer` was given is told, too.
        """
        self._check_member(member)
        self.get_buffer(RUNNING_MODELS)[member] = False
        for module in self._trained:
            set_running(module, self.get_buffer(RUNNING_MODELS))

    def member(self, member: int) -> nn.Module:
        """A member as a model by itself, of the original's class, with values of its own."""
        self._check_member(member)

        def row(name: str, like: Tensor) -> Tensor:
            held = self._held(name).detach()
            return (held if name in self._held_once else held[member]).clone()

        return self._as_a_member(row)

    def optimizer(self, make: type[torch.optim.Optimizer], module: ParallelModule | None = None, **options: Any) -> Any:
        """An optimizer that steps every member as one of its own would, with the member's hyper-parameters.

        It is what ``make`` makes of a parameter group for each member, ``param_groups[i]``: a member's parameters are
        rows of the array's, and the optimizer's state is of rows. So every optimizer is exact, and schedulers may give
        each group a rate of its own. Gradients are those of the array's parameters; a stopped member's are left out.

        Args:
            make: the optimizer's class, e.g. ``torch.optim.AdamW``; fused kernels are taken where it has them, unless
                ``fused``, ``foreach`` or ``differentiable`` is given.
            module: what ``autopar.parallelize`` made of this array, if that is trained; groups are of the members of
                which this rank holds something.
            options: hyper-parameters that all members share; those of ``vary`` are each member's own.

        Raises:
            InputError: ``vary`` names a hyper-parameter that the optimizer does not have; or ranks hold parts of
                a member's parameters, and the optimizer is not elementwise.
        """
        if module is not None:
            self._trained.append(module)
            set_running(module, self.get_buffer(RUNNING_MODELS))
        return member_optimizer(make, self, self.size, self.vary, options, module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModelArray:
        """What ``to``, ``cuda``, ``double`` and the like do: programs are for the dtypes and devices before."""
        self._programs.clear()
        return super()._apply(fn, recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of any module; raises :class:`InputError` for the state of an array of another size."""
        running = state_dict.get(RUNNING_MODELS)
        if running is not None and len(running) != self.size:
            raise InputError(
                f"the state is of an array of {len(running)} members, and this one has {self.size}: make one of as many"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def _check_member(self, member: int) -> None:
        if not isinstance(member, int) or not 0 <= member < self.size:
            raise InputError(f"there is no member {member!r}: members are numbered from 0 to {self.size - 1}")

    def extra_repr(self) -> str:
        """What it is of."""
        varied = "".join(f", {name} {list(values)}" for name, values in self.vary.items())
        return f"{self.size} x {type(self._member[0]).__name__}{varied}"

    def write_program(self, *args: Any, **kwargs: Any) -> None:
        """Write the program of inputs of this form, which else the first call does."""
        self._program(args, kwargs)

    # ---- programs ----------------------------------------------------------------------------------------------------

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Runnable:
        """The program of inputs of this form, in today's modes of modules; it is written when it is first asked for."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        modes = tuple(holder.training for holder in self._holders[0].values())
        forms = tuple((*each.shape, each.dtype) if isinstance(each, Tensor) else each for each in leaves)
        key = spec, forms, modes
        if key not in self._programs:
            with torch.enable_grad():
                self._programs[key] = self._write(args, kwargs)
            self._warn(self._programs[key])
        return self._programs[key]

    def _write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Runnable:
        if args and self._loss_fn is not None:
            raise InputError("an array with a loss_fn is called with the batch by name: array(x=..., target=...)")
        example, own = self._example(args, kwargs)

        def empty(name: str, like: Tensor) -> Tensor:
            held = self._held(name)
            return torch.empty(like.shape, dtype=held.dtype, device=held.device)

        captured = capture(self._as_a_member(empty), *example, loss_fn=self._loss_fn)
        held = [leaf for leaf in captured.program.leaves if leaf.kind in ("param", "buffer")]
        stacked = {leaf.name for leaf in held if leaf.target not in self._held_once}
        places = {name: place for place, name in enumerate(captured.input_names) if name is not None}
        stacked |= {name for name, place in places.items() if own[place]}
        return _Runnable.of(captured, stacked_program(captured, self.size, frozenset(stacked)), places)

    def _example(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[bool]]:
        """What one member is given, and which of it, flat, is its own."""
        names = [*inspect.signature(self._member[0].forward).parameters]
        names += [""] * (len(args) - len(names))
        of_member = (
            tuple(self._of_member(name, value) for name, value in zip(names, args, strict=False)),
            {name: self._of_member(name, value) for name, value in kwargs.items()},
        )
        unknown = self.own_inputs - accepted_names(self._member[0]) - kwargs.keys()
        if unknown:
            raise InputError(
                f"own_inputs: neither {type(self._member[0]).__name__}.forward nor the batch has an input "
                f"{min(unknown)!r}; the batch has {', '.join(sorted(kwargs))}"
            )
        named = [*zip(names, args, strict=False), *kwargs.items()]
        own = [name in self.own_inputs for name, value in named for _ in pytree.tree_leaves(value)]
        return of_member, own

    def _of_member(self, name: str, given: Any) -> Any:
        """What one member is given of an input: something like it, without values."""

        def empty(value: Tensor) -> Tensor:
            if name not in self.own_inputs:
                return torch.empty(value.shape, dtype=value.dtype, device=value.device)
            if value.shape[:1] != (self.size,):
                raise InputError(
                    f"input {name!r} is one of own_inputs, and has shape {tuple(value.shape)}: its first dim must be "
                    f"that of the {self.size} members"
                )
            return torch.empty(value.shape[1:], dtype=value.dtype, device=value.device)

        return pytree.tree_map_only(Tensor, empty, given)

    def _as_a_member(self, tensor: Callable[[str, Tensor], Tensor]) -> nn.Module:
        """A module of the members' class with these tensors, each made of its name and one that it is like."""
        member = with_tensors(self._member[0], tensor)
        for path, module in member.named_modules():
            module.training = self._holders[0][path].training
        return member

    def _warn(self, made: _Runnable) -> None:
        if made.program.one_by_one:
            each = ", ".join(f"{count} x {name}" for name, count in made.program.one_by_one.items())
            warnings.warn(
                f"no rule stacks these operators of {type(self._member[0]).__name__}, so that they run once for each "
                f"of the {self.size} members: {each}",
                PlanWarning,
                stacklevel=3,
            )


class _Programs(dict[Any, "_Runnable"]):
    """Programs by form of input. A copy of an array writes its own."""

    def __deepcopy__(self, memo: Any) -> _Programs:
        return _Programs()

    def __reduce__(self) -> Any:
        return _Programs, ()


class _Runnable(NamedTuple):
    """A stacked program, and where its arguments come from and its results go."""

    program: StackedProgram
    leaves: tuple[int | str, ...]
    updates: tuple[str, ...]
    written: tuple[int, ...]
    loss: int | None
    places: tuple[int | None, ...]
    static: tuple[Any, ...]
    spec: pytree.TreeSpec

    @staticmethod
    def of(captured: Captured, program: StackedProgram, places: Mapping[str, int]) -> _Runnable:
        """Args: places: of inputs among all, flat, by name of their leaves."""
        kept = [leaf for leaf in captured.program.leaves if leaf.kind != "const"]
        leaves = tuple(places[leaf.name] if leaf.kind == "input" else leaf.target for leaf in kept)
        updates = tuple(name for name, _ in captured.updates)
        written = tuple(place for place, leaf in enumerate(leaves) if leaf in updates)
        count = itertools.count()
        results = tuple(None if name is None else next(count) for name in captured.outputs)
        static = captured.static_outputs
        return _Runnable(program, leaves, updates, written, _loss(captured), results, static, captured.out_spec)

    def output(self, results: Sequence[Tensor], running: Tensor) -> ArrayOutput:
        """What the array returns, given which members are trained."""
        pairs = zip(self.places, self.static, strict=True)
        flat = [static if place is None else results[place] for place, static in pairs]
        loss = None
        if self.loss is not None:
            losses = flat[self.loss]
            loss = torch.where(running, losses, torch.zeros_like(losses)).sum()
        return ArrayOutput(loss, pytree.tree_unflatten(flat, self.spec))


def _loss(captured: Captured) -> int | None:
    """Which of a member's outputs is its loss: a floating number that is called so, or is the only one."""
    made = {node.name: node.meta["val"] for node in captured.graph.nodes if node.op != "output"}
    for place, (name, node) in enumerate(zip(captured.output_names, captured.outputs, strict=True)):
        if node is not None and name in (ONLY, "loss") and not made[node].shape and made[node].is_floating_point():
            return place
    return None
