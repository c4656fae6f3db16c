"""Modules of megatron-core whose constructors refuse a configuration or need a kernel library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from bridge_memory.rehearsal import imports, scan_kernels
from bridge_memory.rehearsal.patches.replace import module_or_empty, replaced


def _torch_norm(
    cls: type,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """torch's norm, built as by ``transformer/torch_norm.py: WrappedTorchNorm``."""
    kinds: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm = kinds[config.normalization](
        normalized_shape=hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
    )
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


@contextmanager
def norms_without_apex() -> Iterator[None]:
    """Let ``WrappedTorchNorm`` accept sequence parallelism, persist_layer_norm and zero-centred weights.

    None of the three changes a shape: under sequence parallelism the norms of Apex and Transformer Engine hold the same
    weights and only mark them for an all-reduce. Weights are created in params_dtype, as by fused norms; torch alone
    creates fp32 ones, which ``Float16Module`` converts later.
    """
    torch_norm = module_or_empty("megatron.core.transformer.torch_norm")
    with replaced(torch_norm.WrappedTorchNorm, "__new__", _torch_norm):
        yield


def has_te() -> bool:
    """Whether megatron-core found Transformer Engine. Without it, megatron-core's wrappers are mock objects."""
    return bool(getattr(module_or_empty("megatron.core.extensions.transformer_engine"), "HAVE_TE", False))


class _Duplicated(torch.nn.Module):
    """Transformer Engine's Linear with ``parallel_mode="duplicated"``: not sharded."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **_: object) -> None:
        super().__init__()
        where: Any = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = torch.nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight, self.bias), None


@contextmanager
def state_space_libraries() -> Iterator[None]:
    """Give state-space mixers ``scan_kernels`` in place of mamba_ssm and fla, which their constructors require."""
    with imports.placeholder_packages(*imports.missing("triton")):
        mixer = module_or_empty("megatron.core.ssm.mamba_mixer")
        context_parallel = module_or_empty("megatron.core.ssm.mamba_context_parallel")
        # The first name is that of releases before 0.18, the others those of 0.18 and 0.19.
        blocks = [
            module_or_empty(f"megatron.core.{name}") for name in ("ssm.mamba_block", "models.hybrid.hybrid_block")
        ]
        deltas = [module_or_empty(f"megatron.core.ssm.gated_delta_net{name}") for name in ("", ".common", ".gdn")]
    torch_norm = module_or_empty("megatron.core.transformer.torch_norm")
    with ExitStack() as stack:
        for owner, name in (
            (mixer, "HAVE_MAMBA_SSM"), (mixer, "HAVE_EINOPS"), (context_parallel, "HAVE_EINOPS"),
            *((delta, "HAVE_FLA") for delta in deltas),
        ):  # fmt: skip
            stack.enter_context(replaced(owner, name, True))
        for owner, names in (
            (mixer, ("ExtendedRMSNorm", "mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined",
                     "causal_conv1d_fn")),
            *((delta, ("causal_conv1d_fn", "causal_conv1d", "l2norm", "chunk_gated_delta_rule")) for delta in deltas),
        ):
            for name in names:
                stack.enter_context(replaced(owner, name, getattr(scan_kernels, name), add=True))
        if not has_te():
            # The final norm is always TE's.
            for block in blocks:
                stack.enter_context(replaced(block, "TENorm", torch_norm.WrappedTorchNorm))
            moe = module_or_empty("megatron.core.transformer.moe.moe_layer")
            # Latent MoE has projections of Transformer Engine's Linear only.
            stack.enter_context(replaced(moe, "TELinear", _Duplicated, add=True))
            stack.enter_context(replaced(moe, "HAVE_TE", True))
        yield


@contextmanager
def permissive_core_attention() -> Iterator[None]:
    """Let the local ``DotProductAttention`` accept context parallelism and MLA, which it refuses (0.13 to 0.16.1).

    Under context parallelism it attends within this rank's part of the sequence: parameters and everything outside of
    the core attention are right, the core attention is not.

    ``transformer/multi_latent_attention.py`` passes k_channels and v_channels, so that MLA runs with Transformer Engine
    only. Here they are accepted, and the output has v_channels per head; MLA's other tensors are then right.
    """
    module = module_or_empty("megatron.core.transformer.dot_product_attention")
    original = module.DotProductAttention.__init__

    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        config = kwargs["config"] if "config" in kwargs else args[0]
        with replaced(config, "context_parallel_size", 1):
            original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    # In 0.16.1 HAVE_TE is true where the TE wrappers can be imported, which they can without TE.
    mla = module_or_empty("megatron.core.transformer.multi_latent_attention")
    without_te = nullcontext() if has_te() else replaced(mla, "HAVE_TE", False)
    with replaced(module.DotProductAttention, "__init__", init), without_te:
        yield
