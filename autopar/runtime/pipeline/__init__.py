"""Pipelined and micro-batched steps: executes a schedule's actions and passes tensors between stages.

A global batch turns into micro-batches, the actions of a schedule into forwards and backwards of stages (``executor``,
``actions``), and what leaves one stage into what another receives (``p2p``). Order is data from
:mod:`planner.solve.pipeline.schedule`; a process that has no pipeline runs the same code with one stage.
"""
