"""Flatten: the passes between what ``torch.export`` recorded and one flat, functional :class:`Program`."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.export import ExportedProgram

from autopar.capture.pass_runner import Pass, run
from autopar.capture.passes.assertion_removal import assertion_removal
from autopar.capture.passes.call_splitting import call_splitting
from autopar.capture.passes.canonical_order import canonical_order
from autopar.capture.passes.causal_masks import causal_masks
from autopar.capture.passes.complex_writes import complex_writes
from autopar.capture.passes.constant_order import constant_order
from autopar.capture.passes.contiguous_removal import contiguous_removal
from autopar.capture.passes.dead_code import dead_code
from autopar.capture.passes.embedding_bags import embedding_bags
from autopar.capture.passes.functionalization import functionalization
from autopar.capture.passes.grouped_heads import grouped_heads
from autopar.capture.passes.identity_indexing import identity_indexing
from autopar.capture.passes.in_place_arithmetic import in_place_arithmetic
from autopar.capture.passes.late_experts import late_experts
from autopar.capture.passes.linear_copies import linear_copies
from autopar.capture.passes.literal_copies import literal_copies
from autopar.capture.passes.no_grad_regions import no_grad_regions
from autopar.capture.passes.node_names import node_names
from autopar.capture.passes.overwrite_removal import overwrite_removal
from autopar.capture.passes.region_inlining import region_inlining
from autopar.capture.passes.signature_check import signature_check
from autopar.capture.passes.ungraded_operands import ungraded_operands
from autopar.capture.repeats.repeats import Repeats
from autopar.graph.program import Program


def flatten(exported: ExportedProgram, model: nn.Module, repeats: Repeats) -> Program:
    """Run the passes.

    Args:
        model: the user's, whose names parameters have.
        repeats: what the marks in the graph mean.

    Raises:
        CaptureError: the graph holds what has no planner form; names the module.
        NotFoldable: calls that were taken for the same differ in what became of them.
    """
    return run(passes(model, repeats), exported, repeats.names)


def passes(model: nn.Module, repeats: Repeats) -> tuple[Pass, ...]:
    """The passes in order; a comment says where the order matters."""
    return (
        # On the graph of torch.
        no_grad_regions,  # before functionalization, which forgets where gradients were off
        in_place_arithmetic,  # before functionalization, which is not needed then
        functionalization,  # before signature_check: only now the signature tells what is written to
        signature_check,
        partial(region_inlining, model=model),  # before all that look at one flat graph
        assertion_removal,
        contiguous_removal,
        overwrite_removal,
        complex_writes,
        embedding_bags,
        identity_indexing,
        literal_copies,  # before call_splitting, which asks in which call a literal was
        ungraded_operands,
        late_experts,
        linear_copies,  # after contiguous_removal, which would take them out
        # On calls of bodies: what is repeated is there once.
        partial(call_splitting, model=model, repeats=repeats),
        causal_masks,  # before dead_code: what made a mask is read by nothing then
        grouped_heads,  # after causal_masks, for attention that has no mask any more
        dead_code,
        canonical_order,  # after dead_code: an operator's place is that of its first reader
        node_names,  # after canonical_order: numbers go by execution order
        constant_order,
    )
