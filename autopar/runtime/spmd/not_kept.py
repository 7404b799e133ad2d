"""What stands in the place of an output that a training step did not keep: an error for whoever uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.utils._pytree as pytree

from planner.base.errors import InputError


class OutputNotKeptError(InputError, AttributeError):
    """An output was used that the step did not keep; as an ``AttributeError`` it lets ``hasattr`` say no."""


class NotKept:
    """An output that a training step did not keep; using it raises :class:`OutputNotKeptError`.

    Args:
        name: what the model calls the output.
    """

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return f"<output {self._name!r}, not kept>"

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # protocols, such as that of copies
            raise AttributeError(attribute)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        given = pytree.tree_leaves((list(args), dict(kwargs or {})))
        next(value for value in given if isinstance(value, cls))._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise OutputNotKeptError(
            f"output {self._name!r} was not kept, since nobody asked for it: in micro-batches a training step would "
            f"hold it for all of them until it is over. To have it here, plan with outputs=('loss', {self._name!r}) or "
            "outputs='all' (autopar.parallelize, autopar.plan); under torch.no_grad() every output is returned"
        )

    __hash__ = object.__hash__


_USES = (
    "bool int float complex index len iter next contains getitem setitem array eq ne lt le gt ge neg pos abs invert "
    "add sub mul truediv floordiv mod pow matmul and or xor radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand "
    "ror rxor"
)
for _use in _USES.split():
    setattr(NotKept, f"__{_use}__", NotKept._refuse)
