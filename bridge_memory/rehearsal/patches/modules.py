"""Modules of megatron-core that refuse a configuration or need a kernel library."""

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
    """torch's norm, as ``transformer/torch_norm.py: WrappedTorchNorm`` builds it."""
    kinds: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm = kinds[config.normalization](
        normalized_shape=hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
    )
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


@contextmanager
def norms_without_apex() -> Iterator[None]:
    """``WrappedTorchNorm`` refuses sequence parallelism, persist_layer_norm and zero-centred weights.

    None of them changes a shape: under sequence parallelism the norms of Apex and Transformer Engine hold the
    same weights and only mark them for an all-reduce. The weights are made in params_dtype, as by fused norms
    (bare torch makes fp32 ones, which ``Float16Module`` then converts).
    """
    torch_norm = module_or_empty("megatron.core.transformer.torch_norm")
    with replaced(torch_norm.WrappedTorchNorm, "__new__", _torch_norm):
        yield


def has_te() -> bool:
    """Whether megatron-core found Transformer Engine; without, its wrappers are mock objects."""
    return bool(getattr(module_or_empty("megatron.core.extensions.transformer_engine"), "HAVE_TE", False))


class _Duplicated(torch.nn.Module):
    """Transformer Engine's Linear with ``parallel_mode="duplicated"``: whole on every rank."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **_: object) -> None:
        super().__init__()
        where: Any = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = torch.nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight, self.bias), None


@contextmanager
def state_space_libraries() -> Iterator[None]:
    """Constructors of state-space mixers ask for mamba_ssm and fla; their kernels are those of ``scan_kernels``."""
    with imports.stand_ins(*imports.missing("triton")):
        mixer = module_or_empty("megatron.core.ssm.mamba_mixer")
        context_parallel = module_or_empty("megatron.core.ssm.mamba_context_parallel")
        # The second of each pair is where 0.18 and 0.19 have them.
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
            (mixer, ("ExtendedRMSNorm", "mamba_split_conv1d_scan_combined")),
            *((delta, ("causal_conv1d_fn", "causal_conv1d", "l2norm", "chunk_gated_delta_rule")) for delta in deltas),
        ):
            for name in names:
                stack.enter_context(replaced(owner, name, getattr(scan_kernels, name), add=True))
        if not has_te():
            # The final norm is hard-wired to TE's.
            for block in blocks:
                stack.enter_context(replaced(block, "TENorm", torch_norm.WrappedTorchNorm))
            moe = module_or_empty("megatron.core.transformer.moe.moe_layer")
            # The projections of latent MoE are made from Transformer Engine's Linear only.
            stack.enter_context(replaced(moe, "TELinear", _Duplicated, add=True))
            stack.enter_context(replaced(moe, "HAVE_TE", True))
        yield


@contextmanager
def permissive_core_attention() -> Iterator[None]:
    """Context parallelism and MLA, both of which the local ``DotProductAttention`` refuses (0.13 to 0.16.1).

    Under context parallelism it is let to attend within the rank's own part of the sequence, which is right
    for parameters and for everything outside the core attention.

    ``transformer/multi_latent_attention.py`` builds its core attention with them, and the local
    ``DotProductAttention`` refuses: MLA runs with Transformer Engine only. Accepting them, and giving the
    output v_channels a head, is all it takes to see MLA's other tensors here.
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

    # 0.16.1 also takes HAVE_TE for true whenever its TE wrappers import, which they do without TE.
    mla = module_or_empty("megatron.core.transformer.multi_latent_attention")
    without_te = nullcontext() if has_te() else replaced(mla, "HAVE_TE", False)
    with replaced(module.DotProductAttention, "__init__", init), without_te:
        yield
