"""The Megatron paper's closed forms, as Megatron Bridge 0.6.2 states them: numbers in, numbers out.

Source: Megatron Bridge 0.6.2, ``training/utils/theoretical_memory_utils.py``; Table 2 of
https://arxiv.org/abs/2205.05198. 18 bytes a parameter, or 6 + 12/shard with the distributed optimizer, and 18 + 4 f/h
bytes of activations a token, layer and hidden unit. Units are elements and bytes, mostly floats, as there. Sums and
products are taken in Bridge's order, so that the last bit is Bridge's too.
"""

from __future__ import annotations

import math
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
class Layers:
    """Layer by layer whether it has routed experts: the decoder's layers, then one more for each MTP depth.

    Bridge takes an MTP depth for another layer of the last kind: its projection and its own norms are not counted.
    """

    decoder: tuple[bool, ...]
    mtp_depths: int = 0

    @property
    def all(self) -> tuple[bool, ...]:
        return self.decoder + self.decoder[-1:] * self.mtp_depths

    @property
    def total(self) -> int:
        return len(self.all)

    @property
    def moe(self) -> int:
        return sum(self.all)

    @property
    def dense(self) -> int:
        return self.total - self.moe


@dataclass(frozen=True, slots=True)
class HeldLayers:
    """What one pipeline stage holds; fractions of layers are possible where PP does not divide them."""

    dense: float
    moe: float
    embedding: bool
    output: bool

    @property
    def total(self) -> float:
        return self.dense + self.moe


