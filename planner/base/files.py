"""Reads YAML and JSON, and writes text so that a reader sees the old file or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from planner.base.errors import AutoparError, ClusterError


def read_yaml(path: str | os.PathLike[str], what: str) -> Any:
    """The contents of a YAML or JSON file; raises :class:`ClusterError` that says ``what`` file cannot be read."""
    check_path(path, what, ClusterError)
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise ClusterError(f"{what} {os.fspath(path)!r} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ClusterError(f"{what} {os.fspath(path)!r} nests lists without end: write it anew") from error
    except Exception as error:  # besides its own, the reader raises what a wrong number, date or tag makes it meet
        raise ClusterError(f"{what} {os.fspath(path)!r} is neither YAML nor JSON: {error}") from error


def check_path(path: object, what: str, error: type[AutoparError]) -> None:
    """Raise ``error`` unless ``path`` is one; ``what``: it is of."""
    if not isinstance(path, (str, os.PathLike)):
        raise error(f"the {what} is {path!r}: give the path of a file")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; on any failure, an interrupt included, the file is as it was. Raises :class:`OSError`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
