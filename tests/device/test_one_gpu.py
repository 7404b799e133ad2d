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


@pytest.mark.parametrize("offload, micro_batches", [("host", 1), ("auto", 1), ("host", 2), ("auto", 2)])
def test_model_data_on_the_host_trains_alike_within_the_budget(nccl, offload, micro_batches):
    import autopar
    from benchmarks.gpt import GPT, Shape
    from planner.cost.cluster import ClusterSpec

    torch.manual_seed(0)
    shape = Shape(layers=6, hidden=256, heads=4, vocab=512, batch=4, sequence=64)
    model = GPT(shape).double()
    original = copy.deepcopy(model).cuda()
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.sequence), device="cuda")
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    spec = ClusterSpec.preset("workstation", devices=1)
    data_bytes = 32 * sum(p.numel() for p in model.parameters())
    device = spec.device.model_copy(update={"memory_bytes": data_bytes // 2})
    cluster = spec.model_copy(update={"device": device})
    pin = {"offload": offload, "micro_batches": micro_batches}
    pmodel = autopar.parallelize(model, cluster, example_kwargs=batch, pin=pin, optimizer_bytes_per_element=16)
    assert all(p.device.type == "cpu" for p in pmodel.parameters()) == (offload == "host")
    ours, theirs = pmodel.optimizer(torch.optim.AdamW, lr=1e-3), torch.optim.AdamW(original.parameters(), lr=1e-3)
    for _ in range(3):
        loss, expected = pmodel(**pmodel.shard(batch)), original(**batch)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for loss_, optimizer, m in ((loss, ours, pmodel), (expected, theirs, original)):
            optimizer.zero_grad()
            loss_.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
        moved = {way: n for (_, way), n in pmodel.offload.transfers.table.bytes_moved.items() if n}
        assert {way: n for way, n in pmodel.offload.transfers.bytes_moved.items() if n} == moved
    assert pmodel.offload.transfers.arena.high_water_bytes <= pmodel.offload.transfers.arena.budget_bytes
    for name, value in pmodel.full_state_dict().items():
        torch.testing.assert_close(value, original.state_dict()[name].cpu(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "make, options",
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_masters_step_as_written_out_by_hand(make, options):
    """Bit for bit, in pieces; rows that are changed in between begin anew."""
    from autopar.runtime.optim.master_weights import MASTER, with_masters

    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, device="cuda").bfloat16()) for s in ((7, 5), (), (64, 64), (33,))]
    masters = [parameter.detach().float() for parameter in parameters]
    optimizer, by_hand = (
        with_masters(make, torch.float32, 1000)(parameters, lr=1e-2, **options),
        make(masters, **options),
    )
    by_hand.param_groups[0]["lr"] = 1e-2
    for step in range(6):
        if step == 3:
            parameters[2].data[3:9].mul_(1.5)
            masters[2][3:9] = parameters[2].data[3:9].float()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.grad = torch.randn_like(parameter)
            master.grad = parameter.grad.float()
        optimizer.step()
        by_hand.step()
        for parameter, master in zip(parameters, masters, strict=True):
            assert torch.equal(optimizer.state[parameter][MASTER], master)
            assert torch.equal(parameter, master.bfloat16())


def test_a_model_in_bfloat16_trains_by_masters(nccl):
    """Its losses are about those of the same model in float32; parameters are the roundings of their masters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    import autopar

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).cuda()
    original = copy.deepcopy(model)
    ids = torch.randint(0, 512, (4, 64), device="cuda")
    batch = {"input_ids": ids, "labels": ids.clone()}
    cluster = autopar.ClusterSpec.preset("workstation", devices=1)
    pmodel = autopar.parallelize(model.bfloat16(), cluster, example_kwargs=batch, optimizer_bytes_per_element=12)
    ours = pmodel.optimizer(torch.optim.AdamW, lr=1e-3, master_dtype=torch.float32)
    theirs = torch.optim.AdamW(original.parameters(), lr=1e-3)
    for _ in range(5):
        loss, expected = pmodel(**pmodel.shard(batch)).loss, original(**batch).loss
        torch.testing.assert_close(loss.float(), expected, rtol=5e-3, atol=0)
        for loss_, optimizer in ((loss, ours), (expected, theirs)):
            optimizer.zero_grad()
            loss_.backward()
            optimizer.step()
    for parameter in pmodel.parameters():
        master = ours.state[parameter]["master"].to_local()
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), parameter.to_local())


@pytest.mark.parametrize("side", ["ours", "fsdp2", "fsdp2, keeping"])
def test_both_sides_of_the_search_for_the_largest_model_take_steps(side):
    from dataclasses import replace

    from benchmarks import largest
    from planner.cost.cluster import ClusterSpec

    cluster = ClusterSpec.preset("workstation", devices=1)
    shape = replace(largest.WIDE, hidden=512, heads=8, vocab=1024)
    job = largest.Job(2**30, side, 4)
    found = largest.in_its_own_process(largest.Search(cluster, shape, (2**30,)), job, 200.0)
    assert not found.short_of, found.said
    assert 0 < found.peak_bytes < 2**30 and len(found.seconds) == largest.STEPS and 0 < found.loss < 10
    assert found.host_bytes > 0 and (found.predicted_s > 0) == (side == "ours")
