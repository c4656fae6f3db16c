"""An independent closed form of a ModelSpec's global parameters: no padding, no sharding, tied weights once.

Written from the architectures (transformers' modules), not from the package's inventory.
"""

from __future__ import annotations

from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    Mamba1Spec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ShortConvSpec,
)


def attention(m: AttentionSpec, h: int) -> int:
    q, kv = m.num_attention_heads * m.kv_channels, m.num_query_groups * m.kv_channels
    v = m.v_channels or m.kv_channels
    made = (2 * q if m.attention_output_gate else q) + kv + m.num_query_groups * v
    total = h * made + m.num_attention_heads * v * h
    total += made if m.add_qkv_bias else 0
    total += h if m.add_output_bias else 0
    total += {None: 0, "head": 2 * m.kv_channels, "full": q + kv}[m.qk_layernorm]
    total += m.num_attention_heads if m.learnable_softmax_sink else 0
    return total


def mla(m: MLASpec, h: int) -> int:
    a, rope = m.num_attention_heads, m.qk_pos_emb_head_dim
    q = a * (m.qk_head_dim + rope)
    total = h * q if m.q_lora_rank is None else h * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * q
    total += h * (m.kv_lora_rank + rope) + m.kv_lora_rank
    total += m.kv_lora_rank * a * (m.qk_head_dim + m.v_head_dim)
    if m.indexer is not None:  # queries of the latent, one key with a LayerNorm, a weight a head
        n, d = m.indexer.num_heads, m.indexer.head_dim
        total += (m.q_lora_rank or h) * n * d + h * d + 2 * d + h * n
    return total + a * m.v_head_dim * h


def mamba(m: MambaSpec, h: int) -> int:
    inner, state = m.num_heads * m.head_dim, m.num_groups * m.state_dim
    convolved = inner + 2 * state
    total = h * (2 * inner + 2 * state + m.num_heads)  # in_proj: z, x, B, C, dt
    total += convolved * m.conv_kernel + (convolved if m.conv_bias else 0)
    total += 3 * m.num_heads  # A_log, D, dt_bias
    total += inner if m.rmsnorm else 0
    total += inner * h
    return total + ((2 * inner + 2 * state + m.num_heads + h) if m.proj_bias else 0)


def delta_net(m: GatedDeltaNetSpec, h: int) -> int:
    k, v = m.num_key_heads * m.key_head_dim, m.num_value_heads * m.value_head_dim
    total = h * (2 * k + 2 * v) + h * 2 * m.num_value_heads  # q, k, v, z and beta, alpha
    total += (2 * k + v) * m.conv_kernel
    total += 2 * m.num_value_heads + m.value_head_dim  # A_log, dt_bias, norm
    return total + v * h


def kimi_delta(m: KimiDeltaSpec, h: int) -> int:
    n, d = m.num_heads, m.head_dim
    total = 3 * h * n * d + 3 * n * d * m.conv_kernel  # queries, keys and values, convolved together
    total += 2 * (h * d + d * n * d) + h * n  # the forget gate, the gate of the output, beta
    return total + n * d + n + d + n * d * h  # dt_bias, A_log, norm, o_proj


def mamba_1(m: Mamba1Spec, h: int) -> int:
    i, n, r = m.inner_size, m.state_dim, m.dt_rank
    total = 2 * h * i + i * m.conv_kernel + (i if m.conv_bias else 0)
    total += i * (r + 2 * n) + r + 2 * n + r * i + i  # x_proj, norms of time steps, B and C, dt_proj with its bias
    total += i * n + i + i * h  # A_log, D, out_proj
    return total + ((2 * i + h) if m.proj_bias else 0)


def short_conv(m: ShortConvSpec, h: int) -> int:
    return h * 3 * h + h * m.kernel + h * h + ((3 * h + h + h) if m.bias else 0)


def mlp(width: int, h: int, gated: bool, bias: bool) -> int:
    up = 2 * width if gated else width
    return h * up + width * h + (up + h if bias else 0)


def moe(m: MoESpec, h: int) -> int:
    inside = m.latent_size or h
    total = m.num_experts * h + (m.num_experts if m.add_router_bias else 0)
    total += m.num_experts * mlp(m.moe_ffn_hidden_size, inside, m.gated, m.add_bias)
    total += 2 * h * m.latent_size if m.latent_size else 0
    if m.shared_expert_intermediate_size:
        total += mlp(m.shared_expert_intermediate_size, h, m.gated, m.add_bias)
        total += h if m.shared_expert_gate else 0
    return total


def layer(spec: LayerSpec, h: int, norm: int) -> int:
    total = 0
    count = {
        AttentionSpec: attention, MLASpec: mla, MambaSpec: mamba, GatedDeltaNetSpec: delta_net,
        KimiDeltaSpec: kimi_delta, Mamba1Spec: mamba_1, ShortConvSpec: short_conv,
    }  # fmt: skip
    if spec.mixer is not None:
        total += norm + count[type(spec.mixer)](spec.mixer, h)  # type: ignore[operator]
    if isinstance(spec.ffn, MLPSpec):
        total += norm + mlp(spec.ffn.ffn_hidden_size, h, spec.ffn.gated, spec.ffn.add_bias)
        total += 2 * (spec.ffn.activation == "xielu")  # alpha_p and alpha_n
    elif isinstance(spec.ffn, MoESpec):
        total += norm + moe(spec.ffn, h)
        if spec.ffn.shortcut_ffn_hidden_size:  # another attention, and two MLPs beside the experts
            total += 2 * norm + mla(spec.mixer, h)  # type: ignore[arg-type]
            total += 2 * mlp(spec.ffn.shortcut_ffn_hidden_size, h, True, False) + spec.ffn.zero_experts * h
        # The router's correction bias: in Megatron a buffer, in some published counts a parameter.
        counted = spec.ffn.router_enable_expert_bias and spec.ffn.expert_bias_in_published_count
        total += spec.ffn.num_experts if counted else 0
    return total + 2 * norm * (spec.post_layernorms - (not spec.pre_layernorms))


def main_model(model: ModelSpec) -> int:
    """Without MTP."""
    h = model.hidden_size
    norm = 2 * h if model.normalization == "LayerNorm" else h
    total = model.vocab_size * h * (1 if model.share_embeddings_and_output_weights else 2)
    if model.position_embedding_type == "learned_absolute":
        total += model.max_position_embeddings * h
    total += 2 * h if model.embedding_layernorm else 0
    total += model.vocab_size if model.output_bias else 0
    return total + sum(layer(spec, h, norm) for spec in model.layers) + norm


def mtp(model: ModelSpec) -> int:
    """All MTP depths: eh_proj, enorm, hnorm, a final norm and a layer each; embedding and head are shared."""
    h = model.hidden_size
    norm = 2 * h if model.normalization == "LayerNorm" else h
    if model.mtp_layer is None:
        return 0
    return model.mtp_num_layers * (2 * h * h + 3 * norm + layer(model.mtp_layer, h, norm))
