"""What other libraries call what a pin decides, for errors about names that no pin has."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_WAYS = {
    "'data'": "dp ddp data_parallel data_parallel_size dp_size dp_shard num_replicas batch",
    "'data' with 'zero': 3, or 'zero': 3 alone": "fsdp fsdp2 fully_shard full_shard sdp",
    "'replicate' and 'data' with 'zero': 3": "hsdp hybrid_shard",
    "'replicate'": "dp_replicate",
    "'tensor'": "tp mp model model_parallel tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
    "'tensor': [row, column]": "2d optimus summa row column tensor_2d",
    "'tensor': [row, column] and 'depth'": "2.5d 2p5d tesseract",
    "'tensor': [input, output, weight]": "3d input output weight tensor_3d",
    "'context'": "cp ring ulysses context_parallel context_parallel_size sequence seq cp_size",
    "'sequence_parallel': True beside 'tensor' (norms and residuals), or 'context' (attention)": "sp seq_parallel",
    "'expert'": "ep moe experts expert_parallel expert_parallel_size expert_model_parallel_size ep_size",
    "'expert_tensor'": "etp expert_tensor_parallel expert_tensor_parallel_size expert_tp etp_size",
    "'pipeline'": "pp stages num_stages pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size",
    "'micro_batches', how many of them a step has": "mbs mb micro_batch micro_batch_size microbatch microbatches "
    "num_micro_batches num_microbatches gradient_accumulation gradient_accumulation_steps grad_accum ga acc_steps",
    "'virtual_stages'": "vpp vp virtual_pipeline virtual_pipeline_model_parallel_size interleave chunks",
    "'zero'": "zero1 zero2 zero3 zero_stage stage deepspeed sharding_strategy",
    "'recompute'": "ac checkpoint checkpointing activation_checkpointing gradient_checkpointing "
    "recompute_granularity remat rematerialization",
    "'offload': 'host'": "cpu_offload offload_optimizer offload_params host cpu",
    "'offload': 'disk'": "nvme disk nvme_offload",
    "'schedule'": "pipeline_schedule 1f1b gpipe zero_bubble",
}
SYNONYMS = {name: way for way, names in _WAYS.items() for name in names.split()}
"""Lower-case name -> the pin to take, in words."""


def meant(name: object, known: Collection[str]) -> str:
    """``"for 'tp' pin 'tensor'"``; empty where no pin is like it."""
    text = str(name).lower().replace("-", "_")
    if text in SYNONYMS:
        return f"for {name!r} pin {SYNONYMS[text]}"
    close = difflib.get_close_matches(text, known, n=1)
    return f"did you mean {close[0]!r}?" if close else ""