@dataclass(frozen=True, slots=True)
class ModelState:
    """Weights, gradients and optimizer state: the fields that are read, under Megatron's names, and the forms."""

    layers: Layers
    hidden_size: float
    num_attention_heads: float
    num_query_groups: float
    kv_channels: float
    ffn_hidden_size: float
    #: Matrices h x f of an MLP: 3.0 with gated_linear_unit and silu, else 2.0.
    projections: float
    #: After padding.
    vocab_size: float
    share_embeddings_and_output_weights: bool
    num_experts: float = 0
    moe_ffn_hidden_size: float = 0
    moe_shared_expert_intermediate_size: float = 0
    moe_latent_size: float | None = None
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    data_parallel_size: int = 1
    use_distributed_optimizer: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None

    # ---- parameters of the whole model (elements) ----

    @property
    def dense_layer(self) -> float:
        """A layer without experts: attention, two norms with weight and bias, MLP."""
        return self._attention_and_norms + self.projections * self.hidden_size * self.ffn_hidden_size

    @property
    def moe_layer(self) -> float:
        """A layer with experts but for the routed ones: attention, norms, shared experts, latent projections."""
        shared = self.projections * self.hidden_size * self.moe_shared_expert_intermediate_size
        latent = 0.0 if self.moe_latent_size is None else 2 * self.hidden_size * self.moe_latent_size
        return self._attention_and_norms + (shared + latent)

    @property
    def _attention_and_norms(self) -> float:
        """Query and output projections a d h each, key and value g d h each; 4 h."""
        h, a = self.hidden_size, self.num_attention_heads
        ratio = self.kv_channels * a / h
        return 2 * h * h * ((1 + self.num_query_groups / a) * ratio) + 4 * h

    @property
    def routed_layer(self) -> float:
        """All E routed experts of one layer."""
        width = self.hidden_size if self.moe_latent_size is None else self.moe_latent_size
        return self.projections * width * self.moe_ffn_hidden_size * self.num_experts

    @property
    def dense_by_layer(self) -> list[float]:
        dense, moe = self.dense_layer, self.moe_layer
        return [moe if kind else dense for kind in self.layers.all]

    @property
    def routed_by_layer(self) -> list[float]:
        routed = self.routed_layer
        return [routed if kind else 0.0 for kind in self.layers.all]

    @property
    def final_layernorm(self) -> float:
        return 2 * self.hidden_size

    @property
    def embedding(self) -> float:
        """One table of h V."""
        return self.hidden_size * self.vocab_size

    @property
    def dense_parameters(self) -> float:
        """Everything but the routed experts and the tables."""
        return sum(self.dense_by_layer) + self.final_layernorm

    @property
    def routed_parameters(self) -> float:
        return sum(self.routed_by_layer)

    @property
    def embedding_parameters(self) -> float:
        return self.embedding if self.share_embeddings_and_output_weights else self.embedding + self.embedding

    @property
    def total_parameters(self) -> float:
        return self.dense_parameters + self.routed_parameters + self.embedding_parameters

    # ---- the most loaded GPU's shard, as Bridge has it (elements) ----

    def dense_parameters_per_gpu(self) -> float:
        """Layers averaged over the stages and one table (two where PP is 1); with layers stated for the first or last
        stage the heaviest stage, its tables and its norm included. SpecError where those do not fit."""
        stages = self._stated_stages()
        if stages is None:
            table = self.embedding / self.tp
            if self.pp == 1 and not self.share_embeddings_and_output_weights:
                table += self.embedding / self.tp
            return self.dense_parameters / (self.pp * self.tp) + table
        sums = _stage_sums(self.dense_by_layer, stages)
        sums[-1] += self.final_layernorm
        sums[0] += self.embedding
        sums[-1] += self.embedding
        return max(sums) / self.tp

    def routed_parameters_per_gpu(self) -> float:
        """The same of routed experts, over EP and the experts' TP."""
        stages = self._stated_stages()
        if stages is None:
            return self.routed_parameters / (self.pp * self.ep * self.etp)
        return max(_stage_sums(self.routed_by_layer, stages)) / (self.ep * self.etp)

    def _stated_stages(self) -> list[list[int]] | None:
        """Decoder layers of each stage, None where neither the first's nor the last's number is stated."""
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if first is None and last is None:
            return None
        layers, pp = len(self.layers.decoder), self.pp
        field = f"num_layers_in_first/last_pipeline_stage ({first}, {last})"
        if pp <= 1:
            raise SpecError(f"{field} need more than one pipeline stage; unset them or raise PP")
        named = [n for n in (first, last) if n is not None]
        others, rest = pp - len(named), layers - sum(named)
        if (others and (rest <= 0 or rest % others)) or (not others and rest):
            raise SpecError(f"{field} do not fit num_layers ({layers}) over {pp} stages; change them")
        sizes = [rest // others if others else 0] * pp
        if first is not None:
            sizes[0] = first
        if last is not None:
            sizes[-1] = last
        chunks = 1 if self.vpp is None else self.vpp
        if chunks < 1 or any(size % chunks for size in sizes):
            raise SpecError(
                f"virtual_pipeline_model_parallel_size ({chunks}) does not divide stages of {sizes} layers; change it"
            )
        held: list[list[int]] = [[] for _ in range(pp)]
        start = 0
        for _ in range(chunks):
            for stage, size in enumerate(sizes):
                held[stage] += range(start, start + size // chunks)
                start += size // chunks
        return held

    # ---- bytes ----

    @property
    def dense_bytes_per_parameter(self) -> float:
        return self._bytes_per_parameter(self.data_parallel_size * self.cp)

    @property
    def routed_bytes_per_parameter(self) -> float:
        """Over the ranks that hold the same routed experts, context parallelism included."""
        ranks = self.data_parallel_size * self.tp * self.cp
        return self._bytes_per_parameter(ranks // (self.ep * self.etp))

    def _bytes_per_parameter(self, shard: int) -> float:
        if not self.use_distributed_optimizer:
            return REPLICATED_BYTES + OPTIMIZER_BYTES
        return REPLICATED_BYTES + OPTIMIZER_BYTES / max(1, shard)

    # ---- ours: one stage's shard (elements) ----

    def stage_dense_parameters(self, held: HeldLayers) -> float:
        """What the stage itself holds of everything but routed experts, over TP: the final norm on the last, a table
        on the first and the last."""
        tables = int(held.embedding) + int(held.output)
        if held.embedding and held.output and self.share_embeddings_and_output_weights:
            tables = 1
        layers = held.dense * self.dense_layer + held.moe * self.moe_layer
        return (layers + held.output * self.final_layernorm + tables * self.embedding) / self.tp

    def stage_routed_parameters(self, held: HeldLayers) -> float:
        return held.moe * self.routed_layer / (self.ep * self.etp)


def _stage_sums(by_layer: list[float], stages: list[list[int]]) -> list[float]:
    """Sums over the layers of each stage; what comes after the decoder's layers (MTP depths) is on the last."""
    sums = [sum(by_layer[layer] for layer in stage) for stage in stages]
    sums[-1] += sum(by_layer[sum(map(len, stages)) :])
    return sums


@dataclass(frozen=True, slots=True)
class Activations:
    """What is kept for the backward pass: the fields that are read, and the forms."""

    layers: Layers
    seq_length: float
    micro_batch_size: float
    hidden_size: float
    ffn_hidden_size: float
    #: Hidden units of a MoE layer that one token uses: top-k x moe_ffn_hidden_size + shared.
    moe_width: float
    #: After padding; read where there are logits.
    vocab_size: float | None
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1

    @property
    def layer_bytes(self) -> float:
        """One layer, one microbatch, before TP and CP: s b h (18 + 4 f/h) with f averaged over all layers."""
        f = self.layers.dense * self.ffn_hidden_size + self.layers.moe * self.moe_width
        return self._layer_bytes(f / (self.layers.total * self.hidden_size))

    def _layer_bytes(self, ratio: float) -> float:
        return self.seq_length * self.micro_batch_size * self.hidden_size * (18 + 4 * ratio)

    @property
    def interleaved_schedule_memory_penalty(self) -> float | None:
        """1 + (p - 1)/(p v) with virtual stages, else None."""
        return None if self.vpp is None else 1 + (self.pp - 1) / (self.pp * self.vpp)

    def in_flight_microbatches(self, num_microbatches: int | None) -> int:
        """On the first stage, as Bridge prints it."""
        penalty = self.interleaved_schedule_memory_penalty
        if penalty is not None:
            return math.ceil(penalty * self.pp)
        return self.pp if num_microbatches is None else min(num_microbatches, self.pp)

    def first_stage_bytes(self, num_microbatches: int | None) -> float:
        """Bridge's figure: p microbatches of L/p layers, MTP depths among them; logits only where PP is 1."""
        s, b, h, p = self.seq_length, self.micro_batch_size, self.hidden_size, self.pp
        # Token ids and positions (8 bytes), dropout mask (1 byte a hidden unit).
        held = self.layer_bytes * self.layers.total + 8 * s * b * p + s * b * h * p
        penalty = self.interleaved_schedule_memory_penalty
        if penalty is not None:
            held *= penalty
        elif p > 1 and num_microbatches is not None:
            held *= min(1, num_microbatches / p)
        if p == 1:
            held += self._logits
        return held / (self.tp * self.cp)

    @property
    def _logits(self) -> float:
        """The output layer's input and the fp32 logits."""
        assert self.vocab_size is not None
        h = self.hidden_size
        return self.seq_length * self.micro_batch_size * h * 4 * (1 + self.vocab_size / h)

    # ---- ours: any stage ----

    def stage_bytes(self, stage: int, held: HeldLayers, num_microbatches: int | None) -> float:
        """One GPU of a stage, with the layers that it holds and logits on the last, over TP and CP."""
        h = self.hidden_size
        in_flight = self.stage_in_flight(stage, num_microbatches)
        total = held.dense * self._layer_bytes(self.ffn_hidden_size / h)
        total += held.moe * self._layer_bytes(self.moe_width / h)
        if held.embedding:
            total += self.seq_length * self.micro_batch_size * (8 + h)
        total *= in_flight
        if held.output:
            total += self._logits
        return total / (self.tp * self.cp)

    def stage_in_flight(self, stage: int, num_microbatches: int | None) -> float:
        """Microbatches whose activations a stage holds at once, as a multiple of its layers.

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
