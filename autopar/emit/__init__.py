"""From an assignment to programs that a rank runs, and to the distributed module that holds them.

Every distinct block of a plan becomes one small ``torch.fx`` program with local shapes and collectives; stages of a
pipeline become lists of them. ``build`` joins them with parameters into a
:class:`~autopar.runtime.module.ParallelModule`.
"""
