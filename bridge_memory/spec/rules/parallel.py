"""Parallel sizes, and what of a model they have to divide."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits, divisors, next_multiple
from bridge_memory.spec.parts import ParallelSpec
from bridge_memory.spec.rules.attention import check_query_groups
from bridge_memory.spec.rules.context_parallel import check_context_parallel
from bridge_memory.spec.rules.experts import check_expert_bias

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_sizes(p: ParallelSpec, limits: Limits) -> None:
    world, tp, pp, cp = (
        p.world_size,
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.context_parallel_size,
    )
    ranks = tp * pp * cp
    if world % ranks:  # PS
        raise SpecError(
            f"world_size ({world}) is not divisible by tensor_model_parallel_size ({tp}) x "
            f"pipeline_model_parallel_size ({pp}) x context_parallel_size ({cp}) = {ranks}; use a multiple of "
            f"{ranks} GPUs, such as {next_multiple(world, ranks)}"
        )
    ep = p.expert_model_parallel_size
    etp = p.etp
    if world % (etp * ep * pp):  # PS
        size = etp * ep * pp
        raise SpecError(
            f"world_size ({world}) is not divisible by expert_tensor_parallel_size ({etp}) x "
            f"expert_model_parallel_size ({ep}) x pipeline_model_parallel_size ({pp}) = {size}; use a multiple "
            f"of {size} GPUs, such as {next_multiple(world, size * ranks // gcd(size, ranks))}, or lower "
            "expert_tensor_parallel_size or expert_model_parallel_size"
        )
    if p.sequence_parallel and tp == 1:  # MPC
        raise SpecError("sequence_parallel (True) needs tensor_model_parallel_size of 2 or more, not 1; drop it")
    vpp = p.virtual_pipeline_model_parallel_size
    if vpp is not None and vpp > 1 and pp == 1:  # PS
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({vpp}) needs pipeline_model_parallel_size of 2 or more, not "
            "1; drop it"
        )
    n = p.num_distributed_optimizer_instances
    if n > 1:  # PS
        if world // (tp * pp) % n:
            raise SpecError(
                f"num_distributed_optimizer_instances ({n}) does not divide the data-parallel size with context "
                f"parallelism ({world // (tp * pp)}); use a divisor of it"
            )
        if limits.experts and p.expert_data_parallel_size % n:
            raise SpecError(
                f"num_distributed_optimizer_instances ({n}) does not divide the expert data-parallel size "
                f"({p.expert_data_parallel_size}); use a divisor of it"
            )


def check_model_over_ranks(run: RunSpec, limits: Limits) -> None:
    p, i = run.parallel, run.implementation
    tp, cp, ep = p.tensor_model_parallel_size, p.context_parallel_size, p.expert_model_parallel_size
    if tp > 1:
        if limits.tp_gcd % tp:  # TC, tensor_parallel/layers.py
            for what, size in limits.tp:
                if size % tp:
                    raise SpecError(
                        f"{what} ({size}) is not divisible by tensor_model_parallel_size ({tp}); use "
                        f"{divisors(limits.tp_gcd, tp)}"
                    )
        if limits.groups_gcd % tp:
            check_query_groups(p, i, limits)
    if ep > 1:
        if not limits.experts:  # TC
            raise SpecError(f"expert_model_parallel_size ({ep}) needs a model with experts; set it to 1")
        if limits.experts_gcd % ep:  # transformer/moe/moe_layer.py: BaseMoELayer
            raise SpecError(
                f"num_moe_experts ({limits.experts_gcd}) is not divisible by expert_model_parallel_size ({ep}); "
                f"use {divisors(limits.experts_gcd, ep)}"
            )
    if limits.experts:
        etp = p.etp
        if etp > 1 and limits.etp_gcd % etp:  # transformer/moe/experts.py
            raise SpecError(
                f"moe_ffn_hidden_size ({limits.etp_gcd}) is not divisible by expert_tensor_parallel_size ({etp}); use "
                + divisors(limits.etp_gcd, etp)
            )
        if limits.expert_bias:
            check_expert_bias(etp, ep, i)
        if tp > 1 and not p.sp:  # transformer/moe/moe_layer.py: MoELayer.forward
            raise SpecError(
                f"sequence_parallel (False) with tensor_model_parallel_size ({tp}) is refused by megatron-core "
                "when training a model with experts; set sequence_parallel to True"
            )
    if cp > 1:
        s = run.batch.seq_length
        if 2 * cp > s:  # as in check_batch
            raise SpecError(
                f"context_parallel_size ({cp}) is too large for seq_length ({s}), of which every rank takes two parts; "
                f"use at most {max(1, s // 2)}"
            )
        check_context_parallel(p, i, limits)
