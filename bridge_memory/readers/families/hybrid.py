"""Nemotron-H (a pattern of Mamba-2, attention, MLP and MoE layers) and Llama-Nemotron (block_configs per layer)."""

from __future__ import annotations

from collections.abc import Mapping

from bridge_memory.readers.families.common import (
    ACTIVATIONS,
    Family,
    activation,
    heads,
    model,
    num_layers,
    rotary_factor,
)
from bridge_memory.readers.families.moe import expert_count
from bridge_memory.readers.fields import MAX_LAYERS, Fields, shown
from bridge_memory.spec import AttentionSpec, LayerSpec, MambaSpec, MLPSpec, ModelSpec, MoESpec
from bridge_memory.spec.unmodelled import Effect, Unmodelled

#: megatron.core.ssm.mamba_hybrid_layer_allocation.Symbols, as Nemotron-H's hybrid_override_pattern uses them.
MAMBA, ATTENTION, MLP, MOE = "M", "*", "-", "E"
#: transformers' names of blocks. From 5.23 on it saves the longer ones (``configuration_utils.py:
#: remap_legacy_layer_types``).
WORDS = {
    "mamba": MAMBA, "linear_attention": MAMBA, "attention": ATTENTION, "full_attention": ATTENTION, "mlp": MLP,
    "moe": MOE,
}  # fmt: skip


def read_nemotron_h(f: Fields) -> ModelSpec:
    """One block per layer, each with a norm; built by MambaModel, without rotary embeddings."""
    hidden_size = f.integer("hidden_size")
    pattern = _pattern(f)
    kinds = {symbol: _block(f, symbol, hidden_size) for symbol in dict.fromkeys(pattern)}
    f.ignore("expand", "intermediate_size", "chunk_size", "conv_kernel", "n_groups", "num_attention_heads")
    f.ignore("num_key_value_heads", "head_dim", "attention_head_dim", "attention_bias", "use_bias")
    f.ignore("mlp_bias", "mlp_hidden_act")
    f.ignore("ssm_state_size", "mamba_head_dim", "mamba_num_heads", "mamba_proj_bias", "mamba_hidden_act")
    f.ignore("use_conv_bias", "n_shared_experts", "moe_shared_expert_intermediate_size", "sliding_window")
    f.ignore("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size")
    f.ignore("partial_rotary_factor", "moe_shared_expert_overlap", "num_query_groups")
    if f.flag("residual_in_fp32"):
        f.not_modelled.append(
            Unmodelled(
                "residual_in_fp32 of the config: set fp32_residual_connection in the run", Effect.UP,
                order="2 s b h / t bytes for each hidden state that a layer saves",
            )
        )
    depths = f.count("num_nextn_predict_layers")
    mtp = _mtp_layer(f, hidden_size) if depths else None
    f.ignore("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    return model(
        f,
        Family(),
        [kinds[symbol] for symbol in pattern],
        hidden_size=hidden_size,
        rotary_dim=0,
        position_embedding_type="none",
        mtp_num_layers=depths,
        mtp_layer=mtp,
        hybrid=True,
    )


def _pattern(f: Fields) -> str:
    pattern = _symbols(f, "hybrid_override_pattern", "layer_types" if f.has("layer_types") else "layers_block_type")
    if not pattern:
        raise f.error("hybrid_override_pattern is missing; it says which layer is which")
    for symbol in pattern:
        if symbol not in (MAMBA, ATTENTION, MLP, MOE):
            raise f.error(
                f"hybrid_override_pattern holds {shown(symbol)}; known: M Mamba, * attention, - MLP, E MoE"
            )
    n = f.integer("num_hidden_layers", default=len(pattern), most=MAX_LAYERS)
    if n != len(pattern):
        raise f.error(f"hybrid_override_pattern has {len(pattern)} layers and num_hidden_layers says {n}")
    return pattern


def _symbols(f: Fields, key: str, named_key: str) -> str:
    """A pattern as NVIDIA writes it ("M*E-"), or converted from transformers' names (["mamba", "attention", ...])."""
    pattern, named = f.text(key, default=""), f.items(named_key)
    if pattern or named is None:
        return pattern
    for word in named:
        if not isinstance(word, str) or word not in WORDS:
            raise f.error(f"{named_key} holds {shown(word)}; known: {', '.join(WORDS)}")
    return "".join(WORDS[word] for word in named)


def _block(f: Fields, symbol: str, hidden_size: int) -> LayerSpec:
    if symbol == MAMBA:
        return LayerSpec(_mamba(f), None)
    if symbol == ATTENTION:
        a, g, d = heads(f, hidden_size, 128)
        bias = f.flag("attention_bias", default=False)
        return LayerSpec(
            AttentionSpec(
                num_attention_heads=a,
                num_query_groups=g,
                kv_channels=d,
                add_qkv_bias=bias,
                add_output_bias=bias,
                rotary=False,
            ),
            None,
        )
    act = f.choice("mlp_hidden_act", ACTIVATIONS, default="relu2")
    bias = f.flag("mlp_bias", default=False)
    if symbol == MLP:
        width = f.integer("intermediate_size")
        return LayerSpec(None, MLPSpec(ffn_hidden_size=width, gated=False, activation=act, add_bias=bias))
    experts, topk = expert_count(f, "n_routed_experts")
    width = f.integer("moe_intermediate_size")
    shared = f.integer("moe_shared_expert_intermediate_size", default=width, least=0)
    return LayerSpec(
        None,
        MoESpec(
            num_experts=experts,
            topk=topk,
            moe_ffn_hidden_size=width,
            gated=False,
            activation=act,
            add_bias=bias,
            shared_expert_intermediate_size=shared if f.count("n_shared_experts", default=1) else 0,
            router_enable_expert_bias=True,
            expert_bias_in_published_count=True,
            router_score_function="sigmoid",
            router_load_balancing_type="seq_aux_loss",
            latent_size=f.integer("moe_latent_size", default=None),
        ),
    )


