"""autopar: automatic parallelism for PyTorch.

``autopar.parallelize(model, cluster)`` turns a model written for one device into one that trains on a
cluster; ``autopar.plan`` only plans, without devices or a process group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.arrays.array import array
    from autopar.checkpoint.elastic import ElasticRun
    from autopar.checkpoint.export import export_safetensors
    from autopar.checkpoint.live import hold, reshard
    from autopar.checkpoint.load import load_checkpoint
    from autopar.checkpoint.save import save_checkpoint
    from autopar.driver.further import plan_inputs
    from autopar.driver.lint import lint
    from autopar.driver.parallelize import parallelize
    from autopar.driver.plan import evaluate, plan
    from autopar.driver.replan import replan
    from autopar.functions.register import register
    from autopar.operators.delink import delink
    from autopar.operators.experts import experts
    from autopar.runtime.optim.lamb import Lamb
    from autopar.runtime.optim.lars import Lars
    from autopar.runtime.optim.norms import whole_norms
    from autopar.tables.cached_embedding_bag import CachedEmbeddingBag
    from autopar.verification.verify import verify
    from planner.base.errors import (
        AutoparError,
        CaptureError,
        ClusterError,
        ConfigError,
        InfeasibleError,
        InputError,
        PinError,
        PlanError,
        PlanWarning,
    )
    from planner.cost.cluster import ClusterSpec
    from planner.plan.plan import Plan
    from planner.tables.cached_rows import predict_cache
    from planner.tables.embedding_table import EmbeddingTable
    from planner.tables.place_tables import place_tables

_LAZY = {
    "AutoparError": "planner.base.errors",
    "CachedEmbeddingBag": "autopar.tables.cached_embedding_bag",
    "CaptureError": "planner.base.errors",
    "ClusterError": "planner.base.errors",
    "ClusterSpec": "planner.cost.cluster",
    "ConfigError": "planner.base.errors",
    "ElasticRun": "autopar.checkpoint.elastic",
    "EmbeddingTable": "planner.tables.embedding_table",
    "InfeasibleError": "planner.base.errors",
    "InputError": "planner.base.errors",
    "Lamb": "autopar.runtime.optim.lamb",
    "Lars": "autopar.runtime.optim.lars",
    "PinError": "planner.base.errors",
    "Plan": "planner.plan.plan",
    "PlanError": "planner.base.errors",
    "PlanWarning": "planner.base.errors",
    "array": "autopar.arrays.array",
    "delink": "autopar.operators.delink",
    "evaluate": "autopar.driver.plan",
    "experts": "autopar.operators.experts",
    "export_safetensors": "autopar.checkpoint.export",
    "hold": "autopar.checkpoint.live",
    "lint": "autopar.driver.lint",
    "load_checkpoint": "autopar.checkpoint.load",
    "parallelize": "autopar.driver.parallelize",
    "place_tables": "planner.tables.place_tables",
    "plan": "autopar.driver.plan",
    "plan_inputs": "autopar.driver.further",
    "predict_cache": "planner.tables.cached_rows",
    "register": "autopar.functions.register",
    "replan": "autopar.driver.replan",
    "reshard": "autopar.checkpoint.live",
    "save_checkpoint": "autopar.checkpoint.save",
    "verify": "autopar.verification.verify",
    "whole_norms": "autopar.runtime.optim.norms",
}

__all__ = [
    "AutoparError",
    "CachedEmbeddingBag",
    "CaptureError",
    "ClusterError",
    "ClusterSpec",
    "ConfigError",
    "ElasticRun",
    "EmbeddingTable",
    "InfeasibleError",
    "InputError",
    "Lamb",
    "Lars",
    "PinError",
    "Plan",
    "PlanError",
    "PlanWarning",
    "array",
    "delink",
    "evaluate",
    "experts",
    "export_safetensors",
    "hold",
    "lint",
    "load_checkpoint",
    "parallelize",
    "place_tables",
    "plan",
    "plan_inputs",
    "predict_cache",
    "register",
    "replan",
    "reshard",
    "save_checkpoint",
    "verify",
    "whole_norms",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``import autopar`` is instant."""
    if name not in _LAZY:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, whether or not they have been imported yet."""
    return __all__
