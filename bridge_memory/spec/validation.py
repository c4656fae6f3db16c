"""Validation of a RunSpec when it is constructed: runs the checks of ``rules`` in order.

``fields`` checks types, names and ranges of single fields; ``limits`` checks the model by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bridge_memory.spec.layout import layout
from bridge_memory.spec.limits import Limits, limits_of
from bridge_memory.spec.rules.attention import check_attention_release, check_kernels
from bridge_memory.spec.rules.batch import check_batch
from bridge_memory.spec.rules.diffusion import check_diffusion
from bridge_memory.spec.rules.engine_options import check_engine
from bridge_memory.spec.rules.implementation import check_implementation
from bridge_memory.spec.rules.optimizer import check_data_parallel, check_optimizer
from bridge_memory.spec.rules.parallel import check_model_over_ranks, check_sizes
from bridge_memory.spec.rules.peft import check_adapters, check_frozen, check_targets
from bridge_memory.spec.rules.pipeline import check_split_release, check_stages
from bridge_memory.spec.rules.precision import check_precision
from bridge_memory.spec.rules.recompute import check_layout, check_recompute
from bridge_memory.spec.rules.teacher import check_teacher
from bridge_memory.spec.rules.transformers import check_transformers

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def validate(run: RunSpec) -> None:
    """Raise SpecError on the first contradiction in ``run``."""
    limits = limits_of(run.model)
    for rule in RULES:
        rule(run, limits)


#: The checks, in order: first those that no other number of GPUs would pass.
RULES: tuple[Callable[[RunSpec, Limits], None], ...] = (
    lambda run, limits: check_engine(run),
    lambda run, limits: check_diffusion(run),
    lambda run, limits: check_transformers(run),
    lambda run, limits: check_stages(run.parallel, run.model.num_layers),
    check_model_over_ranks,
    lambda run, limits: check_sizes(run.parallel, limits),
    lambda run, limits: check_split_release(run),
    lambda run, limits: check_batch(run),
    check_precision,
    lambda run, limits: check_data_parallel(run),
    lambda run, limits: check_optimizer(run),
    lambda run, limits: check_frozen(run),
    lambda run, limits: check_adapters(run.peft, run.parallel, run.model, limits),
    lambda run, limits: None if run.implementation.torch_layers else check_targets(run.peft, run.model, limits),
    lambda run, limits: None if run.recompute.granularity is None else check_recompute(run, limits),
    check_implementation,
    check_attention_release,
    check_kernels,
    lambda run, limits: check_layout(run, layout(run.model, run.parallel)),
    lambda run, limits: check_teacher(run),
)
