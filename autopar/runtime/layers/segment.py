"""Segments of block programs, compiled: each distinct one once, by ``torch.compile`` with inductor, as a whole graph.

A segment is a pure function of local tensors, parameters among them: what a rank computes between two collectives.
Instances of a block call the same one, so that compiling takes as long for two layers as for a hundred. Code is found
again in inductor's cache on disk, by other ranks and later runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch.fx import GraphModule

from autopar.runtime.host.error_notes import first_line
from autopar.runtime.spmd.run_state import RunState

Text = tuple[str, ...]
"""A segment's statements, with values by number: the same of segments that compute the same."""


@dataclass(frozen=True)
class Compilation:
    """What was compiled of a module's blocks so far.

    Attributes:
        segments: how many distinct ones run compiled.
        graphs: how many graphs inductor was given for them: another where an input needs no gradient, or none is
            taken.
        eager: segment -> why it runs as it is.
    """

    segments: int
    graphs: int
    eager: dict[str, str]


@dataclass
class Compiler:
    """Compiles the segments of a module.

    Attributes:
        splits_backward: whether gradients of weights come later than others.
        graphs: how many were compiled.
        made: the distinct segments, compiled, by what they compute and of which tensors.
        eager: segment -> why it is not compiled.
    """

    splits_backward: bool = False
    graphs: int = 0
    made: dict[object, Callable[..., Any]] = field(default_factory=dict)
    eager: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.splits_backward:  # reads what is saved twice; torch asks this where it compiles and in every backward
            config.donated_buffer = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiler:
        """Copies of a module run the same code."""
        return self

    @property
    def done(self) -> Compilation:
        """What was compiled so far."""
        return Compilation(len(self.made) - len(self.eager), self.graphs, dict(self.eager))

    def run_of(self, segment: Segment, args: Sequence[Any]) -> Callable[..., Any]:
        """The segment's code for such arguments; what compiles it is its first call."""
        key = segment.text, tuple(map(_form, args))
        if key not in self.made:
            compiled = torch.compile(segment.program.forward, fullgraph=True, dynamic=False, backend=self._inductor)
            self.made[key] = self._or_eager(segment, compiled)
        return self.made[key]

    def _inductor(self, graph: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """What inductor makes of a graph, backward included, so that what does not compile fails here."""
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        with config.patch(force_non_lazy_backward_lowering=True):
            run: Any = compile_fx(graph, inputs)
        return run

    def _or_eager(self, segment: Segment, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, or the segment as it is once that turns out not to compile."""
        from torch._dynamo.exc import TorchDynamoException

        def run(*args: Any) -> Any:
            if segment.name not in self.eager:
                try:
                    return compiled(*args)
                except TorchDynamoException as error:
                    cause = getattr(error, "inner_exception", error)
                    self.eager[segment.name] = why = f"{type(cause).__name__}: {first_line(cause)}"
                    warnings.warn(f"{segment.name} is not compiled and runs as it is: {why}", stacklevel=2)
            return segment.program(*args)

        return run


class Segment:
    """Operators of a block program, as one function.

    Args:
        name: of its block, and its number there.
        program: takes tensors, and whether the module trains where an operator asks that; returns what others read.
        text: what it computes.
    """

    def __init__(self, name: str, program: GraphModule, text: Text, compiler: Compiler):
        self.name, self.program, self.text = name, program, text
        self._compiler = compiler
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._run is None:
            self._run = self._compiler.run_of(self, args)
        return self._run(*args)


def run_segment(state: RunState, segment: Segment, *args: Any) -> Any:
    """``segment(*args)``. What it keeps for backward, which the compiler chooses, is made anew where it runs again."""
    with state.random.region():
        return segment(*args)


def segments_in(program: GraphModule) -> list[tuple[str, Segment]]:
    """The segments that a program calls, by name."""
    return [(name, each) for name, each in vars(program).items() if isinstance(each, Segment)]


def _form(arg: Any) -> object:
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype, arg.device
    return type(arg)
