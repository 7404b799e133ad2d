"""Describes the contents of a checkpoint as text."""

from __future__ import annotations

import os
from collections import defaultdict

from autopar.checkpoint.contents import MODEL, OPTIM
from autopar.checkpoint.files import Stored
from planner.base.formatting import in_bytes


def inspected(path: str | os.PathLike[str]) -> str:
    """Who wrote a checkpoint, what it holds, and every tensor of its model; all checksums are compared.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    stored = Stored.open(path)
    stored.verify()
    contents, manifest = stored.contents, stored.manifest
    aliases: dict[str, str] = contents["aliases"]
    model = [name for name in stored.names(MODEL) if name not in aliases]

    def taken(kind: str, names: list[str]) -> str:
        return in_bytes(sum(stored.bytes_of(kind + name) for name in names))

    lines = [
        f"{path}: format {manifest['format']}, written by autopar {manifest['autopar']} with torch {manifest['torch']}",
        f"  model      {len(model)} tensors, {taken(MODEL, model)}",
    ]
    if contents["state"] is None:
        lines.append("  optimizer  none")
    else:
        keys = sorted({key for state in contents["state"].values() for key in state})
        groups = f"{len(contents['groups'])} group{'s' * (len(contents['groups']) != 1)} of parameters"
        held = f"{taken(OPTIM, stored.names(OPTIM))} in {', '.join(keys)}" if keys else "no state"
        lines.append(f"  optimizer  {groups}, {held}")
    lines.append(f"  extra      {', '.join(sorted(contents['extra'])) or 'none'}")
    lines.append(f"  files      {len(manifest['files'])}, with the checksums that were written")
    names = defaultdict(list)
    for alias, first in aliases.items():
        names[first].append(alias)
    width = max(map(len, model), default=0)
    for name in model:
        found = stored.tensors[MODEL + name]
        shape = "x".join(map(str, found.size)) or "scalar"
        also = f", also {', '.join(sorted(names[name]))}" if names[name] else ""
        lines.append(f"  {name:<{width}}  {str(found.properties.dtype).removeprefix('torch.')} {shape}{also}")
    return "\n".join(lines)
