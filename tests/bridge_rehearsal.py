"""Models of Megatron Bridge's own modules, built by its providers and rehearsed, beside the inventory.

A process of its own (``python tests/bridge_rehearsal.py CASE ...``): Transformer Engine's real Python over kernels that
compute nothing comes before megatron-core, stubs of the other CUDA-only packages before Megatron Bridge. Prints one
JSON line a case: parameters (name -> shape) that differ, and bytes, [inventory, rehearsal], of buffers, of what each
layer and the chunk keep and of their peaks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bridge_child import print_answers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]


def start() -> None:
    """Import Transformer Engine, megatron-core and Megatron Bridge."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from bridge_stubs import STUBBED, _Finder

    from bridge_memory.rehearsal import te_kernels
    from bridge_memory.rehearsal.imports import import_megatron_core, supply_typing_override

    supply_typing_override()
    te_kernels.load()
    import_megatron_core()
    rest = [n for n in STUBBED if not n.startswith("transformer_engine")]
    sys.meta_path.append(_Finder(tuple(n for n in rest if "." in n or importlib.util.find_spec(n) is None)))
    import megatron.bridge  # noqa: F401


def gemma4_dense(tp: int, sequence_parallel: bool = False, width: int = 256, **more: Any) -> Any:
    from megatron.bridge.models.gemma.gemma4_provider import Gemma4DenseProvider

    # The last two take over keys and values of the second and third.
    return Gemma4DenseProvider(
        num_layers=5, hidden_size=1536, ffn_hidden_size=6144, num_attention_heads=8, num_query_groups=2,
        kv_channels=256, global_kv_channels=512, num_global_query_groups=2, window_size=(511, 0),
        window_attn_skip_freq=[True, True, False, True, False], num_kv_shared_layers=2, vocab_size=4096,
        per_layer_embed_vocab_size=32768, per_layer_embed_dim=width, tensor_model_parallel_size=tp, seq_length=1024,
        sequence_parallel=sequence_parallel, transformer_impl="local", gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, perform_initialization=False, **more,
    )  # fmt: skip


def gemma4_experts(tp: int, **more: Any) -> Any:
    from megatron.bridge.models.gemma.gemma4_provider import Gemma4ModelProvider

    return Gemma4ModelProvider(
        num_layers=3, hidden_size=1408, ffn_hidden_size=2112, num_attention_heads=16, num_query_groups=8,
        kv_channels=256, global_head_dim=512, num_global_key_value_heads=2, attention_k_eq_v=True,
        interleaved_attn_pattern=(2, 1), window_size=512, num_moe_experts=16, moe_router_topk=8,
        moe_ffn_hidden_size=704, moe_shared_expert_intermediate_size=2112, vocab_size=4096, seq_length=1024,
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1, gradient_accumulation_fusion=False,
        perform_initialization=False, **more,
    )  # fmt: skip


def falcon_h1(tp: int, scale: float = 0.5, **more: Any) -> Any:
    from megatron.bridge.models.falcon_h1.falconh1_provider import FalconH1ModelProvider

    return FalconH1ModelProvider(
        num_layers=3, hidden_size=1024, ffn_hidden_size=2048, num_attention_heads=8, num_query_groups=2,
        kv_channels=128, mamba_num_heads=24, mamba_head_dim=64, mamba_state_dim=256, mamba_num_groups=2, expand=2,
        vocab_size=4096, seq_length=1024, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        key_multiplier=scale, ssm_multipliers=(scale,) * 5, gradient_accumulation_fusion=False,
        perform_initialization=False, activation_func=torch.nn.functional.silu, bias_activation_fusion=False, **more,
    )  # fmt: skip


class _Flex(torch.autograd.Function):
    """torch ``_inductor/kernel/flex/flex_attention.py: flex_attention, flex_attention_backward``: an output with the
    strides of the query, a log-sum-exp; gradients with the strides of their tensors, row sums."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, _, lse = ctx.saved_tensors
        sums = torch.empty_like(lse)
        made = tuple(torch.empty_strided(x.shape, _dense(x), dtype=x.dtype, device=x.device) for x in (q, k, v))
        del sums
        return made


def _dense(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor in the order of those of ``x`` (torch ``_inductor/ir.py: infer_dense_strides``)."""
    order, size, out = sorted(range(x.dim()), key=x.stride), 1, [0] * x.dim()
    for axis in order:
        out[axis], size = size, size * x.shape[axis]
    return tuple(out)


