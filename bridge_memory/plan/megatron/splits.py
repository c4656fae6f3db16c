"""Splits of a model's layers over pipeline stages and virtual chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge_memory.spec import ModelSpec, ParallelSpec
from bridge_memory.spec.layout_string import short_layout_string

_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


#: Fields of a ParallelSpec that say how layers are split, without any.
NO_SPLIT: dict[str, Any] = {
    "num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None, "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}  # fmt: skip


def split_fields(parallel: ParallelSpec) -> dict[str, Any]:
    """Those of them that ``parallel`` sets."""
    return {name: value for name, none in NO_SPLIT.items() if (value := getattr(parallel, name)) != none}


def splits(model: ModelSpec, pp: int, vpp: int, *, exhaustive: bool = False) -> Iterator[dict[str, Any]]:
    """Fields of a ParallelSpec that split the layers over ``pp`` stages of ``vpp`` chunks.

    Evenly, as Megatron does it; with embedding or loss in the place of a layer; where neither divides or the last stage
    has MTP depths beside its share, for powers of two of ``vpp``, or ``exhaustive``, as even a layout string as there
    is, the last chunk lighter by as many layers as it has MTP depths, and by one more for the head.
    """
    layers, chunks = model.num_layers, pp * vpp
    if pp == 1:
        yield {}
        return
    if layers % chunks == 0:
        yield {}
    if not model.hybrid:
        for on in ((True, True), (False, True), (True, False)):
            if (layers + sum(on)) % chunks == 0 and layers + sum(on) >= chunks:
                yield {name: True for name, is_on in zip(_ENDS, on, strict=True) if is_on}
    depths = model.mtp_num_layers
    whole = not depths and any((layers + n) % chunks == 0 for n in (0, 1, 2))
    if (exhaustive or not (whole or vpp & (vpp - 1))) and layers >= chunks - 1 and not model.hybrid:
        for light in range(depths + 3) if exhaustive else (depths, depths + 1):
            text = balanced_layout(layers, depths, chunks, light)
            if text:
                yield {"pipeline_model_parallel_layout": text}
    if model.hybrid and layers % chunks:
        for last in range(1, layers):
            rest = layers - last
            if pp > 1 and rest % (pp - 1) == 0 and 0 <= rest // (pp - 1) - last <= 2:
                yield {"num_layers_in_last_pipeline_stage": last}


def balanced_layout(layers: int, depths: int, chunks: int, light: int) -> str:
    """A layout string whose chunks differ by one layer at most, but for the last, which has ``light`` fewer than its
    share; "" where there are too few layers for that."""
    share = -(-(layers + light) // chunks)
    last = share - light
    if last < 0:
        return ""
    rest, others = layers - last, chunks - 1
    base, more = divmod(rest, others)
    # The larger ones stand in the middle: the first stage has the embedding, and keeps the most microbatches.
    sizes = [base + (others - more <= i) for i in range(others)]
    texts = ["t" * n for n in sizes] + ["t" * last + "m" * depths + "L"]
    texts[0] = "E" + texts[0]
    return short_layout_string(texts)
