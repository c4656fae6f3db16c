"""Pipeline parallelism: stage sizes, layouts and the interleaved schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from bridge_memory.releases import (
    HYBRID_END_STAGES,
    HYBRID_MTP,
    LAYOUT_STRINGS,
    LAYOUT_STRINGS_WITH_MTP,
    LAYOUT_STRINGS_WITH_MTP_ANYWHERE,
    core_of,
    release_words,
)
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.layout_string import parse_layout_string, quote
from bridge_memory.spec.limits import next_multiple
from bridge_memory.spec.parts import ParallelSpec

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_stages(p: ParallelSpec, num_layers: int) -> None:
    """Raise SpecError for more (virtual) stages than layers; only a layout string can make empty stages.

    With account_for_embedding/loss_in_pipeline_split, embedding and loss each count as a layer
    (``transformer_block.py: get_num_layers_to_build``).
    """
    pp, vpp, text = (
        p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size or 1, p.pipeline_model_parallel_layout
    )  # fmt: skip
    if text is not None:
        stages = len(_chunks(text)) if pp > 1 else 1
        if pp > stages:
            raise SpecError(
                f"pipeline_model_parallel_size ({pp}) is larger than the number of stages ({stages}) in "
                f"pipeline_model_parallel_layout {quote(text)}; use at most {stages}"
            )
        return
    most = num_layers + p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
    if pp > most:
        raise SpecError(
            f"pipeline_model_parallel_size ({pp}) is larger than num_layers ({num_layers}); use at most {most}"
        )
    if pp * vpp > most:
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({vpp}) x pipeline_model_parallel_size ({pp}) is larger than "
            f"num_layers ({num_layers}); use a virtual size of at most {most // pp}"
        )


def check_split_release(run: RunSpec) -> None:
    """Raise SpecError for pipeline splits that the release does not support, or accepts and ignores."""
    p, i = run.parallel, run.implementation
    text, core = p.pipeline_model_parallel_layout, core_of(i)
    if text is not None and not LAYOUT_STRINGS_WITH_MTP_ANYWHERE(i):
        if not LAYOUT_STRINGS(i):
            raise SpecError(
                f"pipeline_model_parallel_layout ({text[:40]}) needs {LAYOUT_STRINGS} or later, not "
                f"{release_words(core)}; use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
            )
        *before, last = _chunks(text)
        if not LAYOUT_STRINGS_WITH_MTP(i) and any("m" in chunk for chunk in (*before, last)):
            raise SpecError(
                f"pipeline_model_parallel_layout ({text[:40]}) has m (MTP), which needs {LAYOUT_STRINGS_WITH_MTP} or "
                f"later, not {release_words(core)}; use num_layers_in_first_pipeline_stage and "
                "num_layers_in_last_pipeline_stage"
            )
        if any("m" in chunk for chunk in before):
            raise SpecError(
                f"pipeline_model_parallel_layout ({text[:40]}) has m (MTP) before the last stage, which needs "
                f"{LAYOUT_STRINGS_WITH_MTP_ANYWHERE} or later, not {release_words(core)}; put it into the last stage"
            )
    if run.model.hybrid and run.model.mtp_num_layers and not HYBRID_MTP(i):
        raise SpecError(
            f"mtp_num_layers ({run.model.mtp_num_layers}) builds nothing in hybrid (Mamba) models of megatron_core "
            f"{release_words(core)}; set it to 0, or use {HYBRID_MTP.number} or later"
        )
    if run.model.hybrid and not HYBRID_END_STAGES(i):
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if getattr(p, name) is not None:
                raise SpecError(
                    f"{name} ({getattr(p, name)}) is ignored for hybrid (Mamba) models by megatron-core "
                    f"{release_words(core)}; drop it, or use {HYBRID_END_STAGES.number} or later"
                )


def check_schedule(run: RunSpec) -> None:
    """``pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving``."""
    p = run.parallel
    pp, group = p.pipeline_model_parallel_size, p.microbatch_group_size_per_vp_stage
    vpp = virtual_stages(p)
    if vpp == 1:
        return
    name = "microbatch_group_size_per_vp_stage"
    if group is None:
        group = pp
    elif group < pp:
        raise SpecError(f"{name} ({group}) is smaller than pipeline_model_parallel_size ({pp}); set it to {pp} or more")
    m = run.num_microbatches
    if run.batch.global_batch_size is None:
        number = f"the number of microbatches ({m}, for want of a global_batch_size)"
    else:
        number = f"the number of microbatches ({m} = global_batch_size / micro_batch_size / data-parallel size)"
    step = run.batch.micro_batch_size * p.data_parallel_size
    if p.microbatch_group_size_per_vp_stage is not None and pp <= m < group:
        raise SpecError(f"{name} ({group}) is larger than {number}; use {pp} to {m}")
    if m < group:
        raise SpecError(
            f"{number} is smaller than {name} ({group}), which virtual_pipeline_model_parallel_size ({vpp}) needs; "
            f"set global_batch_size to {group * step} or more"
        )
    if 0 < m % group < pp:
        raise SpecError(
            f"{number} leaves a last group of {m % group} with {name} ({group}), fewer than "
            f"pipeline_model_parallel_size ({pp}); set global_batch_size to {next_multiple(m, group) * step}"
        )


def virtual_stages(p: ParallelSpec) -> int:
    """Virtual stages per rank: as given, or as the layout string has them."""
    vpp, layout = p.virtual_pipeline_model_parallel_size or 1, p.pipeline_model_parallel_layout
    if vpp > 1 or layout is None:
        return vpp
    return max(1, len(_chunks(layout)) // p.pipeline_model_parallel_size)


@lru_cache(maxsize=1024)
def _chunks(text: str) -> tuple[str, ...]:
    return tuple(parse_layout_string(text))
