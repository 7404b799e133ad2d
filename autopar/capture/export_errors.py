"""Says why a model cannot be captured in terms of the user's code: its module, its line, the way out.

Three kinds are told apart. The model fails on these inputs whether it is captured or not; then the inputs are to be
mended. Its code depends on the values of tensors, which a graph does not know. Or torch cannot trace it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import linecache
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from autopar.graph.program import Program
from planner.base.errors import AutoparError, CaptureError, InputError

_ON_VALUES = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_NEEDS_VALUES = re.compile(r"tensor subclasses|data pointer|data_ptr|fake ?tensor", re.IGNORECASE)
"""What torch says when code wants the memory of a tensor that has none: ``.numpy()``, C extensions."""

_NOT_THE_USERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<")
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

_ONE_PATH = (
    "a graph holds one path through the code: branch on shapes or configuration, not on tensor values (torch.where "
    "instead of if; no .item(), .tolist() or data-dependent loops), and put code that cannot be traced (numpy, C "
    "extensions) in a torch.library.custom_op with a fake implementation"
)
_EXPERTS = """
  or, where experts are looped over, call them as one operator, with what the router chose for each token:
       up = torch.stack([expert.up.weight for expert in experts])      # gated: of each torch.cat([gate, up])
       down = torch.stack([expert.down.weight for expert in experts])  # quicker: parameters that are stacked already
       y = autopar.experts(x, indices, weights, up, down, gate="none")  # gated: leave out gate
     indices and weights are the router's topk, [tokens, k]. Experts with biases give up_bias and down_bias, stacked
     alike, and any activation but SiLU is said (activation="gelu")"""


def _ways_out(model: nn.Module, fix: str) -> str:
    """What to do about code that decides on values, and of a model with experts what is mostly meant."""
    is_mixture = any("expert" in name.lower() for name, _ in model.named_modules())
    return fix + (_EXPERTS if is_mixture else "")


# ---- a failed export -------------------------------------------------------------------------------------------------


def failure(
    model: nn.Module, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> AutoparError:
    """The error to raise when the export of a model failed.

    Args:
        model: the user's.
        whole: what was exported: the model, or the model and its loss.
    """
    if isinstance(error, AutoparError):
        return error
    name = type(model).__name__
    if isinstance(error, _ON_VALUES):
        reason = f"the code decides on the values of tensors ({_first_line(error).partition(' (unhinted')[0]})"
    else:
        called = None if _is_torchs_own(error) else _when_called(whole, args, kwargs)
        if called is not None and type(called) is type(error):
            where = _where_raised(model, called)
            if whole is not model and "  in  module" not in where:
                return InputError(
                    f"loss_fn fails when it is called with {name}'s outputs and this batch, {_written(args, kwargs)}.\n"
                    f"{where}  why {type(called).__name__}: {_first_line(called)}\n"
                    "  fix loss_fn(outputs, batch), or give example_kwargs that hold what it reads"
                )
            where = where or _signature(model)
            return InputError(
                f"{name} fails when it is called with these inputs, {_written(args, kwargs)}.\n"
                f"{where}  why {type(called).__name__}: {_first_line(called)}\n"
                "  fix the example inputs, whose names, shapes and dtypes must be those of a real call (what is for "
                "the loss alone needs loss_fn), or the model"
            )
        reason = f"{type(error).__name__}: {_first_line(error)}"
    return CaptureError(
        f"{name} cannot be captured as a graph.\n{_where_raised(model, error)}  why {reason}\n"
        f"  fix {_ways_out(model, _ONE_PATH)}"
    )


def _is_torchs_own(error: Exception) -> bool:
    """Whether an error says what fake tensors cannot do, and nothing about the model."""
    return type(error).__module__.startswith("torch._subclasses") or bool(_NEEDS_VALUES.search(str(error)))


def _when_called(whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    """What calling the model on fake tensors raises."""
    with without_torchs_notes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        held = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        fakes, args, kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (held, args, dict(kwargs)))
        try:
            torch.func.functional_call(whole, fakes, args, dict(kwargs))
        except Exception as error:
            return error
    return None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _where_raised(model: nn.Module, error: BaseException) -> str:
    return _where(model, traceback.walk_tb(error.__traceback__))


def _where(model: nn.Module, frames: Iterable[tuple[FrameType, int]]) -> str:
    """The last line of the user's code in a stack, and its module."""
    path_of = {id(module): path for path, module in model.named_modules()}
    found, module = "", ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.startswith(_NOT_THE_USERS):
            continue
        owner = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        method = getattr(type(owner), frame.f_code.co_name, None)
        if id(owner) in path_of and getattr(method, "__code__", None) is frame.f_code:
            module = f"  in  module {path_of[id(owner)] or '(root)'} ({type(owner).__name__})\n"
        text = linecache.getline(file, line).strip()
        found = f"  at  {file}:{line}, in {frame.f_code.co_name}: {text}\n"
    return found + module


