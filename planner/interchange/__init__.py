"""Configurations of other tools: one neutral description of a parallel step, written in and read from each format.

:mod:`planner.interchange.parallelism` is that description. A format is a module of its own with two functions,
``write(description) -> text`` and ``read(text) -> description``, and a list of limits: what its program cannot say or
refuses, and what comes nearest. Exporters round by these limits (:mod:`planner.plan.export`), the linter reports them
(:mod:`planner.interchange.lint`).
"""
