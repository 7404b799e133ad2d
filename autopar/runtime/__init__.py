"""What runs the plan: local forms of operators, modules, pipelines, chunks. It decides nothing.

Emitted programs call its functions: parameters become tensors that a block can use (``spmd``), operators that must
communicate do (``layers``), backward recomputes and hands gradients on (``autograd``, ``optim``), chunks move by the
transfer schedule (``offload``), and stages run their actions (``pipeline``). All of it obeys what the planner wrote
down, so that what a step does can be predicted to the call and to the byte; :mod:`autopar.runtime.module` is its front
door.
"""
