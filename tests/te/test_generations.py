"""What depends on the GPU's generation, asked of Transformer Engine's own Python under each compute capability."""

from __future__ import annotations

import pytest
import torch
from installed import HERE
from test_layers import check, run_of

from bridge_memory.rehearse import patches, te_kernels
from bridge_memory.spec import ImplementationSpec
from bridge_memory.spec.gpu_names import GENERATIONS
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


@pytest.mark.parametrize("arch", ["volta", "turing"])
@pytest.mark.parametrize("model", ["gqa", "mha", "mla"])
def test_layers_before_ampere_keep_attentions_probabilities(model: str, arch: str) -> None:
    """What is saved is met to the byte; the peaks of Transformer Engine's unfused attention within 2 %."""
    check(run_of(model, gpu_arch=arch), saved=1e-9, peaks=0.02)
