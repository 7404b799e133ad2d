"""Rematerialization: what a block saves for backward, what it recomputes instead, and the bytes of each choice.

A block's operators turn into a slice that backward runs again for any choice of what is kept (``backward_slice``), such
choices into levels and amounts over all instances (``levels``), and levels into bytes that the problem counts
(``saved_accounting``). The search, the memory simulation and the emitted program all read the same slice.
"""
