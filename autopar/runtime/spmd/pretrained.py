"""Writes the trained weights as the original's own ``save_pretrained`` does, by one rank of many."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from planner.base.errors import AutoparError, InputError


def save_pretrained(
    original: nn.Module,
    names: Mapping[str, str],
    tensors: Callable[[], Iterable[tuple[str, Tensor]]],
    save_directory: str | os.PathLike[str],
    **options: Any,
) -> None:
    """Write the original with these tensors in its place; see
    :meth:`autopar.runtime.module.ParallelModule.save_pretrained`.

    Args:
        names: every name of a tensor -> its first name.
        tensors: whole ones by their first names; every rank takes them one after the other, and rank 0 keeps them.
        save_directory, options: as the original's ``save_pretrained`` takes them.
    """
    if "state_dict" in options:
        raise InputError("pmodel.save_pretrained gathers what was trained by itself: leave out state_dict")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors():
        if is_first:
            kept[name] = tensor
        del tensor
    failed: list[AutoparError | None] = [None]
    if is_first:
        try:
            _write(original, names, kept, save_directory, options)
        except Exception as error:
            failed = [InputError(f"rank 0 cannot save to {os.fspath(save_directory)!r}: {error}")]
    if dist.is_initialized():
        dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]


def _write(
    original: Any,
    names: Mapping[str, str],
    kept: dict[str, Tensor],
    save_directory: str | os.PathLike[str],
    options: Mapping[str, Any],
) -> None:
    if Path(save_directory).is_file():
        raise InputError("it is a file, and must be a directory")
    # What the model never uses is in no plan, and still as it was; tensors of several names stay one.
    own = original.state_dict()
    whole = {name: kept.get(names.get(name, name), tensor) for name, tensor in own.items()}
    state_dict = {name: tensor for name, tensor in whole.items() if not tensor.is_meta}
    kept.clear()
    original.save_pretrained(save_directory, state_dict=state_dict, is_main_process=True, **options)
