"""Dtypes, fp8 and fp4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.releases import NVFP4_PARAMETERS_IN_BUFFERS, core_of, release_words
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits, next_multiple

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_precision(run: RunSpec, limits: Limits) -> None:
    """TC."""
    precision = run.precision
    if precision.fp32_residual_connection and run.implementation.te and precision.params_dtype != "fp32":
        # TE module/base.py: TransformerEngineBaseModule.set_activation_dtype
        raise SpecError(
            f"fp32_residual_connection (True) needs params_dtype fp32, not {precision.params_dtype}, with Transformer "
            "Engine, whose linears refuse an input of another dtype; drop it, or set transformer_impl to local"
        )
    if precision.fp8 is not None and precision.fp4 is not None:
        raise SpecError(f"fp4 ({precision.fp4}) and fp8 ({precision.fp8}) do not go together; drop one of them")
    if precision.fp8 is None and precision.fp8_param:
        raise SpecError("fp8_param (True) needs fp8; set fp8 to hybrid or e4m3, or drop fp8_param")
    if precision.fp8 is None and precision.fp8_dot_product_attention:
        raise SpecError(
            "fp8_dot_product_attention (True) needs fp8; set fp8 to hybrid or e4m3, or drop fp8_dot_product_attention"
        )
    if precision.fp4 is None and precision.fp4_param:
        raise SpecError("fp4_param (True) needs fp4; set fp4 to e2m1, or drop fp4_param")
    if not precision.quantizes:
        return
    ends = (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16)
    if any(ends) and precision.recipe == "delayed":
        raise SpecError(
            f"num_layers_at_start_in_bf16 ({ends[0]}) and num_layers_at_end_in_bf16 ({ends[1]}) do not go with "
            "fp8_recipe delayed; use another recipe"
        )
    most = run.model.num_layers // run.parallel.pipeline_model_parallel_size
    for name, n in zip(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), ends, strict=True):
        if n > most:
            raise SpecError(f"{name} ({n}) is larger than the {most} layers of a pipeline stage; lower it")
    if not run.implementation.te:  # transformer/fp8_utils.py: get_fp8_context is Transformer Engine's alone
        raise SpecError(
            f"{precision.format_words} does nothing with transformer_impl local, whose layers do not compute in it; "
            f"set transformer_impl to transformer_engine, or drop {precision.format_words[:3]}"
        )
    data = run.data_parallel
    in_buffers = precision.fp4_param and data.engine == "megatron_ddp" and data.use_distributed_optimizer
    if in_buffers and not NVFP4_PARAMETERS_IN_BUFFERS(run.implementation):
        raise SpecError(
            "fp4_param (True) with use_distributed_optimizer needs megatron_core "
            f"{NVFP4_PARAMETERS_IN_BUFFERS.number} or later: the buffers of "
            f"{release_words(core_of(run.implementation))} take no NVFP4 tensors; drop one of them"
        )
    _check_fp8_tokens(run)
    _check_blocks(run, limits)


#: Multiple of which the rows (tokens) of Transformer Engine's fp8 linears must be (``utils.py:
#: assert_dim_for_fp8_exec``, ``tensor/mxfp8_tensor.py: MXFP8Quantizer.is_quantizable``).
_FP8_ROWS = {"delayed": 8, "tensorwise": 8, "blockwise": 8, "mxfp8": 32, "nvfp4": 16}
#: The same if sequence parallelism gathers their input (``utils.py: assert_dim_for_all_gather``,
#: ``tensor/float8_blockwise_tensor.py: Float8BlockQuantizer.is_quantizable``).
_FP8_GATHERED_ROWS = {**_FP8_ROWS, "blockwise": 128}


def _check_fp8_tokens(run: RunSpec) -> None:
    p, b, recipe = run.parallel, run.batch, run.precision.recipe
    gathers = p.sp and p.tensor_model_parallel_size > 1
    rows = b.seq_length // p.context_parallel_size * b.micro_batch_size
    rows //= p.tensor_model_parallel_size if p.sp else 1
    multiple = (_FP8_GATHERED_ROWS if gathers else _FP8_ROWS)[recipe]
    if rows % multiple:
        sizes = p.context_parallel_size * (p.tensor_model_parallel_size if p.sp else 1)
        ranks = " and sequence parallelism" * gathers
        raise SpecError(
            f"seq_length ({b.seq_length}) x micro_batch_size ({b.micro_batch_size}) over context_parallel_size "
            f"({p.context_parallel_size}){ranks} leaves {rows} tokens per rank; {run.precision.format_words[:3]} "
            f"({recipe}) needs a multiple of {multiple}; use a seq_length such as "
            f"{next_multiple(b.seq_length, multiple * sizes)}"
        )


#: Length of the blocks with a scale of their own along rows and columns, of which a weight holds whole ones
#: (``csrc/quantizer.cpp: MXFP8Quantizer::get_scale_shape, NVFP4Quantizer::get_scale_shape``).
_BLOCKS = {"mxfp8": 32, "nvfp4": 16}


def _check_blocks(run: RunSpec, limits: Limits) -> None:
    p, block = run.parallel, _BLOCKS.get(run.precision.recipe, 1)
    of_tp = ((name, size, p.tp, "tensor") for name, size in limits.tp if name.endswith("ffn_hidden_size"))
    of_etp = ((name, size, p.etp, "expert_tensor") for name, size in limits.etp)
    for name, size, ranks, kind in (*of_tp, *of_etp):
        if size // ranks % block:
            raise SpecError(
                f"{name} ({size}) over {kind}_model_parallel_size ({ranks}) leaves {size // ranks}; "
                f"{run.precision.recipe} needs multiples of {block}, the elements of a scale; lower "
                f"{kind}_{'model_' * (kind == 'tensor')}parallel_size"
            )
