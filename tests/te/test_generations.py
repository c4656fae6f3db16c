"""What depends on the GPU's generation, asked of Transformer Engine's own Python under each compute capability."""

from __future__ import annotations

import pytest
import torch
from installed import HERE
from test_layers import check, run_of

from bridge_memory.cards.generations import GENERATIONS
from bridge_memory.inventory.megatron.attention import attention_kernel
from bridge_memory.rehearsal import patches, te_kernels
from bridge_memory.spec import (
    AttentionSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
)
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.workspaces.gpu_generations import TE_WORKSPACE

#: Bytes that Transformer Engine 2.11 adds for scales of NVFP4, not counted.
SCALES = 1024


@pytest.mark.parametrize("arch", GENERATIONS)
def test_cublas_workspaces_are_transformer_engines(arch: str) -> None:
    from transformer_engine.pytorch.cpp_extensions import gemm

    with patches.running(), te_kernels.running(arch):
        assert gemm.get_cublas_workspace_size_bytes() - TE_WORKSPACE[arch] == (SCALES if TE_WORKSPACE[arch] > 4 << 20
                                                                               else 0)  # fmt: skip


@pytest.mark.parametrize("nondeterministic", ["1", "0"])
@pytest.mark.parametrize("arch", GENERATIONS)
def test_attention_kernels_are_transformer_engines(
    arch: str, nondeterministic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causal attention in bf16, 32 heads of 128 and 8 groups, where FlashAttention 2 and cuDNN are both installed."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    here = utils.FlashAttentionUtils
    for name, value in vars(here).items():
        if isinstance(value, bool):  # what set_flash_attention_version sets
            monkeypatch.setattr(here, name, value)
    monkeypatch.setattr(here, "version", utils.PkgVersion("2.7.4"))
    here.set_flash_attention_version()
    with patches.running(), te_kernels.running(arch):
        flash, _, fused, _, unfused, _ = utils.get_attention_backend(
            utils.AttentionParams(
                qkv_type=torch.Tensor, qkv_dtype=torch.bfloat16, qkv_layout="sbhd_sbhd_sbhd", batch_size=1,
                num_heads=32, num_gqa_groups=8, max_seqlen_q=4096, max_seqlen_kv=4096, head_dim_qk=128, head_dim_v=128,
                core_attention_bias_shape=None, core_attention_bias_requires_grad=False,
                attn_mask_type="causal", window_size=(-1, 0), deterministic=nondeterministic == "0", is_training=True,
            )
        )  # fmt: skip
    theirs = "flash" if flash else "fused" if fused else "unfused" if unfused else "none"
    ours = ImplementationSpec(
        transformer_engine=HERE, gpu_arch=arch, nvte_deterministic=nondeterministic == "0"
    ).attention_kernel
    assert ours == theirs


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("sink", [False, True])
def test_kernels_of_windows_sinks_and_dropout_are_transformer_engines(
    sink: bool, window: int | None, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss's heads on Hopper with cuDNN 9.20 and FlashAttention 2 installed, as its layers ask: FlashAttention takes
    no sinks, cuDNN no windows with dropout (its own rules in ``fused_attn.cpp: nvte_get_fused_attn_backend`` say the
    same of windows, and take sinks with dropout)."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    here = utils.FlashAttentionUtils
    for name, value in vars(here).items():
        if isinstance(value, bool):
            monkeypatch.setattr(here, name, value)
    monkeypatch.setattr(here, "version", utils.PkgVersion("2.7.4"))
    here.set_flash_attention_version()
    with patches.running(), te_kernels.running("hopper"):
        flash, _, fused, _, unfused, _ = utils.get_attention_backend(
            utils.AttentionParams(
                qkv_type=torch.Tensor, qkv_dtype=torch.bfloat16, qkv_layout="sbhd_sbhd_sbhd", batch_size=1,
                num_heads=64, num_gqa_groups=8, max_seqlen_q=4096, max_seqlen_kv=4096, head_dim_qk=64, head_dim_v=64,
                core_attention_bias_shape=None, core_attention_bias_requires_grad=False, attn_mask_type="causal",
                window_size=(-1 if window is None else window, 0), is_training=True, attention_dropout=dropout,
                softmax_type="learnable" if sink else "vanilla",
            )
        )  # fmt: skip
    theirs = "flash" if flash else "fused" if fused else "unfused" if unfused else "none"
    mixer = AttentionSpec(64, 8, 64, window_size=window, learnable_softmax_sink=sink)
    model = ModelSpec(
        name="m", model_type="m", hidden_size=2880, vocab_size=1024, attention_dropout=dropout,
        layers=(LayerSpec(mixer, MLPSpec(2880, gated=True)),),
    )  # fmt: skip
    run = RunSpec(
        model=model, parallel=ParallelSpec(world_size=1),
        implementation=ImplementationSpec(transformer_engine=HERE, gpu_arch="hopper"),
    )
    ours = attention_kernel(Recorder(context_of(run)), sink=sink, window=window is not None)
    assert ours == theirs


@pytest.mark.parametrize("arch", ["volta", "turing"])
@pytest.mark.parametrize("model", ["gqa", "mha", "mla"])
def test_layers_before_ampere_keep_attentions_probabilities(model: str, arch: str) -> None:
    """What is saved is met to the byte; the peaks of Transformer Engine's unfused attention within 2 %."""
    check(run_of(model, gpu_arch=arch), saved=1e-9, peaks=0.02)
