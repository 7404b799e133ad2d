"""Updates parameters while backward still runs: chunks of them on the host, or those of a block on the device.

Where a plan says so, gradients are handed on as a chunk of them leaves the device. A thread waits until they are at
home, steps the optimizer over this chunk's parameters and no others, and lets the gradients go. Of a plan with
everything on the device a block's are handed on when they are reduced, and used in the stream that computes. When
backward is over, all of this is. ``optimizer.step()`` then ends the step: it steps what has gradients still, and what
the optimizer counts and calls goes on once.
"""

from __future__ import annotations

import copy
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.host.error_notes import add_note, first_line
from autopar.runtime.optim.gradients import is_hooked
from autopar.runtime.optim.optimizer_probe import FAILURES, SCALES, at_a_rate, name_of
from planner.base.errors import InputError

AFTER = "plan with pin 'update' 'after', whose backward leaves gradients in .grad"
"""The way out for steps that are not forward, backward, update."""
ENDS = "Call optimizer.step(), which ends this step, before the model is called again"
"""What an update that fails leaves to do."""
USED = (
    "backward has used this gradient to update its parameter and let it go (pin 'update' is 'backward'): what needs "
    f"gradients before the update, such as clipping by their norm or a GradScaler, cannot be had so: {AFTER}"
)
AT_ONCE = "backward updates no parameters before it is over, as the plan would have it, which is slower: "
SIZE = 16
"""Rows and columns of the matrices on which an optimizer is tried."""


class Used(DTensor):
    """What is in ``.grad`` of a parameter that was updated, until the step ends: it has a form, but no values."""

    @classmethod
    def of(cls, parameter: DTensor) -> Used:
        """In place of a parameter's gradient; takes no memory."""
        local = parameter._local_tensor
        return cls(local.new_zeros(()).expand(local.shape), parameter._spec, requires_grad=False)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            raise InputError(USED)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(USED)

    to_local = full_tensor = redistribute = _refuse

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Used(shape={tuple(self.shape)})"


class Partly:
    """An optimizer that steps some of its parameters, with its state, and by its options as they are now.

    What it counts, in groups or elsewhere, is at each of these steps as it is now; its own step takes it further.

    Args:
        hooks: of its steps, before and after, by number.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, hooks: tuple[Mapping[int, Any], Mapping[int, Any]] = ({}, {})):
        self.options = _options(optimizer)
        self._group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._twin = object.__new__(type(optimizer))
        self._twin.__dict__.update(optimizer.__dict__)
        self._twin.__dict__.pop("step", None)  # a scheduler's, which counts
        self._twin._optimizer_step_pre_hooks, self._twin._optimizer_step_post_hooks = map(OrderedDict, hooks)

    def step(self, grads: Mapping[Any, Tensor]) -> None:
        """Step parameters that have no gradients by these, which are let go."""
        self._twin.param_groups = [{**each, "params": []} for each in copy.deepcopy(self.options)]
        for parameter in grads:
            if parameter in self._group_of:
                self._twin.param_groups[self._group_of[parameter]]["params"].append(parameter)
        try:
            for parameter, grad in grads.items():
                parameter.grad = grad
            self._twin.step()
        finally:
            for parameter in grads:
                parameter.grad = None


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]


class AtOnce(Executor):
    """Runs what it is given where it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """What became of it."""
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


def in_thread(device: torch.device) -> Executor:
    """Runs what it is given in order, in a thread of its own beside what this device computes."""
    # The thread's own current device is the first one, on which optimizers that ask for a stream would begin one.
    begin = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
    return ThreadPoolExecutor(1, "autopar-update", begin)


