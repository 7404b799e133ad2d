"""Files written atomically: a reader sees the old file or the new one, whole."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text; on any failure, an interrupt included, the file is as it was. Raises :class:`OSError`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
