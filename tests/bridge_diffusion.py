"""Megatron Bridge's diffusion models, run without data, beside the inventory.

A process of its own (``python tests/bridge_diffusion.py CASE ...``), as ``bridge_rehearsal.py`` is. Prints one JSON line
a case.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bridge_rehearsal import start

WAN = {"num_layers": 3, "hidden_size": 1536, "ffn_hidden_size": 8960, "num_attention_heads": 12}
WIDE = {
    "num_layers": 2, "hidden_size": 5120, "ffn_hidden_size": 13824, "num_attention_heads": 40, "crossattn_emb_size": 5120
}  # fmt: skip
#: As the recipe of 14 billion parameters divides it.
ALL = {"tensor_model_parallel_size": 2, "context_parallel_size": 4, "sequence_parallel": True}
#: Case -> (sizes of the provider, parallel sizes, whether layers are recomputed, frames, height and width in patches).
CASES: dict[str, Any] = {
    "Wan": (WAN, {}, False, (4, 16, 24)),
    "Wan, TP 2": (WAN, {"tensor_model_parallel_size": 2}, False, (4, 16, 24)),
    "Wan, CP 4": (WAN, {"context_parallel_size": 4}, False, (8, 16, 24)),
    "Wan, TP 2 CP 4 SP": (WAN, ALL, False, (8, 16, 24)),
    "Wan, wide, TP 4 SP": (
        WIDE, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, False, (6, 32, 20)
    ),
    "Wan, wide, TP 2 CP 4 SP, recomputed": (WIDE, ALL, True, (24, 52, 30)),
    "Wan, recomputed": (WAN, {}, True, (6, 32, 20)),
}


def wan(sizes: dict[str, Any], parallel: dict[str, Any], recompute: bool) -> Any:
    from megatron.bridge.diffusion.models.wan.wan_provider import WanModelProvider

    provider = WanModelProvider(**sizes, **parallel, perform_initialization=False, bf16=True,
                                params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    if recompute:
        provider.recompute_granularity, provider.recompute_method = "full", "uniform"
        provider.recompute_num_layers = 1
    return provider


def run_of(provider: Any, tokens: int) -> Any:
    from bridge_memory import (
        AttentionSpec,
        BatchSpec,
        DiffusionSpec,
        ImplementationSpec,
        LayerSpec,
        MLPSpec,
        ModelSpec,
        ParallelSpec,
        RecomputeSpec,
        RunSpec,
    )

    p = provider
    heads = p.num_attention_heads
    attention = AttentionSpec(heads, heads, p.hidden_size // heads, add_qkv_bias=True, add_output_bias=True)
    mlp = MLPSpec(p.ffn_hidden_size, gated=False, activation="gelu", add_bias=True)
    model = ModelSpec(
        name="video", model_type="wan", hidden_size=p.hidden_size, vocab_size=128,
        layers=(LayerSpec(attention, mlp, arrangement="wan"),) * p.num_layers,
        diffusion=DiffusionSpec(text_width=p.crossattn_emb_size, head_dim=attention.kv_channels),
    )
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    return RunSpec(
        model=model,
        parallel=ParallelSpec(
            world_size=p.tensor_model_parallel_size * p.context_parallel_size,
            tensor_model_parallel_size=p.tensor_model_parallel_size, context_parallel_size=p.context_parallel_size,
            sequence_parallel=p.sequence_parallel,
        ),
        batch=BatchSpec(seq_length=tokens, packed_sequences=True),
        recompute=full if p.recompute_granularity else RecomputeSpec(),
        implementation=ImplementationSpec(
            attention_backend="fused", apply_rope_fusion=True, bias_activation_fusion=True,
            gradient_accumulation_fusion=p.gradient_accumulation_fusion,
        ),
    )


@contextmanager
def no_values() -> Iterator[None]:
    """Tensors without data are zero where a loss is logged or checked, and indices of this rank's tokens are made."""
    from megatron.bridge.diffusion.models.wan import utils

    from bridge_memory.rehearsal.patches.replace import replaced

    item, truth = torch.Tensor.item, torch.Tensor.__bool__

    def indices(ends: Any, *, total_tokens: int, cp_group: Any, device: Any) -> Any:
        return torch.empty(total_tokens // cp_group.size(), dtype=torch.int64, device=device)

    with (
        replaced(torch.Tensor, "item", lambda t: 0.0 if t.is_meta else item(t)),
        replaced(torch.Tensor, "__bool__", lambda t: False if t.is_meta else truth(t)),
        replaced(utils, "get_thd_cp_partition_indices", indices),
    ):
        yield


def measured(name: str) -> Any:
    from bridge_memory.rehearsal.passes import Leave, measured_passes
    from bridge_memory.rehearsal.rank import on_rank
    from bridge_memory.rehearsal.tracker import Tracker
    from megatron.bridge.diffusion.models.wan.wan_step import WanForwardStep
    from megatron.core.packed_seq_params import PackedSeqParams

    sizes, parallel, recompute, (f, h, w) = CASES[name]
    provider = wan(sizes, parallel, recompute)
    run = run_of(provider, f * h * w)
    cp = provider.context_parallel_size
    with on_rank(run, (cp - 1) * provider.tensor_model_parallel_size):
        provider.finalize()
        model = provider.provide().to(torch.bfloat16).to("meta").train()
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        for p in model.parameters():
            p.main_grad = torch.empty(p.shape, dtype=torch.float32, device="meta")
            p.grad_added_to_main_grad = False
            # DDP adds it to the main gradient and frees it.
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        tokens, text = f * h * w, provider.text_len
        latents = torch.empty(tokens, 1, 64, device="meta")
        context = torch.empty(text, 1, 4096, device="meta")
        mask = torch.empty(tokens, 1, dtype=torch.bfloat16, device="meta")
        tracker = Tracker([latents, context, mask, *(p.main_grad for p in model.parameters()), *model.parameters(), *model.buffers()])
        with tracker.watching(model), no_values():
            ends = torch.tensor([0, tokens], dtype=torch.int32)
            # Under sequence parallelism linear_kv gathers the whole text of every rank, which Transformer Engine 2.20
            # refuses unless the lengths say so; earlier releases take the first.
            rows = text * (provider.tensor_model_parallel_size if provider.sequence_parallel else 1)
            ends_kv = torch.tensor([0, rows], dtype=torch.int32)
            packed = {
                "self_attention": PackedSeqParams(
                    cu_seqlens_q=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv=ends, cu_seqlens_kv_padded=ends,
                    qkv_format="thd",
                ),
                "cross_attention": PackedSeqParams(
                    cu_seqlens_q=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv=ends_kv, cu_seqlens_kv_padded=ends_kv,
                    qkv_format="thd",
                ),
            }
            pipeline = WanForwardStep().diffusion_pipeline
            held: list[Any] = []

            def forward() -> torch.Tensor:
                """``WanForwardStep.__call__``, of a batch that the tracker does not count, as the estimate does not."""
                batch = {
                    "video_latents": latents.transpose(0, 1), "context_embeddings": context, "loss_mask": mask,
                    "grid_sizes": torch.tensor([[f, h, w]]), "packed_seq_params": packed,
                }
                weighted, *_ = pipeline.step(model, batch, device=torch.device("meta"))
                out = torch.mean(weighted, dim=-1)
                del weighted
                end: torch.Tensor = Leave.apply(out)
                return end

            record = measured_passes(tracker, forward)
    return shapes, record, run


def answer(name: str) -> dict[str, Any]:
    from parameters_of import stage_parameters

    from bridge_memory.inventory.stack import chunk_inventory
    from bridge_memory.spec.layout import layout
    from bridge_memory.tapes.context import context_of

    shapes, record, run = measured(name)
    ours = {p.name: tuple(p.shape) for p in stage_parameters(run, 0)[0]}
    wrong = {n: [ours.get(n), shapes.get(n)] for n in ours.keys() | shapes.keys() if ours.get(n) != shapes.get(n)}
    ctx = context_of(run)
    found = chunk_inventory(run.model, layout(run.model, run.parallel).shapes(run.model)[0][0], ctx, True)
    if os.environ.get("VERBOSE"):
        for t in record.saved:
            print(t)
        for t in found.tensors() if callable(getattr(found, "tensors", None)) else ():
            print("ours", t)
        print(record.held, record.forward_peak, record.backward_peak, sep="\n")
        print("ours", found.forward_name(), found.backward_name())
    return {
        "wrong": {n: wrong[n] for n in sorted(wrong)[:20]},
        "order": list(ours) == list(shapes),
        "saved": [found.retained, record.saved_bytes + record.held_bytes],
        "forward": [found.forward_peak, record.forward_peak.bytes],
        "backward": [found.backward_peak, record.backward_peak.bytes],
    }


def main(names: list[str]) -> None:
    start()
    logging.disable(logging.CRITICAL)
    for name in names or CASES:
        try:
            found = answer(name)
        except Exception as error:
            if os.environ.get("VERBOSE"):
                raise
            found = {"error": f"{type(error).__name__}: {error}"}
        print("=", json.dumps({"case": name, **found}))


if __name__ == "__main__":
    main(sys.argv[1:])
