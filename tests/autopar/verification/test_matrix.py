"""Part of the zoo: every model and every recipe, each at least twice, against the original in float64.

``make zoo`` runs the whole matrix.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.autopar.matrix import RECIPES, check
from tests.autopar.models import MODELS

BY_NAME = {(recipe.sizes, recipe.name): recipe for recipe in RECIPES}

CELLS = [
    ("mlp", "2", "search, slow devices"),
    ("mlp", "2x2", "random 1"),
    ("mlp", "2x4", "data x tensor"),
    ("functional-gpt", "2", "tensor"),
    ("functional-gpt", "4", "random 0"),
    ("functional-gpt", "2x2", "context x tensor"),
    ("functional-gpt", "2x4", "data x tensor + sequence"),
    ("gpt2", "2x2", "data x tensor, zero 3"),
    ("gpt2", "4", "context"),
    ("bloom", "2x2", "data x tensor"),
    ("bloom", "2", "random 0"),
    ("llama", "2x2", "data x context"),
    ("llama", "2x4", "search, slow devices"),
    ("mixtral", "2x2", "random 0"),
    ("mixtral", "2x2", "expert x tensor"),
    ("qwen2-moe", "2x2", "data x tensor, zero 3"),
    ("qwen3-moe", "4", "tensor + sequence"),
    ("qwen3-moe", "2x2", "data x expert"),
    ("deepseek-v3", "2x4", "data x expert"),
    ("deepseek-v3", "2x2", "expert x tensor"),
    ("qwen2-moe", "2x4", "expert x tensor"),
    ("deepseek-v3", "2", "context"),  # tokens of several sequences whose strips do not live
    ("gpt-oss", "2x2", "data x tensor"),
    ("gpt-oss", "2", "expert"),
    ("bert", "4", "search"),
    ("bert", "2", "context"),
    ("t5", "2", "tensor + sequence"),
    ("t5", "2x2", "context x tensor"),
    ("vit", "2", "data, zero 3"),
    ("vit", "2", "random 0"),
    ("resnet", "4", "data"),
    ("resnet", "2", "random 1"),
    ("encoder", "2", "tensor"),
    ("encoder", "2x2", "data x tensor + sequence"),
    ("shared-layers", "2x4", "data x context"),
    ("shared-layers", "4", "data, zero 3"),
    ("widenet", "4", "expert"),
    ("widenet", "2x2", "data x tensor, zero 3"),
    ("unknown-op", "4", "data"),
    ("unknown-op", "2", "search"),
]


@pytest.mark.parametrize("model,sizes,recipe", CELLS)
def test_the_plan_computes_what_the_model_computes(model: str, sizes: str, recipe: str) -> None:
    cell = check(model, BY_NAME[sizes, recipe])
    assert cell.status == "equal", str(cell)


@pytest.mark.parametrize("model", [name for name, model in MODELS.items() if not model.attends])
def test_a_recipe_that_does_not_apply_says_so(model: str) -> None:
    cell = check(model, BY_NAME["2", "context"])
    assert cell.status == "n/a"
    assert "pin 'context'" in cell.why


def test_this_part_covers_every_model_and_every_recipe_twice() -> None:
    models = Counter(model for model, _, _ in CELLS)
    recipes = Counter(recipe for _, _, recipe in CELLS)
    assert all(models[name] >= 2 for name in MODELS)
    assert all(recipes[recipe.name] >= 2 for recipe in RECIPES)
