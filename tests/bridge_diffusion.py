"""Megatron Bridge's diffusion models, run without data, beside the inventory.

A process of its own (``python tests/bridge_diffusion.py CASE ...``), as ``bridge_rehearsal.py`` is. Prints a JSON line
for each case: parameters that differ, and bytes, [inventory, rehearsal].
"""

from __future__ import annotations

import os
import sys
from math import prod
from typing import Any

from bridge_child import pairs, print_answers
from bridge_rehearsal import start

WAN = {"num_layers": 3, "hidden_size": 1536, "ffn_hidden_size": 8960, "num_attention_heads": 12}
WIDE = {"num_layers": 2, "hidden_size": 5120, "ffn_hidden_size": 13824, "num_attention_heads": 40}
#: As the recipe of 14 billion parameters divides it.
ALL = {"tensor_model_parallel_size": 2, "context_parallel_size": 4, "sequence_parallel": True}
#: Case -> (sizes of the provider, parallel sizes, whether layers are recomputed, frames, height and width in patches).
CASES: dict[str, Any] = {
    "Wan": (WAN, {}, False, (4, 16, 24)),
    "Wan, TP 2": (WAN, {"tensor_model_parallel_size": 2, "sequence_parallel": False}, False, (4, 16, 24)),
    "Wan, CP 4": (WAN, {"context_parallel_size": 4}, False, (8, 16, 24)),
    "Wan, TP 2 CP 4 SP": (WAN, ALL, False, (8, 16, 24)),
    "Wan, wide, TP 4 SP": (
        WIDE, {"tensor_model_parallel_size": 4, "sequence_parallel": True}, False, (6, 32, 20)
    ),
    "Wan, wide, TP 2 CP 4 SP, recomputed": (WIDE, ALL, True, (24, 52, 30)),
    "Wan, recomputed": (WAN, {}, True, (6, 32, 20)),
}


def run_of(sizes: dict[str, Any], parallel: dict[str, Any], recompute: bool, tokens: int) -> Any:
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
    from bridge_memory.rehearsal.world import installed_release

    heads, h = sizes["num_attention_heads"], sizes["hidden_size"]
    attention = AttentionSpec(heads, heads, h // heads, add_qkv_bias=True, add_output_bias=True)
    mlp = MLPSpec(sizes["ffn_hidden_size"], gated=False, activation="gelu", add_bias=True)
    model = ModelSpec(
        name="video", model_type="wan", hidden_size=h, vocab_size=128,
        layers=(LayerSpec(attention, mlp, arrangement="wan"),) * sizes["num_layers"],
        diffusion=DiffusionSpec(text_width=h, head_dim=attention.kv_channels),
    )
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    return RunSpec(
        model=model,
        parallel=ParallelSpec(world_size=prod(n for n in parallel.values() if type(n) is int), **parallel),
        batch=BatchSpec(seq_length=tokens, packed_sequences=True),
        recompute=full if recompute else RecomputeSpec(),
        implementation=ImplementationSpec(
            attention_backend="fused", apply_rope_fusion=True, bias_activation_fusion=True,
            gradient_accumulation_fusion=False, megatron_core=installed_release(),
        ),
    )


def answer(name: str) -> dict[str, Any]:
    from parameters_of import stage_parameters

    from bridge_memory.inventory.stack import chunk_inventory
    from bridge_memory.rehearsal.run import rehearse
    from bridge_memory.spec.layout import layout
    from bridge_memory.tapes.context import context_of

    sizes, parallel, recompute, (f, h, w) = CASES[name]
    run = run_of(sizes, parallel, recompute, f * h * w)
    chunk = rehearse(run, 0).chunks[0]
    shapes, record = dict(chunk.parameters), chunk.passes
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
        **pairs(found, record),
    }


def main(names: list[str]) -> None:
    start()
    print_answers(names or CASES, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
