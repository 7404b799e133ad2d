"""Reads YAML and JSON, and writes text so that a reader sees the old file or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from planner.base.errors import ClusterError


def read_yaml(path: str | os.PathLike[str], what: str) -> Any:
    """The contents of a YAML or JSON file; raises :class:`ClusterError` that says ``what`` file cannot be read."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise ClusterError(f"{what} {os.fspath(path)!r} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ClusterError(f"{what} {os.fspath(path)!r} nests lists without end: write it anew") from error
    except Exception as error:  # besides its own, the reader raises what a wrong number, date or tag makes it meet
        raise ClusterError(f"{what} {os.fspath(path)!r} is neither YAML nor JSON: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; on any failure, an interrupt included, the file is as it was. Raises :class:`OSError`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
