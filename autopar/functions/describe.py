"""What the planner is told of a Function that is called on tensors of some shapes; see :mod:`planner.ops.function`.

What its dims mean is what was declared; of one that was not, every dim stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.functions.carry import Carried
from autopar.functions.observe import ObservedFunction, observe
from autopar.functions.outside import Watching, refuse_reach
from planner.base.errors import CaptureError
from planner.ir.graph import TensorType
from planner.ops.signature import is_floating


@dataclass(frozen=True)
class Operand:
    """A tensor that a Function takes: what must be known of it to run that."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = field(compare=False)
    trained: bool


def operands_of(node: fx.Node, trained: Sequence[bool]) -> tuple[Operand, ...]:
    """The tensors that a traced call takes; ``trained``: whether gradients are asked of each."""
    tensors = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    return tuple(Operand(tuple(t.shape), t.dtype, t.device, asked) for t, asked in zip(tensors, trained, strict=True))


@dataclass(frozen=True)
class Description:
    """A Function on tensors of some shapes.

    Attributes:
        arguments: what its node says.
        ungraded: operands to which its backward gives no gradient.
        untrained: results that it does not differentiate.
        is_unseen: whether it is not known what it keeps, so that it is taken to keep all that floats.
    """

    arguments: tuple[tuple[str, object], ...]
    ungraded: frozenset[int]
    untrained: frozenset[int]
    is_unseen: bool


def describe(carried: Carried, operands: Sequence[Operand], results: Sequence[TensorType]) -> Description:
    """What is known of a Function on such operands.

    Raises:
        CaptureError: they are not what was declared, or it finds a model's tensors by itself.
    """
    key, known = (tuple(operands), carried.declared), carried.described
    if key not in known:
        known[key] = _describe(carried, operands, results)
    found: Description = known[key]
    return found


def _describe(carried: Carried, operands: Sequence[Operand], results: Sequence[TensorType]) -> Description:
    declared = carried.declared
    seen = _observed(carried, operands)
    dims = tuple(("",) * len(shape) for shape in [*(o.shape for o in operands), *(t.shape for t in results)])
    if declared is not None:
        shapes = [o.shape for o in operands]
        declared.check(carried.name, shapes, [t.shape for t in results] if seen is None else seen.results)
        dims = declared.dims(shapes)
        seen = declared.observed if seen is None else seen
    shown = seen or _anything(operands, results)
    arguments = {
        "dims": dims,
        "terms": declared is not None and declared.linear_backward,
        "saves": shown.saves,
        "holds": shown.holds,
        "kept": shown.others,
        "flops": shown.flops,
        "moves": shown.moves,
        "works": round(shown.works),
        "registered": declared is not None,
    }
    return Description(tuple(arguments.items()), shown.ungraded, shown.untrained, seen is None)


def _observed(carried: Carried, operands: Sequence[Operand]) -> ObservedFunction | None:
    """What a Function does on tensors without data; ``None`` if its forward does not run on them.

    Raises:
        CaptureError: it finds a model's tensors by itself, or may where it is not watched.
    """
    found = None
    try:
        # No mode of those around a call (simulated ranks, exact dtypes) may see this.
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.enable_grad(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            inputs = [torch.empty(o.shape, dtype=o.dtype, device=o.device, requires_grad=o.trained) for o in operands]
            with Watching(carried.name, inputs):
                found = observe(carried.apply, inputs)
    except CaptureError:
        raise
    except Exception:  # whatever code without values to decide on raises
        pass
    if found is None or not found.is_whole:
        refuse_reach(carried.name, carried.cls, carried.args)
    return found


def _anything(operands: Sequence[Operand], results: Sequence[TensorType]) -> ObservedFunction:
    """Of a kernel that nobody sees into: it keeps all that floats."""
    floating = [f"in{place}" for place, operand in enumerate(operands) if operand.dtype.is_floating_point]
    floating += [f"out{place}" for place, result in enumerate(results) if is_floating(result)]
    return ObservedFunction(tuple(t.shape for t in results), saves=tuple(floating))