class Updates:
    """Steps an optimizer by chunks, in order; lives as long as the optimizer.

    Args:
        optimizer: whose hooks so far belong to how it steps; others are called when the step ends.
        executor: what steps.

    Attributes:
        is_replaced: whether another optimizer updates in its place.
        is_over: whether backward has updated, and is over, and the step has not ended.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, executor: Executor):
        self.is_replaced = self.is_over = False
        self._optimizer = weakref.ref(optimizer)
        self._hooks = optimizer._optimizer_step_pre_hooks.copy(), optimizer._optimizer_step_post_hooks.copy()
        self._executor = executor
        self._partly: Partly | None = None
        self._started: dict[str, Future[None]] = {}
        self._parameters: list[DTensor] = []
        handle = optimizer.register_step_pre_hook(self._end)
        optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]

    @property
    def is_begun(self) -> bool:
        """Whether backward has updated anything since the step before ended."""
        return self._partly is not None

    def start(self, chunk: str, grads: dict[DTensor, Tensor], arrive: Callable[[], object]) -> None:
        """Update parameters when their gradients have arrived, and let these go; one chunk after another."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if self._partly is None:
            self._partly = Partly(optimizer, self._hooks)
        self._parameters += grads
        self._started[chunk] = self._executor.submit(_update, self._partly, grads, arrive)

    def settle_next(self) -> bool:
        """Wait for the next update to be over, however it ends; whether there was one."""
        left = next((future for future in self._started.values() if not future.done()), None)
        if left is not None:
            wait([left])
        return left is not None

    def settle(self) -> None:
        """Wait for all that was started, however it ends."""
        wait(self._started.values())

    def replace(self) -> None:
        """Another optimizer updates from here on: what is under way is the last."""
        self.settle()
        self._forget()
        self.is_replaced = True

    def finish(self) -> None:
        """Backward is over: wait for all that was started.

        Raises:
            BaseException: what an update raised, with a note of which chunks were updated.
        """
        errors = [error for future in self._started.values() if (error := future.exception()) is not None]
        for parameter in self._parameters:
            parameter.grad = Used.of(parameter)
        self.is_over = True
        if errors:
            add_note(errors[0], f"while backward updated parameters; {self._told()}. {ENDS}")
            raise errors[0]

    def check_ended(self) -> None:
        """The model is about to be called.

        Raises:
            InputError: a step has not ended.
        """
        if self.is_over:
            raise InputError(
                "backward has updated parameters (pin 'update' is 'backward'), and the model is called before "
                "optimizer.step() has ended this step: call it first; to add up gradients of several backwards, "
                f"{AFTER}"
            )
        if self._partly is not None:
            warnings.warn(self._broken_off(), stacklevel=2)

    def _broken_off(self) -> str:
        """Forget a backward that was not finished; what it did."""
        self.settle()
        told = self._told()
        self._forget()
        return (
            "a backward that was not finished had already updated some parameters, which are a step ahead of others "
            f"({told}): go on so, or load a checkpoint"
        )

    def _told(self) -> str:
        done = [name for name, future in self._started.items() if future.done() and future.exception() is None]
        failed = [name for name in self._started if name not in done]
        return "; ".join(
            f"{what}: {', '.join(names)}" for what, names in (("updated by", done), ("failed", failed)) if names
        )

    def _end(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before ``optimizer.step()``: what was updated has no gradients any more."""
        if self.is_replaced:
            raise InputError(
                "another optimizer was made by pmodel.optimizer since, and backward updates by that one: step that"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._partly is not None:
            if not self.is_over:
                raise InputError(self._broken_off())
            _check_same(self._partly.options, _options(optimizer))
            self._forget()
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _forget(self) -> None:
        let_go(self._parameters)
        self._partly, self._started, self._parameters, self.is_over = None, {}, [], False


class EarlyUpdates:
    """Updates that are made while backward runs: by which optimizer, and whether in this step.

    Args:
        executor: makes what steps an optimizer.

    Attributes:
        given: the parameters of the call whose backward is next, by name.
    """

    def __init__(self, executor: Callable[[], Executor]):
        self._executor = executor
        self._updates: weakref.ref[Updates] | None = None
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self.given: Mapping[str, DTensor] = {}
        self._is_updating: bool | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> EarlyUpdates:
        """One without an optimizer."""
        return EarlyUpdates(self._executor)

    @property
    def _current(self) -> Updates | None:
        """What updates in backward, if an optimizer does."""
        return None if self._updates is None else self._updates()

    def update_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer update in backward, in place of the one before, for as long as it lives."""
        if (current := self._current) is not None:
            current.replace()
        self._updates = weakref.ref(Updates(optimizer, self._executor()))

    def begin_with(self, parameters: Mapping[str, DTensor]) -> None:
        """The program begins with these parameters; raises :class:`InputError` if a step has not ended."""
        if (current := self._current) is not None:
            current.check_ended()
        elif self._updates is not None:  # the optimizer is no more
            let_go(parameters.values())
        self.given, self._is_updating = parameters, None

    def called(self, call: Any) -> None:
        """A call of the model, of which backward may come: its node of autograd."""
        self._calls.add(call)

    def updates(self) -> bool:
        """Whether this backward updates parameters; raises :class:`InputError` if one before has."""
        self.check_not_over()
        if self._is_updating is None:
            self._is_updating = self._current is not None and may_update(self._calls, self.given)
            if self._is_updating:
                self._calls.clear()  # no graph so far can be undone from here on
        return self._is_updating

    def use(self, name: str, grads: Mapping[DTensor, Tensor], arrive: Callable[[], object] = lambda: None) -> None:
        """Update parameters by these gradients, of a chunk or a block.

        Args:
            arrive: waits until the gradients are there.
        """
        if (current := self._current) is not None:
            made: dict[DTensor, Tensor] = {
                each: DTensor(grad.contiguous(), each._spec, requires_grad=False) for each, grad in grads.items()
            }
            current.start(name, made, arrive)

    def finish(self, call: Any) -> None:
        """Backward of a call is over: wait for all updates; raises what one of them raised."""
        self._calls.discard(call)
        if (current := self._current) is not None and current.is_begun:
            current.finish()

    def settle_next(self) -> bool:
        """Wait for an update that holds gradients at home; whether there was one."""
        return (current := self._current) is not None and current.settle_next()

    def settle(self) -> None:
        """Wait for updates that go on after a backward that was not finished: parameters are left alone then."""
        if (current := self._current) is not None:
            current.settle()

    def check_first(self) -> None:
        """Raise :class:`InputError` if the backward before has updated parameters, and another one begins."""
        if (current := self._current) is not None and current.is_begun:
            raise InputError(
                "a second backward in one step, whose first one has already updated parameters (pin 'update' is "
                f"'backward'): {AFTER}"
            )

    def check_not_over(self) -> None:
        """The same where that backward is over."""
        if (current := self._current) is not None and current.is_over:
            self.check_first()


def let_go(parameters: Iterable[Tensor]) -> None:
    """Take away what stands for gradients that were used."""
    for parameter in parameters:
        if isinstance(parameter.grad, Used):
            parameter.grad = None


def _update(partly: Partly, grads: dict[DTensor, Tensor], arrive: Callable[[], object]) -> None:
    try:
        arrive()
        partly.step(grads)
    except BaseException as error:
        _let_frames_go(error)
        raise
    finally:
        grads.clear()  # before anyone who waits goes on: their memory is for the next ones


def _let_frames_go(error: BaseException | None) -> None:
    """Take from an error what the calls held that it ended, gradients among it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _check_same(before: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]) -> None:
    """Raise :class:`InputError` if options were changed between backward, where they count, and the step's end."""
    for number, (old, new) in enumerate(zip(before, now, strict=False)):
        for key in old.keys() & new.keys():
            if not _is_same(old[key], new[key]):
                raise InputError(
                    f"param_groups[{number}][{key!r}] was {old[key]!r} in backward, which has updated parameters by "
                    f"it, and is now {new[key]!r}: put it back for this step, and change options before backward() "
                    "or after optimizer.step()"
                )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def may_update(calls: Collection[Any], parameters: Mapping[str, Tensor]) -> bool:
    """Whether parameters get no gradients but those of this backward, and nobody asks for them; if not, says why.

    Args:
        calls: nodes of autograd that hand parameters their gradients, of calls of the model whose backward may come.
    """
    reason = _reason_to_wait(calls, parameters)
    if reason is not None:
        warnings.warn(f"{AT_ONCE}{reason}", stacklevel=2)
    return reason is None


def _reason_to_wait(calls: Collection[Any], parameters: Mapping[str, Tensor]) -> str | None:
    if len(calls) > 1:
        return "the graph of another call of the model, of which backward may come, is still there"
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            return f"{name} has a gradient from before, to which this one is added"
        if is_hooked(parameter):
            return f"a hook waits for the gradient of {name}"
    if not all(_is_reached(node) for call in calls for node, _ in call.next_functions if node is not None):
        return "some gradients are asked for, and not all"
    return None


def _is_reached(node: Any) -> bool:
    """Whether this backward hands a parameter its gradient."""
    try:
        found: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # in torch.autograd.grad, which returns gradients
        found = False
    return found


# ---- what can update in backward -------------------------------------------------------------------------------------


def check_separate(make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` unless an optimizer is torch's, and updates each parameter by itself.

    Tried in three steps in float64 on two matrices, at once and one after the other.

    Args:
        options: what the optimizer is made with; with a rate of 0 nothing would be seen, so another one is taken.
    """
    if getattr(make, "takes_parts", False):
        raise InputError(
            f"{name_of(make)} goes by norms of whole parameters, which ranks find together in a step, and in backward "
            f"(pin 'update' is 'backward') each updates by itself: take AdamW, SGD, RMSprop, Adagrad ..., or {AFTER}"
        )
    options = at_a_rate(options)
    try:
        at_once, one_by_one = (_stepped(make, options, is_apart) for is_apart in (False, True))
    except (*FAILURES, AttributeError) as error:  # what it has made itself, a twin has not
        raise InputError(
            f"{name_of(make)} does not step some of its parameters as torch.optim.Optimizer does, from gradients alone "
            f"({first_line(error)}), which updates in backward do: take another, or {AFTER}"
        ) from error
    if not all(torch.allclose(*both, rtol=1e-10, atol=1e-12) for both in zip(at_once, one_by_one, strict=True)):
        raise InputError(
            f"{name_of(make)} does not update each parameter by itself, and in backward (pin 'update' is 'backward') "
            "some are updated before the gradients of others are there: take one that does (AdamW, SGD, RMSprop, "
            f"Adagrad ...), or {AFTER}"
        )


def _stepped(make: Callable[..., Any], options: Mapping[str, Any], is_apart: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)

    parameters = [nn.Parameter(drawn()) for _ in range(2)]
    optimizer = make(parameters, **options)
    with torch.random.fork_rng([]):
        for scale in SCALES:
            grads = {parameter: drawn() * scale for parameter in parameters}
            partly = Partly(optimizer)
            for parameter, grad in grads.items():
                if is_apart:
                    partly.step({parameter: grad})
                else:
                    parameter.grad = grad
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters]
