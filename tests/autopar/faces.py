"""What the ranks of ``test_processes`` look at of a parallel module from outside: its face and its files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel

from autopar import PlanWarning
from planner.base.errors import InputError
from tests.autopar.workers import batch_of, loss_fn, model_of, parallel, same, same_norms


def has_the_face_of_its_model(document: Mapping[str, Any], directory: str) -> None:
    """A step of training beside one process's, and then all that a user may ask of the module."""
    model, reference, batch = model_of("gpt2"), model_of("gpt2"), batch_of("gpt2")
    pmodel = parallel(model, document, batch)
    assert pmodel.to("cpu") is pmodel  # with the same parameters, whose gradients know those of other stages
    with pytest.raises(InputError, match=r"is of torch.float64 on cpu.* would be of torch.float32"):
        pmodel.float()
    with pytest.raises(InputError, match=r"cannot be pickled.*save_checkpoint"):
        torch.save(pmodel, io.BytesIO())
    part = pmodel.transformer.ln_f
    for change in (part.eval, lambda: setattr(part, "forward", print), lambda: pmodel.add_module("lm_head", part)):
        with pytest.raises(InputError, match=r"has no mode of its own|cannot be set on the parallel module"):
            change()

    seen: list[Any] = []
    handles = [
        pmodel.register_forward_pre_hook(lambda module, args: seen.append("in")),
        pmodel.register_forward_hook(lambda module, args, loss: seen.append(loss.detach()) or loss * 3),
        pmodel.register_full_backward_hook(lambda module, given, came: seen.append("back")),
    ]
    (pmodel(**pmodel.shard(batch))).backward()
    (loss_fn(reference(batch["input_ids"]), batch) * 3).backward()
    for handle in handles:
        handle.remove()
    assert seen[0] == "in" and seen[2] == "back" and len(seen) == 3
    same_norms(pmodel, reference)
    for module in (pmodel, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()

    assert pmodel.config is model.config and pmodel.dtype == torch.float64 and pmodel.transformer.drop.p == 0.0
    assert repr(pmodel).startswith("ParallelModule(GPT2LMHeadModel, 28,032 parameters, ")
    assert not hasattr(pmodel, "generate") and not hasattr(pmodel, "no_such_thing")
    with pytest.warns(PlanWarning, match=r"pmodel.module is the original GPT2LMHeadModel.*gather_module"):
        assert pmodel.module is model
    assert torch.equal(model.lm_head.weight, model_of("gpt2").lm_head.weight)  # not trained

    pmodel.save_pretrained(directory, max_shard_size="60KB")
    reloaded, full = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float64), pmodel.full_state_dict()
    assert (
        len(list(Path(directory).glob("*.safetensors"))) > 1 and (Path(directory) / "generation_config.json").exists()
    )
    assert pmodel.gather_module() is model
    for name, expected in reference.state_dict().items():
        same(name, full[name], expected)
        assert torch.equal(full[name], reloaded.state_dict()[name]), name
        assert torch.equal(full[name], model.state_dict()[name]), name
    prompt = batch["input_ids"][:1, :4]
    assert torch.equal(model.generate(prompt, max_new_tokens=3), reloaded.generate(prompt, max_new_tokens=3))
    with pytest.raises(InputError, match=r"rank 0 cannot save.*it is a file"):
        pmodel.save_pretrained(Path(directory) / "config.json")
    dist.barrier()