def _signature(model: nn.Module) -> str:
    return f"  at  {type(model).__name__}.forward{inspect.signature(model.forward)}\n"


def _written(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``x float32 8x16, ids int64 8x32``."""
    named = [*((f"argument {at}", value) for at, value in enumerate(args)), *kwargs.items()]
    return ", ".join(f"{name} {_kind(value)}" for name, value in named) or "none at all"


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'scalar'}"


# ---- values in the graph ---------------------------------------------------------------------------------------------


def reads_values(program: Program) -> fx.Node | None:
    """The first operator whose result, or its size, depends on the values of tensors."""
    for body in dict.fromkeys(call.body for call in program.calls):
        for node in body.nodes:
            if any(map(_is_unknown, pytree.tree_leaves(node.meta.get("val")))):
                return node
    return None


def _is_unknown(value: object) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes)


class _Watch(TorchFunctionMode):
    """Looks for the first function whose result, or its size, depends on the values of tensors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.where, self._below = model, "", sys._getframe(1)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.where and any(map(_is_unknown, pytree.tree_leaves(result))):
            above = itertools.takewhile(lambda at: at[0] is not self._below, traceback.walk_stack(sys._getframe(1)))
            self.where = _where(self.model, reversed(list(above)))
        return result


def on_values(model: nn.Module, node: fx.Node, export: Callable[[], object]) -> CaptureError:
    """The error for an operator that :func:`reads_values` found.

    Args:
        export: does what made it once more, to see which line that is.
    """
    path, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", "")}).values()))
    where = f"  in  module {path or '(root)'} ({str(kind).rpartition('.')[2] if path else type(model).__name__})\n"
    with _Watch(model) as watch:
        export()
    if isinstance(node.meta["val"], (torch.SymInt, torch.SymFloat, torch.SymBool)):
        reason = f"{node.target} reads the value of a tensor into Python"
        fix = "keep it a tensor: leave out .item(), .tolist(), int() and float(), and compute with the tensor itself"
    else:
        reason = f"how large the result of {node.target} is depends on the values of a tensor"
        fix = (
            "compute with all of it and mask what does not count: torch.where(mask, x, 0) instead of x[mask], no "
            "nonzero, unique or masked_select"
        )
    return CaptureError(
        f"{type(model).__name__} cannot be captured as a graph.\n{watch.where or where}  why {reason}\n"
        f"  fix {_ways_out(model, fix)}"
    )


# ---- silence ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_torchs_notes() -> Iterator[None]:
    """Keep back what torch writes about an export that fails: whole stacks, and the graph so far."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    said, graph = io.StringIO(), ""
    for logger in loggers:
        logger.disabled = True
    try:
        with contextlib.redirect_stderr(said):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", "")
        raise
    finally:
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was
        sys.stderr.write(said.getvalue().replace(f"{graph}\n", "") if graph else said.getvalue())
