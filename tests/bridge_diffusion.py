"""Megatron Bridge's diffusion models, run without data, beside the inventory.

A process of its own (``python tests/bridge_diffusion.py CASE ...``), as ``bridge_rehearsal.py`` is. Prints one JSON line
a case.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import torch
from bridge_rehearsal import start

WAN = {"num_layers": 2, "hidden_size": 1536, "ffn_hidden_size": 8960, "num_attention_heads": 12}
#: Case -> (sizes of the provider, parallel sizes, whether layers are recomputed, frames, height and width in patches).
CASES: dict[str, Any] = {
    "Wan": (WAN, {}, False, (4, 16, 24)),
    "Wan, TP 2": (WAN, {"tensor_model_parallel_size": 2}, False, (4, 16, 24)),
    "Wan, CP 2": (WAN, {"context_parallel_size": 2}, False, (4, 16, 24)),
    "Wan, TP 2 CP 4 SP": (
        WAN, {"tensor_model_parallel_size": 2, "context_parallel_size": 4, "sequence_parallel": True}, False, (4, 16, 24)
    ),
}


def wan(sizes: dict[str, Any], parallel: dict[str, Any], recompute: bool) -> Any:
    from megatron.bridge.diffusion.models.wan.wan_provider import WanModelProvider

    provider = WanModelProvider(**sizes, **parallel, perform_initialization=False, bf16=True,
                                params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    if recompute:
        provider.recompute_granularity, provider.recompute_method = "full", "uniform"
        provider.recompute_num_layers = 1
    return provider


def run_of(provider: Any) -> Any:
    from bridge_memory import (AttentionSpec, BatchSpec, ImplementationSpec, LayerSpec, MLPSpec, ModelSpec,
                               ParallelSpec, RunSpec)
    layer = LayerSpec(
        mixer=AttentionSpec(num_attention_heads=16, num_query_groups=8, kv_channels=64),
        ffn=MLPSpec(ffn_hidden_size=2048, gated=True),
    )
    model = ModelSpec(name="text", model_type="qwen3", hidden_size=1024, vocab_size=4096, layers=(layer,) * 2)
    p = provider
    world = p.tensor_model_parallel_size * p.context_parallel_size
    return RunSpec(
        model=model,
        parallel=ParallelSpec(world_size=world, tensor_model_parallel_size=p.tensor_model_parallel_size,
                              context_parallel_size=p.context_parallel_size, sequence_parallel=p.sequence_parallel),
        batch=BatchSpec(seq_length=4096, packed_sequences=True),
        implementation=ImplementationSpec(attention_backend="fused"),
    )


def measured(name: str) -> Any:
    from bridge_memory.rehearsal.passes import Leave, measured_passes
    from bridge_memory.rehearsal.rank import on_rank
    from bridge_memory.rehearsal.tracker import Tracker
    from megatron.core.packed_seq_params import PackedSeqParams

    sizes, parallel, recompute, (f, h, w) = CASES[name]
    provider = wan(sizes, parallel, recompute)
    run = run_of(provider)
    cp = provider.context_parallel_size
    with on_rank(run, (cp - 1) * provider.tensor_model_parallel_size):
        provider.finalize()
        model = provider.provide().to(torch.bfloat16).to("meta").train()
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        for p in model.parameters():
            p.main_grad = torch.empty(p.shape, dtype=torch.float32, device="meta")
            p.grad_added_to_main_grad = False
        tokens, text = f * h * w, provider.text_len
        tracker = Tracker([*(p.main_grad for p in model.parameters()), *model.parameters(), *model.buffers()])
        with tracker.watching(model):
            x = torch.empty(tokens // cp, 1, 64, dtype=torch.bfloat16, device="meta")
            context = torch.empty(text // cp, 1, 4096, dtype=torch.bfloat16, device="meta")
            t = torch.empty(1, dtype=torch.bfloat16, device="meta")
            ends = torch.tensor([0, tokens], dtype=torch.int32)
            ends_kv = torch.tensor([0, text], dtype=torch.int32)
            packed = {
                "self_attention": PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv=ends,
                                                  cu_seqlens_kv_padded=ends, qkv_format="thd"),
                "cross_attention": PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv=ends_kv,
                                                   cu_seqlens_kv_padded=ends_kv, qkv_format="thd"),
            }
            tracker.name_alive("batch")

            def forward() -> torch.Tensor:
                out = model(x, torch.tensor([[f, h, w]]), t, context, packed)
                end: torch.Tensor = Leave.apply(out)
                return end

            record = measured_passes(tracker, forward)
    return shapes, record


def main(names: list[str]) -> None:
    start()
    logging.disable(logging.CRITICAL)
    for name in names or CASES:
        shapes, record = measured(name)
        for n, s in shapes.items():
            print(n, s)
        for t in record.saved:
            print(t)
        print("held", record.held, "\n", record.forward_peak, record.backward_peak, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
