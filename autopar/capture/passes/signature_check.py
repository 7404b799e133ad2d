"""Signature check: a model whose inputs or outputs have no graph form is refused."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from planner.base.errors import CaptureError


def signature_check(exported: ExportedProgram) -> ExportedProgram:
    """Leave everything as it is.

    Raises:
        CaptureError: the model holds what is no tensor, or writes to its inputs or parameters.
    """
    known = (InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    for given in exported.graph_signature.input_specs:
        if given.kind not in known:
            raise CaptureError(
                f"the model holds an input of kind {given.kind.name} ({given.target}), which has no graph form"
            )
    for spec in exported.graph_signature.output_specs:
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            raise CaptureError(
                f"the model writes into its input {spec.target!r} in place; clone the input before writing"
            )
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.BUFFER_MUTATION):
            raise CaptureError(
                f"the model's forward writes into {spec.target!r} in place ({spec.kind.name.lower()}), which a plan "
                "cannot carry: write to parameters between steps (constraints, max_norm), not in forward"
            )
    return exported