def _mamba(f: Fields) -> MambaSpec:
    heads, groups = f.integer("mamba_num_heads"), f.integer("n_groups", default=8)
    if heads % groups:
        raise f.error(f"mamba_num_heads ({heads}) is not divisible by n_groups ({groups})")
    return MambaSpec(
        num_heads=heads,
        head_dim=f.integer("mamba_head_dim"),
        state_dim=f.integer("ssm_state_size"),
        num_groups=groups,
        conv_kernel=f.integer("conv_kernel", default=4),
        chunk_size=f.integer("chunk_size", default=128),
        conv_bias=f.flag("use_conv_bias", default=True),
        proj_bias=f.flag("mamba_proj_bias", "use_bias", default=False),
    )


def _mtp_layer(f: Fields, hidden_size: int) -> LayerSpec:
    """The layer of an MTP depth: one mixer and one feed-forward block, the only form that LayerSpec can express."""
    pattern = _symbols(f, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    if len(pattern) != 2 or pattern[0] not in (MAMBA, ATTENTION) or pattern[1] not in (MLP, MOE):
        raise f.error(
            f"mtp_hybrid_override_pattern is {shown(pattern)}; an MTP depth of one mixer (M or *) and one "
            "feed-forward block (- or E) can be estimated; set num_nextn_predict_layers to 0 to leave MTP out"
        )
    first, second = (_block(f, symbol, hidden_size) for symbol in pattern)
    return LayerSpec(first.mixer, second.ffn)


# --------------------------------------------------------------------------------------------------
# Llama-Nemotron: a Llama whose layers were chosen one by one by neural architecture search
# --------------------------------------------------------------------------------------------------

NAS = Family()


def read_nemotron_nas(f: Fields) -> ModelSpec:
    """block_configs: for each layer the query groups of its attention, or none, and the width of its MLP, or none.

    Source: nvidia/Llama-3_3-Nemotron-Super-49B-v1 modeling_decilm.py (``_ffn_mult_to_intermediate_size``,
    ``_find_multiple``); Bridge: models/llama_nemotron.
    """
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    a = f.integer("num_attention_heads")
    d = f.integer("head_dim", default=None)
    if d is None:
        if hidden_size % a:
            raise f.error(f"hidden_size ({hidden_size}) is not divisible by num_attention_heads ({a})")
        d = hidden_size // a
    act = activation(f, NAS)
    blocks = f.items("block_configs")
    if blocks is None:
        raise f.error("block_configs is missing; it holds each layer's attention and MLP")
    if len(blocks) != n:
        raise f.error(f"block_configs has {len(blocks)} entries for num_hidden_layers {n}; give one a layer")
    f.ignore("num_key_value_heads", "intermediate_size")
    bias = f.flag("attention_bias")
    mlp_bias = f.flag("mlp_bias")
    layers = []
    for i, block in enumerate(blocks):
        groups = _nas_groups(_nas_part(f, i, block, "attention"), a)
        width = _nas_width(_nas_part(f, i, block, "ffn"), hidden_size)
        layers.append(
            LayerSpec(
                AttentionSpec(a, groups, d, add_qkv_bias=bias, add_output_bias=bias) if groups else None,
                MLPSpec(width, gated=True, activation=act, add_bias=mlp_bias) if width else None,
            )
        )
    return model(f, NAS, layers, hidden_size=hidden_size, rotary_dim=int(d * rotary_factor(f, 1.0)))


def _nas_part(f: Fields, i: int, block: object, key: str) -> Fields:
    """The attention or ffn part of a block config, as Fields. Raises SpecError for unsupported options."""
    where = f"block_configs[{i}]"
    if not isinstance(block, Mapping):
        raise f.error(f"{where} is {shown(block)}; it must be an object")
    inner = block.get(key)
    if not isinstance(inner, Mapping):
        raise f.error(f"{where}.{key} is {shown(inner)}; it must be an object")
    part = Fields(inner, f"{f.name}: {where}.{key}", f.model_type)
    for odd in ("replace_with_linear", "sparsify", "num_sink_tokens", "moe", "mamba", "llama4"):
        if part.raw(odd)[1]:
            raise part.error(f"{odd} is {shown(inner[odd])}; such a block cannot be estimated")
    return part


def _nas_groups(part: Fields, a: int) -> int:
    """Query groups of a layer; 0: no attention."""
    each = part.integer("n_heads_in_group", default=None)
    part.finish()
    if part.flag("no_op"):
        return 0
    if each is None or a % each:
        raise part.error(f"num_attention_heads ({a}) is not divisible by n_heads_in_group ({shown(each)})")
    return int(a // each)


def _nas_width(part: Fields, hidden_size: int) -> int:
    """MLP width of a layer: 2/3 x ffn_mult x h, rounded up to a multiple of 256; 0: no MLP."""
    width = part.integer("intermediate_size", default=None)
    mult = part.number("ffn_mult", default=0.0, most=1000.0)
    part.finish()
    if part.flag("no_op"):
        return 0
    width = width or -(-int(2 * mult * hidden_size / 3) // 256) * 256
    if not width:
        raise part.error(f"ffn_mult is {shown(part.config.get('ffn_mult'))}; it must be a positive number")
    return int(width)
