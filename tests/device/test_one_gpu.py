"""On a GPU: a parallelized model on nccl with one rank trains as the original does."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch

pytestmark = pytest.mark.device


@pytest.fixture
def nccl():
    """One rank on nccl, as torchrun would set it up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(environment, MASTER_PORT=str(port))
    yield
    torch.distributed.destroy_process_group()


def test_training_steps_match_the_original(nccl):
    from transformers import GPT2Config, GPT2LMHeadModel

    import autopar

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = GPT2LMHeadModel(config).cuda()
    original = copy.deepcopy(model)
    ids = torch.randint(0, 512, (4, 64), device="cuda")
    batch = {"input_ids": ids, "labels": ids.clone()}
    cluster = autopar.ClusterSpec.preset("workstation", devices=1)
    pmodel = autopar.parallelize(model, cluster, example_kwargs=batch)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (pmodel, original))
    for _ in range(3):
        loss, expected = pmodel(**pmodel.shard(batch)).loss, original(**batch).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for loss_, optimizer in ((loss, ours), (expected, theirs)):
            optimizer.zero_grad()
            loss_.backward()
            optimizer.step()
    for name, value in pmodel.full_state_dict().items():
        torch.testing.assert_close(value, original.state_dict()[name].cpu(), rtol=1e-4, atol=1e-5)
