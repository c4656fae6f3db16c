"""The Megatron paper's closed forms, as Megatron Bridge states them: numbers in, numbers out.

Source: Megatron Bridge, ``training/utils/theoretical_memory_utils.py`` (the release 0.3.1 for dense models, its
documented successor for experts, MTP and uneven stages); Table 2 of https://arxiv.org/abs/2205.05198.

18 bytes a parameter, or 6 + 12/shard with the distributed optimizer, and 18 + 4 f/h bytes of activations a token, layer
and hidden unit. Numbers are floats, as there; units are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge_memory.spec import SpecError

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
