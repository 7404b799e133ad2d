"""The captured program as values: ATen operators, tensor metadata and calls, without a class of torch.fx in the way.

A ``torch.fx`` graph becomes a :class:`~autopar.graph.program.Program` that passes read and rewrite; helpers on
operators and tensors stand beside it. Capture produces it, emission consumes it, and neither needs the other.
"""
