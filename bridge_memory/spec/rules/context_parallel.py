"""What context parallelism asks of a model's mixers and of the kernels that attend."""

from __future__ import annotations

from bridge_memory.releases import DELTA_NETS_EXCHANGE_HEADS
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits, divisors
from bridge_memory.spec.model import AttentionSpec, GatedDeltaNetSpec, MambaSpec
from bridge_memory.spec.parts import ImplementationSpec, ParallelSpec


def check_context_parallel(p: ParallelSpec, i: ImplementationSpec, limits: Limits) -> None:
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    for m in limits.mixers:
        if isinstance(m, GatedDeltaNetSpec):  # TC, ssm/gated_delta_net.py: GatedDeltaNet.__init__
            if not DELTA_NETS_EXCHANGE_HEADS(i):
                raise SpecError(
                    f"context_parallel_size ({cp}) is not supported with gated delta net layers by megatron-core; "
                    f"set it to 1, or use {DELTA_NETS_EXCHANGE_HEADS} or later"
                )
            for what, heads in (("key", m.num_key_heads), ("value", m.num_value_heads)):
                if heads % (tp * cp):
                    raise SpecError(
                        f"linear_num_{what}_heads ({heads}) is not divisible by tensor_model_parallel_size ({tp}) x "
                        f"context_parallel_size ({cp}); use context_parallel_size {divisors(heads // tp, cp)}"
                    )
            continue
        if isinstance(m, MambaSpec):  # ssm/mamba_context_parallel.py: MambaContextParallel
            heads, groups = m.num_heads // tp, m.num_groups // tp
            if heads % cp:
                raise SpecError(
                    f"mamba_num_heads ({m.num_heads}) is not divisible by tensor_model_parallel_size ({tp}) x "
                    f"context_parallel_size ({cp}); use context_parallel_size {divisors(heads, cp)}"
                )
            if groups % cp and cp % groups:
                raise SpecError(
                    f"mamba_num_groups ({m.num_groups}) over tensor_model_parallel_size ({tp}) and "
                    f"context_parallel_size ({cp}) do not divide each other; use context_parallel_size "
                    f"{divisors(groups, cp)}"
                )
            continue
        if not i.te:  # transformer/dot_product_attention.py: DotProductAttention.__init__
            raise SpecError(
                f"context_parallel_size ({cp}) is not supported by the attention of transformer_impl local; set "
                "transformer_impl to transformer_engine"
            )
        if i.attention_kernel == "unfused":
            # TE attention/dot_product_attention/utils.py: get_attention_backend
            auto = i.attention_backend == "auto"
            field, value = ("gpu_arch", i.gpu_arch) if auto else ("attention_backend", i.attention_backend)
            other = "context_parallel_size 1: Transformer Engine has unfused attention alone there" if auto else (
                "flash, fused or auto"
            )
            raise SpecError(f"{field} ({value}) does not support context_parallel_size ({cp}); use {other}")
        # TE attention/dot_product_attention/context_parallel.py: AttnFuncWithCPAndQKVOA2A
        if i.cp_comm_type == "a2a" and isinstance(m, AttentionSpec):
            for what, n in (
                ("num_attention_heads", m.num_attention_heads),
                ("num_query_groups", max(m.num_query_groups, tp)),
            ):
                if n // tp % cp:
                    raise SpecError(
                        f"{what} ({n}) over tensor_model_parallel_size ({tp}) is not divisible by "
                        f"context_parallel_size ({cp}), which cp_comm_type a2a needs; use cp_comm_type p2p"
                    )
