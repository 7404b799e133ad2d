"""What an installed wheel must do in a bare environment: plan, save, show and verify, without an extra installed.

Run by ``make smoke`` in an empty folder, so that nothing is imported from the repository.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn

import autopar

EXTRAS = ("transformers", "accelerate", "pytest", "hypothesis", "mypy")

installed = Path(autopar.__file__).resolve()
assert installed.is_relative_to(sysconfig.get_path("purelib")), f"autopar was imported from {installed}"
assert importlib.metadata.version("autopar") == autopar.__version__
brought = [name for name in EXTRAS if importlib.util.find_spec(name)]
assert not brought, f"a bare environment has no {brought}"

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8)).double()
batch = (torch.randn(16, 32, dtype=torch.float64),)
cluster = autopar.ClusterSpec.preset("dgx-h100")
plan = autopar.plan(model, cluster, example_args=batch, pin={"data": 2, "tensor": 4})
autopar.verify(model, plan, example_args=batch)
plan.save("plan.json")
plan.save_html("plan.html")
command = [Path(sys.executable).with_name("autopar"), "show", "plan.json"]
shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
assert shown.splitlines() == str(autopar.Plan.load("plan.json")).splitlines(), shown
print(f"autopar {autopar.__version__} plans, verifies and shows without extras")
