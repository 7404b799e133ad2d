"""Plans what ``docs/plan.png`` is a screenshot of: ``python docs/plan_picture.py plan.html`` writes that page.

It takes about a minute, and neither weights nor GPUs.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

CONFIG = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)

if __name__ == "__main__":
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG).bfloat16()
        ids = torch.zeros(16, 8192, dtype=torch.long)
    plan = autopar.plan(
        model,
        autopar.ClusterSpec.preset("dgx-h100", nodes=4),
        example_kwargs={"input_ids": ids, "labels": ids},
        optimizer_bytes_per_element=12,
    )
    plan.save_html(sys.argv[1])
