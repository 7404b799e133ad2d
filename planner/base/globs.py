"""Globs of parameters and modules, as pins have them."""

from __future__ import annotations

from fnmatch import fnmatchcase


def is_of(glob: str, name: str) -> bool:
    """Whether a glob is of a parameter, by its name, or of a module that it is in."""
    return any(fnmatchcase(each, glob) for each in (name, *modules_of(name)))


def modules_of(name: str) -> list[str]:
    """The paths of the modules that a parameter is in, the outermost first, without the model itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
