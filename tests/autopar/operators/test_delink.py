"""Delinking: the same loss before and after, and gradients of the copies that add up to the shared one's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from planner.base.errors import InputError
from tests.autopar.models import MODELS, llama

WIDENET_LAYERS = 3


def test_the_loss_stays_and_gradients_add_up() -> None:
    model, batch = MODELS["widenet"].build()
    model.double()
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    before = model(**batch)
    before.backward()
    shared = {name: parameter.grad for name, parameter in model.named_parameters() if "norm" not in name}
    names = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert autopar.delink(model) is model
    assert all(parameter.grad is None for parameter in model.parameters())
    after = model(**batch)
    after.backward()
    assert after.item() == before.item()
    own = dict(model.named_parameters())
    assert {name: parameter.numel() for name, parameter in own.items()} == names, "each has its own, under its name"
    for name, wanted in shared.items():
        layers = [own[name.replace("layers.0.", f"layers.{i}.")].grad for i in range(WIDENET_LAYERS)]
        found = sum(layers) if "layers.0." in name else own[name].grad
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        own["layers.1.experts.up"].add_(1)
    assert not torch.equal(own["layers.1.experts.up"], own["layers.2.experts.up"])


def test_a_parameter_in_modules_of_one_class() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    autopar.delink(model)
    assert model[2].weight is not model[0].weight and torch.equal(model[2].weight, model[0].weight)


def test_tied_embeddings_stay_tied() -> None:
    model = llama(tie_word_embeddings=True)
    model.model.layers[1] = model.model.layers[0]
    autopar.delink(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[1].mlp.up_proj.weight is not model.model.layers[0].mlp.up_proj.weight


def test_tables_of_encoder_and_decoder_stay_tied() -> None:
    model = MODELS["t5"].build()[0]
    model.encoder.block[1] = model.encoder.block[0]
    autopar.delink(model)
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    assert model.encoder.block[1] is not model.encoder.block[0]


def test_a_model_that_shares_nothing_says_so() -> None:
    with pytest.raises(InputError, match=r"Sequential has no layers that share parameters(.|\n)*nn.ModuleList"):
        autopar.delink(nn.Sequential(nn.Linear(4, 4)))