def gemma2(tp: int, **more: Any) -> Any:
    from megatron.bridge.models.gemma import gemma2_provider

    gemma2_provider._flex_attn_func = lambda q, k, v, **_: _Flex.apply(q, k, v)
    gemma2_provider.Gemma2FlexDotProductAttention._build_flex_block_mask = lambda *_: None
    return gemma2_provider.Gemma2ModelProvider(
        num_layers=2, hidden_size=1024, ffn_hidden_size=2048, num_attention_heads=8, num_query_groups=4,
        kv_channels=128, window_size=(511, 0), vocab_size=4096, seq_length=1024, tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1, gradient_accumulation_fusion=False, perform_initialization=False,
        bias_activation_fusion=False, bf16=True, params_dtype=torch.bfloat16, **more,
    )  # fmt: skip


def exaone4(tp: int, **more: Any) -> Any:
    from megatron.bridge.models.exaone.exaone4.exaone4_provider import exaone4_layer_spec
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    return GPTModelProvider(
        num_layers=2, hidden_size=1024, ffn_hidden_size=2048, num_attention_heads=8, num_query_groups=4,
        kv_channels=128, vocab_size=4096, seq_length=1024, tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
        gradient_accumulation_fusion=False, perform_initialization=False, transformer_layer_spec=exaone4_layer_spec,
        qk_layernorm=True, normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, position_embedding_type="rope", hidden_dropout=0.0,
        attention_dropout=0.0, share_embeddings_and_output_weights=True, bf16=True, params_dtype=torch.bfloat16, **more,
    )  # fmt: skip


#: Case -> (provider, its arguments). With embeddings layer by layer, or keys taken over, a layer alone is another.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Gemma 2": (gemma2, {"tp": 1}),
    "Gemma 2, TP 2": (gemma2, {"tp": 2}),
    "EXAONE 4": (exaone4, {"tp": 1}),
    "EXAONE 4, TP 2": (exaone4, {"tp": 2}),
    "Gemma 4, dense": (gemma4_dense, {"tp": 1}),
    "Gemma 4, dense, TP 2": (gemma4_dense, {"tp": 2}),
    "Gemma 4, dense, without embeddings by layer": (gemma4_dense, {"tp": 1, "width": 0}),
    "Falcon-H1": (falcon_h1, {"tp": 1}),
    "Falcon-H1, TP 2": (falcon_h1, {"tp": 2}),
    "Gemma 4, experts": (gemma4_experts, {"tp": 1}),
    "Gemma 4, experts, TP 2 EP 4": (gemma4_experts, {"tp": 2, "expert_model_parallel_size": 4}),
}


def _tables(rotary: Any, mixer: Any) -> Any:
    """Those of sliding layers and of the others, as one; a layer without experts is given its own."""
    def one(length: int) -> Any:
        found = rotary(length)
        if not isinstance(found, tuple):
            return found
        if type(rotary).__name__ == "Gemma4DenseRotaryEmbedding":
            return found[0 if mixer.window_size else 1]
        return list(found)

    return one


def _entering(kind: Any) -> dict[str, Any]:
    """Of what enters a layer; Falcon-H1's, after the first, are given fp32."""
    return {"bf16": torch.float32 if type(kind.mixer).__name__ == "SideBySideSpec" else torch.bfloat16}


def container(model: Any) -> Any:
    """What a reader asks of a ConfigContainer beside the model."""
    return SimpleNamespace(
        model=model,
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=8),
        optimizer=SimpleNamespace(optimizer="adam", use_distributed_optimizer=True),
        ddp=SimpleNamespace(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        dataset=SimpleNamespace(seq_length=model.seq_length, skip_getting_attention_mask_from_dataset=True),
    )


