"""Which blocks of a model are its layers, by their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LAYER = re.compile(r"(.+)\.(?:\*|\d+)")
"""The name of a block that is a whole layer."""


@dataclass(frozen=True)
class Layers:
    """The blocks of a model that are its layers.

    Attributes:
        path: what they are called: ``model.layers.*``; empty: the model has none.
        numbers: of the blocks that are one, among all blocks.
        pieces: whether blocks are parts of layers.
    """

    path: str
    numbers: tuple[int, ...]
    pieces: bool

    @classmethod
    def of(cls, blocks: Mapping[str, Sequence[int]]) -> Layers:
        """The largest family of blocks that are alike but for a number in their name.

        Args:
            blocks: distinct ones by name, and the numbers of their instances.
        """
        families = Counter[str]()
        for name, numbers in blocks.items():
            if found := LAYER.match(name):
                families[found[1]] += len(numbers)
        if not families:
            return cls("", (), False)
        path = families.most_common(1)[0][0]
        own = {name: numbers for name, numbers in blocks.items() if name.startswith(f"{path}.")}
        whole = [numbers for name, numbers in own.items() if LAYER.fullmatch(name)]
        return cls(f"{path}.*", tuple(sorted(n for numbers in whole for n in numbers)), len(whole) < len(own))
