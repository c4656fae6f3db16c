"""What the closed forms need of a container, and what they suppose about it.

A container is anything with the attributes that Bridge's functions read: a ``ConfigContainer`` or a
``SimpleNamespace`` with ``model``, ``train``, ``optimizer`` and ``data_parallel_size``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bridge_memory.readers.container_fields import (
    container_part,
    data_parallel_size,
    positive_size,
    vocabulary,
)
from bridge_memory.readers.patterns import layer_pattern
from bridge_memory.spec import SpecError
from bridge_memory.spec.layout_string import layout_string, parse_layout_string
from bridge_memory.table2.closed_forms import Table2, Table2Stage


def table2_from_container(config: Any) -> Table2:
    """Read what the closed forms need. Raises SpecError naming the field that is missing or wrong."""
    model = container_part(config, "model")
    train = container_part(config, "train")
    optimizer = getattr(config, "optimizer", None)
    ddp = getattr(config, "ddp", None)

    num_layers = positive_size(model, "num_layers")
    hidden = positive_size(model, "hidden_size")
    heads = positive_size(model, "num_attention_heads")
    ffn = positive_size(model, "ffn_hidden_size", 4 * hidden)
    tp = positive_size(model, "tensor_model_parallel_size", 1)
    pp = positive_size(model, "pipeline_model_parallel_size", 1)
    cp = positive_size(model, "context_parallel_size", 1)
    vpp = getattr(model, "virtual_pipeline_model_parallel_size", None)
    experts = getattr(model, "num_moe_experts", None) or 0
    pattern = (False,) * num_layers
    if experts:
        pattern = layer_pattern(getattr(model, "moe_layer_freq", 1), num_layers, "model.moe_layer_freq")
    mtp = getattr(model, "mtp_num_layers", None) or 0
    distributed = bool(
        getattr(optimizer, "use_distributed_optimizer", False) or getattr(ddp, "use_distributed_optimizer", False)
    )
    seq_length = getattr(model, "seq_length", None) or getattr(getattr(config, "dataset", None), "seq_length", None)
    if not seq_length:
        raise SpecError("model.seq_length is not set; set it (or dataset.seq_length)")
    stages = _stages(model, num_layers, pp, vpp, pattern, mtp)
    return Table2(
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=getattr(model, "num_query_groups", None) or heads,
        kv_channels=getattr(model, "kv_channels", None) or hidden / heads,
        ffn_hidden_size=ffn,
        gated_linear_multiplier=1.5 if counts_a_gate(model) else 1.0,
        vocab_size=padded_vocab_size(config, tp),
        share_embeddings_and_output_weights=bool(getattr(model, "share_embeddings_and_output_weights", False)),
        seq_length=seq_length,
        micro_batch_size=positive_size(train, "micro_batch_size", 1, part="train"),
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=positive_size(model, "expert_model_parallel_size", 1),
        etp=positive_size(model, "expert_tensor_parallel_size", tp),
        data_parallel_size=data_parallel_size(config) if distributed else 1,
        use_distributed_optimizer=distributed,
        num_experts=experts,
        moe_ffn_hidden_size=getattr(model, "moe_ffn_hidden_size", None) or ffn,
        moe_shared_expert_intermediate_size=getattr(model, "moe_shared_expert_intermediate_size", None) or 0,
        moe_latent_size=getattr(model, "moe_latent_size", None),
        mtp_num_layers=mtp,
        mtp_is_moe=pattern[-1],
        stages=stages,
    )


def assumptions(config: Any, t: Table2, *, activation: bool) -> tuple[str, ...]:
    """What the closed forms suppose about this container, a sentence each."""
    model = config.model
    out = []
    if t.use_distributed_optimizer:
        out.append(
            f"6 + 12/shard bytes a parameter: bf16 weights, fp32 gradients, Adam in fp32 over "
            f"{t.data_parallel_size * t.cp} data- and context-parallel ranks"
        )
    else:
        out.append("18 bytes a parameter: bf16 weights, fp32 gradients and Adam in fp32, not sharded")
    if getattr(model, "gated_linear_unit", False) and not counts_a_gate(model):
        out.append("the gate of a gated unit other than SwiGLU is not counted, as in Megatron Bridge")
    if getattr(model, "multi_latent_attention", False):
        out.append("multi-latent attention is counted as grouped-query attention, as in Megatron Bridge")
    if getattr(model, "is_hybrid_model", False) or getattr(model, "hybrid_override_pattern", None):
        out.append("every layer of a hybrid model is counted as a transformer layer, as in Megatron Bridge")
    if t.num_experts:
        out.append("routers and expert biases are not counted, as in Megatron Bridge")
        dense = _argmax(t.stage_dense_parameters(s) for s in t.stages)
        routed = _argmax(t.stage_routed_parameters(s) for s in t.stages)
        if t.stages[dense] != t.stages[routed] and t.stage_routed_parameters(
            t.stages[dense]
        ) < t.stage_routed_parameters(t.stages[routed]):
            out.append(
                f"the dense maximum (stage {dense}) and the expert maximum (stage {routed}) are added although "
                "they are on different stages, as in Megatron Bridge; estimate_training_memory_by_stage does not"
            )
    if t.mtp_num_layers and t.pp > 1:
        out.append("the second copy of the embedding that an MTP stage holds is not counted")
    if getattr(config, "peft", None) is not None:
        out.append("every parameter is counted as trained although peft is set, as in Megatron Bridge")
    if activation:
        missing = []
        if not getattr(model, "sequence_parallel", False):
            missing.append("sequence_parallel is off")
        granularity = getattr(model, "recompute_granularity", None)
        if granularity != "selective":
            missing.append(f"recompute_granularity is {granularity}")
        tail = f", although {' and '.join(missing)}" if missing else ""
        out.append(f"activations assume sequence parallelism and selective recomputation{tail}")
    return tuple(out)


def counts_a_gate(model: Any) -> bool:
    """Bridge's rule: gated_linear_unit, and the activation is torch's silu (told by name: torch may be absent)."""
    function = getattr(model, "activation_func", None)
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return bool(getattr(model, "gated_linear_unit", False)) and name in ("silu", "swiglu")


def padded_vocab_size(config: Any, tp: int) -> int:
    """Bridge ``_get_vocab_size``: padded only with ``should_pad_vocab``."""
    vocab, padded = vocabulary(config)
    model = container_part(config, "model")
    if not padded:
        return vocab
    multiple = (getattr(model, "make_vocab_size_divisible_by", None) or 128) * tp
    return -(-vocab // multiple) * multiple


def _argmax(values: Iterable[float]) -> int:
    listed = list(values)
    return listed.index(max(listed))


def _stages(
    model: Any, num_layers: int, pp: int, vpp: int | None, pattern: tuple[bool, ...], mtp: int
) -> tuple[Table2Stage, ...]:
    """Layers of each stage; fractions where nothing says how an indivisible number is split (Bridge averages)."""
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
        sizes = _chunk_sizes(model, num_layers, pp, vpp or 1)
        depths = [0] * (len(sizes) - 1) + [mtp]
    if not math.isclose(sum(sizes), num_layers):
        raise SpecError(
            f"model.num_layers ({num_layers}) is not what the pipeline stages hold ({sum(sizes):g}); "
            "change num_layers_in_first/last_pipeline_stage or the layout"
        )
    dense, moe, start = [0.0] * pp, [0.0] * pp, 0.0
    held_depths = [0] * pp
    for chunk, size in enumerate(sizes):
        stage = chunk % pp
        experts = sum(
            max(0.0, min(start + size, i + 1) - max(start, i)) for i, is_moe in enumerate(pattern) if is_moe
        )
        moe[stage] += experts
        dense[stage] += size - experts
        held_depths[stage] += depths[chunk]
        start += size
    return tuple(
        Table2Stage(dense[r], moe[r], embedding=r == 0, output=r == pp - 1, mtp_depths=held_depths[r])
        for r in range(pp)
    )


def _chunk_sizes(model: Any, num_layers: int, pp: int, vpp: int) -> list[float]:
    """Layers of each virtual chunk in the order of the microbatch's way."""
    first = getattr(model, "num_layers_in_first_pipeline_stage", None)
    last = getattr(model, "num_layers_in_last_pipeline_stage", None)
    if pp > 1 and (first is not None or last is not None):
        named = [n for n in (first, last) if n is not None]
        others = pp - len(named)
        rest = num_layers - sum(named)
        if rest < 0 or (others == 0 and rest):
            raise SpecError(
                f"num_layers_in_first/last_pipeline_stage ({first}, {last}) do not fit num_layers "
                f"({num_layers}) over {pp} stages; change them"
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
        even = (num_layers + slots_first + slots_last) / pp
        if vpp > 1 and (slots_first or slots_last):
            sizes = [even / vpp] * (pp * vpp)
            sizes[0] -= slots_first
            sizes[-1] -= slots_last
            return sizes
        per_stage = [even] * pp
        per_stage[0] -= slots_first
        per_stage[-1] -= slots_last
    return [per_stage[stage] / vpp for _ in range(vpp) for stage in range(pp)]
