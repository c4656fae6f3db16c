"""What an engine holds beside weights and cache while it runs a step: activations, logits, the sampler, workspaces.

vLLM measures this at its start by a step of max_num_batched_tokens without attention (``profile_run``) and keeps it
free; SGLang leaves a share of the card. Kernels decide what is alive at once, therefore ranges: least if each operation
frees its input before the next allocates and writes in place where it can; most if every operation has an output of its
own, and tensor parallelism copies what it reduces.
"""

from __future__ import annotations

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Provenance
from bridge_memory.outside.amount import Amount, Range, exactly
from bridge_memory.rollout.inference import defaults, rules
from bridge_memory.rollout.inference.layer_cache import layers_of_stage, sparse
from bridge_memory.rollout.inference.spec import InferenceSpec
from bridge_memory.rollout.inference.weights import padded_vocab
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    MoESpec,
    SideBySideSpec,
)

FP32, INT64, INT32 = 4, 8, 4
#: Tokens of a request beyond its context (SGLang ``mem_cache/kv_cache_configurator.py``).
EXTRA_TOKENS = 4


def forward(spec: InferenceSpec, gpu: Gpu, stage: int) -> Amount:
    """The layer with the most of a step of max_num_batched_tokens tokens."""
    tokens = defaults.max_num_batched_tokens(spec, gpu)
    kinds = {spec.model.layers[index] for index in layers_of_stage(spec, stage)}
    h = spec.model.hidden_size
    least = most = 0
    for layer in kinds:
        for widths in (_mixer(spec, layer.mixer), _ffn(spec, layer.ffn)):
            least, most = max(least, widths.least), max(most, widths.most)
    # Beside the block's own: the residual and the block's input.
    least, most = least + h, most + 2 * h
    if spec.tensor_parallel_size > 1:
        most += h
    each = spec.element_bytes * tokens
    source = "one layer over max_num_batched_tokens tokens (vLLM v1/worker: profile_run, attention left out)"
    return Amount("activations", each * least, each * most, Provenance.ASSUMED, source)


