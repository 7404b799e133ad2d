"""Ungraded operands: what a Function's backward gives no gradient to is detached before the call."""

from __future__ import annotations

from torch.export import ExportedProgram

from autopar.functions.ungraded import cut_ungraded


def ungraded_operands(exported: ExportedProgram) -> ExportedProgram:
    """Detach the operands of Functions for which backward returns ``None``, so that a plan expects no gradient.

    Raises:
        CaptureError: operands or results are not what was declared.
    """
    cut_ungraded(exported.graph)
    return exported
