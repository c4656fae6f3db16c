"""The layers of each pipeline stage, which Megatron Bridge's own figures average. Ours."""

from __future__ import annotations

import math
from typing import Any

from bridge_memory.spec import SpecError
from bridge_memory.spec.layout_string import layout_string, parse_layout_string
from bridge_memory.table2.closed_forms import HeldLayers, Layers


def stages_of(model: Any, layers: Layers, pp: int, vpp: int | None) -> tuple[HeldLayers, ...]:
    """By a layout, or the numbers of layers that are stated, or an even split: fractions where nothing says how an
    indivisible number is split. Raises SpecError where they do not hold the model's layers."""
    count = len(layers.decoder)
    text = layout_string(getattr(model, "pipeline_model_parallel_layout", None))
    if text is not None:
        letters = parse_layout_string(text)
        if len(letters) % pp:
            raise SpecError(
                f"pipeline_model_parallel_layout has {len(letters)} chunks, not a multiple of "
                f"pipeline_model_parallel_size ({pp}); change one of them"
            )
        sizes = [float(chunk.count("t")) for chunk in letters]
        depths = [chunk.count("m") for chunk in letters]
    else:
        sizes = _chunk_sizes(model, count, pp, vpp or 1)
        depths = [0] * (len(sizes) - 1) + [layers.mtp_depths]
    if not math.isclose(sum(sizes), count):
        raise SpecError(
            f"model.num_layers ({count}) is not what the pipeline stages hold ({sum(sizes):g}); "
            "change num_layers_in_first/last_pipeline_stage or the layout"
        )
    held, start = [[0.0, 0.0] for _ in range(pp)], 0.0
    for chunk, size in enumerate(sizes):
        moe = sum(
            max(0.0, min(start + size, i + 1) - max(start, i)) for i, is_moe in enumerate(layers.decoder) if is_moe
        )
        depths_are_moe = layers.decoder[-1]
        held[chunk % pp][0] += size - moe + (0 if depths_are_moe else depths[chunk])
        held[chunk % pp][1] += moe + (depths[chunk] if depths_are_moe else 0)
        start += size
    return tuple(
        HeldLayers(dense, moe, embedding=stage == 0, output=stage == pp - 1)
        for stage, (dense, moe) in enumerate(held)
    )


def _chunk_sizes(model: Any, count: int, pp: int, vpp: int) -> list[float]:
    """Layers of each virtual chunk in the order of the microbatch's way."""
    first = getattr(model, "num_layers_in_first_pipeline_stage", None)
    last = getattr(model, "num_layers_in_last_pipeline_stage", None)
    if pp > 1 and (first is not None or last is not None):
        named = [n for n in (first, last) if n is not None]
        others = pp - len(named)
        rest = count - sum(named)
        if rest < 0 or (others == 0 and rest):
            raise SpecError(
                f"num_layers_in_first/last_pipeline_stage ({first}, {last}) do not fit num_layers "
                f"({count}) over {pp} stages; change them"
            )
        middle = rest / others if others else 0.0
        per_stage = [middle] * pp
        if first is not None:
            per_stage[0] = float(first)
        if last is not None:
            per_stage[-1] = float(last)
    else:
        slots_first = int(bool(getattr(model, "account_for_embedding_in_pipeline_split", False)))
        slots_last = int(bool(getattr(model, "account_for_loss_in_pipeline_split", False)))
        even = (count + slots_first + slots_last) / pp
        if vpp > 1 and (slots_first or slots_last):
            sizes = [even / vpp] * (pp * vpp)
            sizes[0] -= slots_first
            sizes[-1] -= slots_last
            return sizes
        per_stage = [even] * pp
        per_stage[0] -= slots_first
        per_stage[-1] -= slots_last
    return [per_stage[stage] / vpp for _ in range(vpp) for stage in range(pp)]
