"""Megatron Bridge's Wan on the meta device: its provider's model, and a step of flow matching.

Needs Megatron Bridge with its diffusion models (0.6) and diffusers. The batch is not counted, as the estimate counts it
beside the chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import META, replaced
from bridge_memory.rehearsal.world import NotBuildable
from bridge_memory.spec import AttentionSpec, MLPSpec, RunSpec


def import_diffusion(run: RunSpec) -> None:
    """Import the modules of a diffusion model, whose compiled functions a rehearsal replaces. Raises NotBuildable."""
    if run.model.diffusion is None:
        return
    try:
        import megatron.bridge.diffusion.models.wan.wan_provider
        import megatron.bridge.diffusion.models.wan.wan_step  # noqa: F401
    except ImportError as error:
        raise NotBuildable(
            "a diffusion model is rehearsed with Megatron Bridge 0.6 and diffusers, of which one does not import: "
            f"{str(error).splitlines()[0][:120]}"
        ) from None


def wan_model(run: RunSpec) -> torch.nn.Module:
    """``WanModelProvider.provide`` with the sizes of ``run``."""
    from megatron.bridge.diffusion.models.wan.wan_provider import WanModelProvider

    model, p, recompute, impl = run.model, run.parallel, run.recompute, run.implementation
    layer, diffusion = model.layers[0], model.diffusion
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MLPSpec) and diffusion is not None
    provider = WanModelProvider(
        num_layers=model.num_layers, hidden_size=model.hidden_size, ffn_hidden_size=layer.ffn.ffn_hidden_size,
        num_attention_heads=layer.mixer.num_attention_heads, crossattn_emb_size=diffusion.text_width,
        in_channels=diffusion.in_channels, out_channels=diffusion.out_channels, freq_dim=diffusion.freq_dim,
        patch_spatial=diffusion.patch_spatial, patch_temporal=diffusion.patch_temporal, text_dim=diffusion.text_dim,
        tensor_model_parallel_size=p.tp, context_parallel_size=p.cp, sequence_parallel=p.sp,
        recompute_granularity=recompute.granularity, recompute_method=recompute.method,
        recompute_num_layers=recompute.num_layers, perform_initialization=False, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=impl.gradient_accumulation_fusion, apply_rope_fusion=impl.apply_rope_fusion,
        bias_activation_fusion=impl.bias_activation_fusion,
    )  # fmt: skip
    provider.finalize()
    built: torch.nn.Module = provider.provide().to(torch.bfloat16)
    return built


@contextmanager
def no_values() -> Iterator[None]:
    """Tensors without data are zero where a loss is logged or checked, and indices of this rank's tokens are made."""
    from megatron.bridge.diffusion.models.wan import utils

    item, truth = torch.Tensor.item, torch.Tensor.__bool__

    def indices(ends: Any, *, total_tokens: int, cp_group: Any, device: Any) -> torch.Tensor:
        return torch.empty(total_tokens // cp_group.size(), dtype=torch.int64, device=device)

    with (
        replaced(torch.Tensor, "item", lambda t: 0.0 if t.is_meta else item(t)),
        replaced(torch.Tensor, "__bool__", lambda t: False if t.is_meta else truth(t)),
        replaced(utils, "get_thd_cp_partition_indices", indices),
    ):
        yield


def batch_of(run: RunSpec) -> dict[str, torch.Tensor]:
    """Latents, text and loss mask of a micro batch."""
    diffusion, tokens = run.model.diffusion, run.batch.seq_length
    assert diffusion is not None
    return {
        "video_latents": torch.empty(tokens, 1, diffusion.patch_elements, device=META),
        "context_embeddings": torch.empty(diffusion.text_tokens, 1, diffusion.text_dim, device=META),
        "loss_mask": torch.empty(tokens, 1, dtype=torch.bfloat16, device=META),
    }


def _grid(patches: int) -> tuple[int, int, int]:
    """Sides of so many patches, within the table of rotary angles; any others make no difference."""
    width = next(n for n in range(min(patches, 1024), 0, -1) if patches % n == 0)
    height = next(n for n in range(min(patches // width, 1024), 0, -1) if patches // width % n == 0)
    return patches // width // height, height, width


def step_of(run: RunSpec, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """``WanForwardStep.__call__`` without its loss function: the loss of each patch."""
    from megatron.bridge.diffusion.models.wan.wan_step import WanForwardStep
    from megatron.core.packed_seq_params import PackedSeqParams

    diffusion, p, tokens = run.model.diffusion, run.parallel, run.batch.seq_length
    assert diffusion is not None
    # Under sequence parallelism linear_kv gathers the whole text of every rank, which Transformer Engine 2.20 refuses
    # unless the lengths say so; earlier releases take the first.
    text = diffusion.text_tokens * (p.tp if p.sp else 1)
    ends, ends_kv = (torch.tensor([0, n], dtype=torch.int32) for n in (tokens, text))

    def packed(keys: torch.Tensor) -> Any:
        return PackedSeqParams(
            cu_seqlens_q=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv=keys, cu_seqlens_kv_padded=keys,
            qkv_format="thd",
        )

    pipeline = WanForwardStep().diffusion_pipeline
    grid = torch.tensor([_grid(tokens)])
    attention = {"self_attention": packed(ends), "cross_attention": packed(ends_kv)}

    def forward() -> torch.Tensor:
        batch = {**tensors, "grid_sizes": grid, "packed_seq_params": attention}
        batch["video_latents"] = tensors["video_latents"].transpose(0, 1)
        weighted, *_ = pipeline.step(model, batch, device=torch.device(META))
        out: torch.Tensor = torch.mean(weighted, dim=-1)
        return out

    return forward
