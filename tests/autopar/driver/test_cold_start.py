"""What the first plan of a process waits for."""

import subprocess
import sys

PLANNED = """
import sys, torch, autopar
model = torch.nn.Linear(8, 8)
plan = autopar.plan(model, autopar.ClusterSpec.local(2), example_args=(torch.zeros(4, 8),))
str(plan)
print(sorted({name for name in sys.modules if name in WATCHED}))
"""
NEEDLESS = (
    "autopar.emit.build",
    "autopar.runtime.module",
    "ortools.math_opt",
    "planner.sizes.closed_form",
    "spmd_types",
)
"""What only runs a plan, solves hard problems, or writes formulas."""


def test_a_plan_imports_nothing_that_it_does_not_use() -> None:
    code = PLANNED.replace("WATCHED", repr(NEEDLESS))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
