"""Moving: what it takes to go on under another plan, with other ranks, and whether the best plan there is worth it.

``(plan, plan, which rank was which) -> bill``: of every parameter, its optimizer state and every buffer, the part that
a rank holds under either plan; what it keeps, what others send it, and what only a checkpoint still has.
"""