def _mixer(spec: InferenceSpec, mixer: object) -> Range:
    """Elements a token of the widest moment of a mixer."""
    tp, h = spec.attention_tp, spec.model.hidden_size
    if isinstance(mixer, AttentionSpec):
        heads, kv = mixer.num_attention_heads // tp, max(1, mixer.num_query_groups // tp)
        q = heads * mixer.kv_channels
        qkv = q * (2 if mixer.attention_output_gate else 1) + kv * (mixer.kv_channels + mixer.value_channels)
        out = heads * mixer.value_channels
        return Range(qkv + out, 2 * qkv + out + h)
    if isinstance(mixer, MLASpec):
        heads = mixer.num_attention_heads // tp
        q = heads * (mixer.qk_head_dim + mixer.qk_pos_emb_head_dim)
        latent = mixer.kv_lora_rank + mixer.qk_pos_emb_head_dim
        # A prefill expands the latent to keys and values; keys are copied beside the rotary part.
        kv = heads * (mixer.qk_head_dim + mixer.v_head_dim)
        out = heads * mixer.v_head_dim
        return Range(q + latent + out, 2 * q + 2 * latent + kv + out + h)
    if isinstance(mixer, MambaSpec):
        inner = mixer.num_heads * mixer.head_dim // tp
        conv = inner + 2 * max(1, mixer.num_groups // tp) * mixer.state_dim
        return Range(inner + conv, inner + 2 * conv + 2 * inner + h)
    if isinstance(mixer, GatedDeltaNetSpec):
        values = mixer.num_value_heads * mixer.value_head_dim // tp
        conv = 2 * mixer.num_key_heads * mixer.key_head_dim // tp + values
        return Range(conv + 2 * values, 3 * conv + 4 * values + h)
    if isinstance(mixer, SideBySideSpec):
        first, second = _mixer(spec, mixer.attention), _mixer(spec, mixer.mamba)
        return Range(max(first.least, second.least), first.most + second.most)
    return Range(0, 0)


def _ffn(spec: InferenceSpec, ffn: MLPSpec | MoESpec | None) -> Range:
    """Elements a token of the widest moment of a feed-forward block."""
    h = spec.model.hidden_size
    if isinstance(ffn, MLPSpec):
        return _mlp(spec, ffn.ffn_hidden_size, ffn.gated)
    if not isinstance(ffn, MoESpec):
        return Range(0, 0)
    slices = spec.expert_ranks // spec.expert_parallel_size
    inner = ffn.moe_ffn_hidden_size // slices
    rows = 2 * inner if ffn.gated else inner
    width = ffn.latent_size or h
    # ``fused_moe/experts/triton_moe.py: workspace_shapes``: M x topk x max(activation, K), M x topk x max(N, K), and
    # the output. Kernels that gather rows themselves hold one of them.
    wide = ffn.topk * max(rows, width)
    second = ffn.topk * max(inner, width)
    shared = _mlp(spec, ffn.shared_expert_intermediate_size, ffn.gated) if ffn.shared_expert_intermediate_size else None
    most = wide + second + width + ffn.num_experts * FP32 // spec.element_bytes
    return Range(ffn.topk * inner + width, most + (shared.most if shared else 0))


def _mlp(spec: InferenceSpec, width: int, gated: bool) -> Range:
    inner = width // spec.tensor_parallel_size
    rows = 2 * inner if gated else inner
    return Range(max(rows, inner + spec.model.hidden_size), rows + inner + spec.model.hidden_size)


def sampler(spec: InferenceSpec, gpu: Gpu, stage: int) -> Amount:
    """Logits of the last stage over max_num_seqs sequences, and what the sampler makes of them.

    Logits in the model's dtype, gathered over tensor parallelism; an fp32 copy; then, by release, probabilities, noise,
    and a sort for top-p, with indices of 8 bytes.
    """
    if stage != spec.pipeline_parallel_size - 1:
        return exactly("logits and sampler", 0)
    sequences = min(defaults.max_num_seqs(spec, gpu), defaults.max_num_batched_tokens(spec, gpu))
    rows = padded_vocab(spec)
    e = spec.element_bytes
    gathered = e + (e / spec.tensor_parallel_size if spec.tensor_parallel_size > 1 else 0)
    least = gathered + FP32
    most = gathered + 3 * FP32
    if spec.framework == "sglang" or not rules.SORTS_NO_LOGITS(spec.release_numbers):
        most += FP32 + INT64
    tokens = defaults.max_num_batched_tokens(spec, gpu)
    hidden = tokens * spec.model.hidden_size * e
    source = "vLLM v1/worker: _dummy_sampler_run; v1/sample/sampler.py"
    return Amount(
        "logits and sampler", int(sequences * rows * least) + hidden, int(sequences * rows * most) + 2 * hidden,
        Provenance.FORMULA, source,
    )  # fmt: skip


def headroom(spec: InferenceSpec, gpu: Gpu, stage: int) -> Amount:
    """The larger of the two: they follow each other."""
    first, second = forward(spec, gpu, stage), sampler(spec, gpu, stage)
    return Amount(
        "activations and logits", max(first.least, second.least), max(first.most, second.most), Provenance.ASSUMED,
        f"{first.source}; {second.source}",
    )  # fmt: skip


def request_state(spec: InferenceSpec, gpu: Gpu, stage: int, blocks: int, groups: int) -> Amount:
    """vLLM's buffers of a row for each sequence, for the engine's life: block tables, and in the second model runner
    the counts of sampled tokens for penalties (``v1/worker/gpu/sample/penalties.py: PenaltiesState``) on the last
    stage.

    Args:
        spec: The engine.
        gpu: Its card.
        stage: The pipeline stage.
        blocks: Blocks of the longest sequence.
        groups: Block tables.
    """
    sequences = defaults.max_num_seqs(spec, gpu)
    tables = sequences * blocks * INT32 * max(1, groups)
    least, most = tables, 2 * tables
    if stage == spec.pipeline_parallel_size - 1 and rules.SECOND_RUNNER(spec.release_numbers):
        counts = sequences * (spec.model.vocab_size + -(-spec.model.vocab_size // 32)) * INT32
        least, most = least + counts, most + counts
    return Amount("request tables", least, most, Provenance.FORMULA,
                  "v1/worker/gpu/block_table.py; sample/penalties.py: PenaltiesState")  # fmt: skip


def token_table(spec: InferenceSpec, requests: Range) -> Amount:
    """SGLang's slot of each token of each request, and a row for padding.

    Args:
        spec: The engine.
        requests: Sequences that run at once, least and most.
    """
    row = (spec.length + EXTRA_TOKENS) * INT32
    return Amount("request tables", (requests.least + 1) * row, (requests.most + 1) * row, Provenance.FORMULA,
                  "mem_cache/memory_pool.py: ReqToTokenPool")  # fmt: skip


def sparse_buffers(spec: InferenceSpec, gpu: Gpu) -> Amount:
    """The chosen keys of each token of a step, and vLLM's workspaces of a prefill: 40 indexer keys, or 5 latents, for
    each token of the longest sequence (``mla/indexer.py: get_max_prefill_buffer_size``)."""
    mixer = sparse(spec)
    if mixer is None or mixer.sparse is None:
        return exactly("sparse attention's buffers", 0)
    chosen = defaults.max_num_batched_tokens(spec, gpu) * mixer.sparse.topk * INT32
    latent = 5 * (mixer.kv_lora_rank + mixer.qk_pos_emb_head_dim) * 2 * spec.length
    return Amount("sparse attention's buffers", chosen, chosen + 2 * latent, Provenance.FORMULA,
                  "mla/indexer.py: get_max_prefill_buffer_size; topk_indices_buffer")  # fmt: skip


def rotary_tables(spec: InferenceSpec) -> Amount:
    """cos and sin of each position, once, in the model's dtype or fp32; scaled rotary embeddings have longer tables."""
    model = spec.model
    if model.position_embedding_type != "rope" or not model.rotary_dim:
        return exactly("rotary tables", 0)
    cells = max(model.max_position_embeddings, spec.length) * model.rotary_dim
    return Amount("rotary tables", cells * spec.element_bytes, cells * FP32 * 2, Provenance.FORMULA,
                  "layers/rotary_embedding: cos_sin_cache; twice where a second base or scale has its own")  # fmt: skip
