"""``autopar.lint``: a configuration of another tool held against a model and a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from autopar.capture.capture import LossFn
from autopar.driver.arguments import check_arguments, check_progress, say, training_of
from autopar.driver.trace import trace
from planner.base.cpython import no_garbage, on_one_stack
from planner.base.errors import ConfigError, InputError
from planner.base.files import check_path
from planner.cost.cluster import ClusterSpec
from planner.formulation.training import Training
from planner.interchange.lint import Lint
from planner.interchange.lint import lint as lint_text
from planner.search.search_context import Progress


@on_one_stack
@no_garbage()
def lint(
    config: str | os.PathLike[str],
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    format: str | None = None,
    optimizer_bytes_per_element: int = Training.optimizer_bytes_per_element,
    time_limit_s: float = 20.0,
    progress: Progress | None = None,
) -> Lint:
    """Whether a configuration of another tool runs, fits, what it costs, what would be best, and what to change first.

    Args:
        config: the path of its file.
        model, cluster, example_args, example_kwargs, loss_fn, optimizer_bytes_per_element: as in :func:`autopar.plan`;
            the example is one global batch of the configuration's.
        format: ``fsdp2``, ``hf``, ``accelerate``, ``torchtitan``, ``megatron`` or ``deepspeed``; left out, it is found
            out from the text.
        time_limit_s: for planning; 0 checks what needs none alone.
        progress: called with a line of text as it advances.

    Raises:
        ConfigError: the file cannot be read, or its format is not known. What else is wrong with it is in the result.
        InputError, CaptureError: as :func:`autopar.plan`.
    """
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, (int, float)) or not time_limit_s >= 0:
        raise InputError(f"time_limit_s is {time_limit_s!r}; give seconds, 0 for no planning")
    text = read_config(config)
    check_arguments(model, cluster, example_args, example_kwargs)
    check_progress(progress)
    training = training_of(optimizer_bytes_per_element)
    say(progress, f"capturing {type(model).__name__}")
    traced = trace(model, example_args, example_kwargs, loss_fn)
    return lint_text(text, format, traced.graph, cluster, training, time_limit_s=time_limit_s, progress=progress)


def read_config(path: str | os.PathLike[str]) -> str:
    """The text of a configuration; raises :class:`ConfigError` where the file cannot be read."""
    check_path(path, "configuration", ConfigError)
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {os.fspath(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(path)!r} is no configuration: it is not text ({error.reason})") from error