def answer(name: str) -> dict[str, Any]:
    from parameters_of import stage_parameters

    import bridge_memory.rehearsal.run as rehearsal
    from bridge_memory.inventory.layer import layer_block
    from bridge_memory.inventory.stack import chunk_inventory
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.rehearsal import passes
    from bridge_memory.rehearsal.compare import over_experts, unmatched
    from bridge_memory.rehearsal.patches.replace import replaced
    from bridge_memory.spec.layout import layout
    from bridge_memory.tapes.context import context_of

    make, arguments = CASES[name]
    provider = make(**arguments)
    if provider.num_moe_experts:
        provider.expert_tensor_parallel_size = 1
    run = run_from_config_container(container(provider), world_size=8, implementation={"attention_backend": "fused"})
    assert not run.not_modelled, run.not_modelled

    def build(*args: Any, **kwargs: Any) -> list[Any]:
        from megatron.core import activations
        from megatron.core.process_groups_config import ProcessGroupCollection

        made = make(**arguments)
        if made.num_moe_experts:
            made.expert_tensor_parallel_size = 1
        # As a kernel, which it is while a rehearsal runs.
        made.activation_func = getattr(activations, made.activation_func.__name__, made.activation_func)
        made._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        made.finalize()
        chunk = made.provide(pre_process=True, post_process=True)
        if layer is not None:
            rotary = chunk.rotary_pos_emb
            del chunk.rotary_pos_emb
            chunk.__dict__["rotary_pos_emb"] = _tables(rotary, run.model.layers[layer].mixer)
        return [chunk]

    rehearsal.build_chunks = build
    layer: int | None = None
    found = rehearsal.rehearse(run, 0)
    chunk = found.chunks[0]
    ours = {p.name: tuple(p.shape) for p in stage_parameters(run, 0)[0]}
    real = dict(chunk.parameters)
    wrong = {n: [ours.get(n), real.get(n)] for n in ours.keys() | real.keys() if ours.get(n) != real.get(n)}
    ctx = context_of(run)
    inventory = chunk_inventory(run.model, layout(run.model, run.parallel).shapes(run.model)[0][0], ctx, True)
    out: dict[str, Any] = {
        "wrong": {n: wrong[n] for n in sorted(wrong)[:20]},
        "parameters": [sum(p.numel for p in stage_parameters(run, 0)[0]), found.parameters],
        "chunk saved": [inventory.retained, chunk.passes.saved_bytes + chunk.passes.held_bytes],
        "chunk forward": [inventory.forward_peak, chunk.passes.forward_peak.bytes],
        "chunk backward": [inventory.backward_peak, chunk.passes.backward_peak.bytes],
    }
    verbose = os.environ.get("VERBOSE")
    for number, kind in enumerate(run.model.layers):
        cost = layer_block(kind, ctx).cost
        mine = re.compile(rf"decoder\.layers\.{number}(\.|$)")
        saved = [t for t in chunk.passes.saved if mine.match(t.module)]
        held = [t for t in chunk.passes.held if mine.match(t.module)]
        # The embeddings of all layers, which the first that takes its own keeps, are counted where they are made.
        counted = [t for t in saved if not (kind.per_layer_width and t.made_by == "input: mul")]
        out[f"layer {number} saved"] = [cost.retained, sum(t.bytes for t in (*counted, *held))]
        if verbose:
            ours_alone, real_alone = unmatched(list(cost.tensors), over_experts(tuple(saved)))
            out[f"layer {number} predicted only"] = [f"{t.name}, {t.bytes:,} bytes" for t in ours_alone]
            out[f"layer {number} found only"] = list(map(str, [*real_alone, *held]))
        if kind.per_layer_width or getattr(kind.mixer, "borrows_keys", False):
            continue
        layer = number
        with replaced(passes, "TORCH_DTYPES", _entering(kind)):
            alone = rehearsal.rehearse_layer(run, number)
        for what, peak, found_peak in (
            ("forward", cost.forward_peak, alone.forward_peak), ("backward", cost.backward_peak, alone.backward_peak)
        ):
            out[f"layer {number} {what}"] = [peak, found_peak.bytes]
            if verbose:
                name = cost.forward_name() if what == "forward" else cost.backward_name()
                where = f"{found_peak.module}: {found_peak.operation}"
                out[f"layer {number} {what} at"] = [name, where, *map(str, found_peak.largest)]
    return out


def main(names: list[str]) -> None:
    start()
    print_answers(names or CASES, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
