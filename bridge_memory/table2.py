"""The Megatron paper's closed forms, as Megatron Bridge states them.

Source: Megatron Bridge, ``training/utils/theoretical_memory_utils.py`` (the release 0.3.1 for dense models, its
documented successor for experts, MTP and uneven stages); Table 2 of https://arxiv.org/abs/2205.05198.

These are estimates of another kind than the inventory's (see ``bridge_memory.estimate``): 18 bytes a parameter,
or 6 + 12/shard with the distributed optimizer, and 18 + 4 f/h bytes of activations a token, layer and hidden
unit. They exist because people compare against them. Numbers are floats, as there; units are bytes.

A container is anything with the attributes that Bridge's functions read: a ``ConfigContainer`` or a
``SimpleNamespace`` with ``model``, ``train``, ``optimizer`` and ``data_parallel_size``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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

#: bf16 weight 2 + fp32 main gradient 4, on every rank.
REPLICATED_BYTES = 6.0
#: fp32 master weight 4 + two Adam moments 8, divided by the distributed optimizer.
OPTIMIZER_BYTES = 12.0

DENSE = "dense parameters and optimizer"
ROUTED = "routed expert parameters and optimizer"
ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Table2Stage:
    """What one pipeline stage holds: fractions of layers are possible where PP does not divide them."""

    dense_layers: float
    moe_layers: float
    embedding: bool
    output: bool
    mtp_depths: int = 0

    @property
    def layers(self) -> float:
        return self.dense_layers + self.moe_layers


@dataclass(frozen=True, slots=True)
class Table2:
    """The fields that the closed forms read, under Megatron's names, and the forms themselves."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: float
    ffn_hidden_size: int
    #: 3/2 where Bridge counts a gate (gated_linear_unit with silu), else 1.
    gated_linear_multiplier: float
    vocab_size: int
    share_embeddings_and_output_weights: bool
    seq_length: int
    micro_batch_size: int
    tp: int
    pp: int
    vpp: int | None
    cp: int
    ep: int
    etp: int
    data_parallel_size: int
    use_distributed_optimizer: bool
    num_experts: int
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int
    moe_latent_size: int | None
    mtp_num_layers: int
    mtp_is_moe: bool
    stages: tuple[Table2Stage, ...]

    # ---- parameters (elements, before TP) ----

    @property
    def attention_parameters(self) -> float:
        """Query and output projections a d h each, key and value g d h each."""
        query = self.kv_channels * self.num_attention_heads
        return 2 * self.hidden_size * query * (1 + self.num_query_groups / self.num_attention_heads)

    @property
    def dense_layer_parameters(self) -> float:
        mlp = 2 * self.hidden_size * self.ffn_hidden_size * self.gated_linear_multiplier
        return self.attention_parameters + mlp + self.norms_parameters

    @property
    def norms_parameters(self) -> float:
        """Two norms a layer with weight and bias."""
        return 4.0 * self.hidden_size

    @property
    def moe_layer_parameters(self) -> float:
        """A MoE layer without its routed experts: attention, norms, shared experts, latent projections."""
        shared = 2 * self.hidden_size * self.moe_shared_expert_intermediate_size * self.gated_linear_multiplier
        latent = 2 * self.hidden_size * (self.moe_latent_size or 0)
        return self.attention_parameters + shared + latent + self.norms_parameters

    @property
    def routed_layer_parameters(self) -> float:
        """All E routed experts of one layer."""
        width = self.moe_latent_size or self.hidden_size
        return 2.0 * width * self.moe_ffn_hidden_size * self.gated_linear_multiplier * self.num_experts

    @property
    def mtp_depth_parameters(self) -> float:
        """One MTP depth without routed experts: eh_proj (2h -> h), three norms, and a layer of the last kind."""
        layer = self.moe_layer_parameters if self.mtp_is_moe else self.dense_layer_parameters
        return 2.0 * self.hidden_size**2 + 6.0 * self.hidden_size + layer

    @property
    def final_layernorm_parameters(self) -> float:
        return 2.0 * self.hidden_size

    @property
    def embedding_parameters(self) -> float:
        return float(self.hidden_size * self.vocab_size)

    @property
    def transformer_parameters(self) -> float:
        """All layers with their experts, MTP depths and the final norm."""
        dense = sum(s.dense_layers for s in self.stages) * self.dense_layer_parameters
        moe = sum(s.moe_layers for s in self.stages) * (self.moe_layer_parameters + self.routed_layer_parameters)
        mtp = self.mtp_num_layers * self.mtp_depth_parameters
        if self.mtp_is_moe:
            mtp += self.mtp_num_layers * self.routed_layer_parameters
        return dense + moe + mtp + self.final_layernorm_parameters

    @property
    def total_embedding_parameters(self) -> float:
        return self.embedding_parameters * (1 if self.share_embeddings_and_output_weights else 2)

    @property
    def total_parameters(self) -> float:
        return self.transformer_parameters + self.total_embedding_parameters

    # ---- one GPU's shard (elements) ----

    def stage_transformer_parameters(self, stage: Table2Stage) -> float:
        """Dense parameters of a stage's layers. Bridge spreads the final norm over the stages."""
        layers = stage.dense_layers * self.dense_layer_parameters + stage.moe_layers * self.moe_layer_parameters
        return (
            layers
            + stage.mtp_depths * self.mtp_depth_parameters
            + self.final_layernorm_parameters / len(self.stages)
        )

    def stage_dense_parameters(self, stage: Table2Stage) -> float:
        """Everything of a stage but its routed experts, divided by TP."""
        tables = int(stage.embedding) + int(stage.output)
        if stage.embedding and stage.output and self.share_embeddings_and_output_weights:
            tables = 1
        return (self.stage_transformer_parameters(stage) + tables * self.embedding_parameters) / self.tp

    def stage_routed_parameters(self, stage: Table2Stage) -> float:
        """Routed experts of a stage, divided by EP and the expert tensor-parallel size."""
        layers = stage.moe_layers + (stage.mtp_depths if self.mtp_is_moe else 0)
        return layers * self.routed_layer_parameters / (self.ep * self.etp)

    @property
    def dense_bytes_per_parameter(self) -> float:
        if not self.use_distributed_optimizer:
            return REPLICATED_BYTES + OPTIMIZER_BYTES
        return REPLICATED_BYTES + OPTIMIZER_BYTES / (self.data_parallel_size * self.cp)

    @property
    def routed_bytes_per_parameter(self) -> float:
        if not self.use_distributed_optimizer:
            return REPLICATED_BYTES + OPTIMIZER_BYTES
        return REPLICATED_BYTES + OPTIMIZER_BYTES / self.expert_data_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same routed experts, context parallelism included."""
        ranks = self.data_parallel_size * self.cp * self.tp
        if ranks % (self.ep * self.etp):
            raise SpecError(
                f"data_parallel_size ({self.data_parallel_size}) x context_parallel_size ({self.cp}) x "
                f"tensor_model_parallel_size ({self.tp}) is not divisible by expert_model_parallel_size "
                f"({self.ep}) x expert_tensor_parallel_size ({self.etp}); change one of them"
            )
        return ranks // (self.ep * self.etp)

    # ---- activations (bytes) ----

    @property
    def layer_activation_bytes(self) -> float:
        """One layer, one microbatch, before TP and CP: s b h (18 + 4 f/h)."""
        tokens = self.seq_length * self.micro_batch_size
        return tokens * self.hidden_size * (18 + 4 * (self.ffn_hidden_size / self.hidden_size))

    @property
    def interleaved_schedule_memory_penalty(self) -> float | None:
        """1 + (p - 1)/(p v) with virtual stages, else None."""
        return None if self.vpp is None else 1 + (self.pp - 1) / (self.pp * self.vpp)

    def in_flight_microbatches(self, stage: int, num_microbatches: int | None) -> float:
        """Microbatches whose activations stage ``stage`` holds at once, as a multiple of its layers.

        1F1B: min(p - r, m). Interleaved: the warm-up's (p - r - 1) 2 + (v - 1) p chunks and one more, in units
        of the stage's v chunks; on stage 0 that is the paper's p + (p - 1)/v.
        """
        p, m = self.pp, num_microbatches
        if self.vpp is None:
            return float(p - stage if m is None else min(p - stage, m))
        chunks = (p - stage - 1) * 2 + (self.vpp - 1) * p + 1
        if stage and m is not None:  # stage 0 keeps Bridge's number, which knows no m here
            chunks = min(chunks, m * self.vpp)
        return chunks / self.vpp

    def activation_bytes(self, stage: int, num_microbatches: int | None) -> float:
        """Activations of one stage on one GPU, divided by TP and CP as if everything were."""
        tokens = self.seq_length * self.micro_batch_size
        held = self.stages[stage]
        in_flight = self.in_flight_microbatches(stage, num_microbatches)
        total = self.layer_activation_bytes * held.layers * in_flight
        if held.embedding:  # token ids and positions (8 bytes), dropout mask (1 byte a hidden unit)
            total += (8 * tokens + tokens * self.hidden_size) * in_flight
        total += self.layer_activation_bytes * held.mtp_depths * in_flight
        if held.output:  # the output layer's input and the fp32 logits, for every depth
            logits = tokens * self.hidden_size * 4 * (1 + self.vocab_size / self.hidden_size)
            total += logits * (1 + (held.mtp_depths if self.pp > 1 else 0))
        return total / (self.tp * self.cp)


# ---------------------------------------------------------------------------------------------------------------
# Reading a container
# ---------------------------------------------------------------------------------------------------------------


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
