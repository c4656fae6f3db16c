"""Sequence length and batch sizes against the parallel sizes that divide them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.encoders import items_of
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import divisors, next_multiple
from bridge_memory.spec.rules.pipeline import check_schedule

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_batch(run: RunSpec) -> None:
    p, b = run.parallel, run.batch
    tp, cp, s = p.tensor_model_parallel_size, p.context_parallel_size, b.seq_length
    m = run.model
    learned = m.position_embedding_type == "learned_absolute" and not b.packed_sequences
    if learned and 0 < m.max_position_embeddings < s:
        # MLM validate_args; an index out of range in models/common/embeddings/language_model_embedding.py
        raise SpecError(
            f"seq_length ({s}) is longer than the model's table of learned positions, max_position_embeddings "
            f"({m.max_position_embeddings}); use at most that"
        )
    if cp > 1 and s % (2 * cp):
        # MLM; Bridge training/config.py: ConfigContainer.validate
        raise SpecError(
            f"seq_length ({s}) is not divisible by 2 x context_parallel_size ({cp}); use a multiple of {2 * cp}, "
            f"such as {next_multiple(s, 2 * cp)}"
            + (f", or context_parallel_size {divisors(s // 2, cp)}" if s % 2 == 0 else "")
        )
    if tp > 1 and p.sp and s // cp % tp:
        # tensor_parallel/mappings.py: _split_along_first_dim
        raise SpecError(
            f"seq_length ({s}) over context_parallel_size ({cp}) is not divisible by tensor_model_parallel_size "
            f"({tp}), which sequence_parallel needs; use a multiple of {tp * cp}, such as "
            f"{next_multiple(s, tp * cp * (2 if cp > 1 else 1))}"
        )
    for encoder in m.encoders:
        if encoder.structure is not None:
            items_of(encoder.structure, b)
    g = b.global_batch_size
    if g is not None:
        step = b.micro_batch_size * (p.world_size // (tp * p.pipeline_model_parallel_size * cp))
        if g % step:  # num_microbatches_calculator.py: ConstantNumMicroBatchesCalculator
            raise SpecError(
                f"global_batch_size ({g}) is not divisible by micro_batch_size ({b.micro_batch_size}) x "
                f"data-parallel size ({p.data_parallel_size}) = {step}; use a multiple of it, such as "
                f"{next_multiple(g, step)}"
            )
    if p.pipeline_model_parallel_size > 1:
        check_schedule(run)
