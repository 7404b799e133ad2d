"""What the software that runs a step fuses and overlaps, by name, where it is not as autopar's own runtime does it.

A cluster file states it to *imitate* another stack: so that a published run is predicted as it ran.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.base.units import FROZEN, Described

Overlap = Literal["gathers", "tensor"]


class Software(Described):
    """The stack that runs the steps.

    Attributes:
        compile: which blocks are compiled, so that what is bound by memory runs in the kernels that inductor fuses it
            to (:mod:`planner.ops.fusion`): ``layers``, those that repeat, or ``all``.
        overlaps: what is communicated beside products: ``gathers`` of parameters, beside the block before, as FSDP
            prefetches them; ``tensor``: what tensor parallelism with a sharded sequence gathers and scatters, piece by
            piece beside the product that needs or makes it (asynchronous tensor parallelism). Of ``n`` pieces one is
            waited for.
        optimizer: ``fused`` passes once over parameters, gradients and state; ``foreach`` is one kernel for each
            arithmetic operation of an update.
        float8: whether linear layers multiply in float8 with one scale for each tensor, found anew for each product.
    """

    compile: Literal["layers", "all"] | None = Field(default=None, examples=["layers"])
    overlaps: Annotated[tuple[Overlap, ...], FROZEN] = Field(default=(), examples=["[gathers, tensor]"])
    optimizer: Literal["fused", "foreach"] = Field(default="fused", examples=["foreach"])
    float8: bool = Field(default=False, examples=["true"])


OWN = Software()
"""autopar's runtime, as far as plans do not decide."""
