"""Decoders whose layers hold a recurrent mixer or a short convolution, or attention, each before a feed-forward block.

Granite 4 (granitemoehybrid), Bamba, Jamba, LFM2 and LFM2-MoE. Source: transformers 5.12
``models/<family>/configuration_*.py`` and ``modeling_*.py``. megatron-core has no such layer: they are read for engines
that train transformers' own.
"""

from __future__ import annotations

from dataclasses import replace

from bridge_memory.readers.families.common import (
    Family,
    activation,
    attention,
    layer_types,
    mlp,
    model,
    num_layers,
    rotary_factor,
)
from bridge_memory.readers.families.moe import expert_count
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import FeedForward, LayerSpec, MambaSpec, MLPSpec, ModelSpec, MoESpec
from bridge_memory.spec.model import Mamba1Spec, ShortConvSpec

#: transformers' names of layers: those before 5.23, and those that it saves from then on.
_RECURRENT, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")


def read_granite_hybrid(f: Fields) -> ModelSpec:
    """``GraniteMoeHybridDecoderLayer``: the shared MLP beside the experts, or alone where there are none."""
    hidden_size, n = f.integer("hidden_size"), num_layers(f)
    family = Family()
    spec = attention(f, family, hidden_size)
    rope = f.text("position_embedding_type", default="nope") == "rope"
    kinds = layer_types(f, n, _RECURRENT + _ATTENTION, "layer_types", "layers_block_type") or ["mamba"] * n
    mamba = _mamba(f, hidden_size) if set(kinds) & {*_RECURRENT} else None
    shared = f.integer("shared_intermediate_size", default=1024)
    ffn: FeedForward = MLPSpec(shared, gated=True, activation=activation(f, family))
    if f.count("num_local_experts", default=8):
        experts, topk = expert_count(f, "num_local_experts")
        ffn = MoESpec(
            num_experts=experts, topk=topk, moe_ffn_hidden_size=f.integer("intermediate_size"),
            activation=activation(f, family), shared_expert_intermediate_size=shared,
        )
    f.ignore("intermediate_size", "num_experts_per_tok", "rope_parameters", "rope_theta", "rope_scaling")
    f.ignore("time_step_limit", "normalization_function", "init_method")
    layers = [LayerSpec(mamba if kind in _RECURRENT else replace(spec, rotary=rope), ffn) for kind in kinds]
    return model(
        f, family, layers, hidden_size=hidden_size, rotary_dim=spec.kv_channels if rope else 0,
        position_embedding_type="rope" if rope else "none",
    )


def read_bamba(f: Fields) -> ModelSpec:
    """``BambaDecoderLayer``; how much of a head is rotated depends on the release (``Family.rotary_share``)."""
    hidden_size, n = f.integer("hidden_size"), num_layers(f)
    family = Family()
    spec = attention(f, family, hidden_size)
    given = f.items("attn_layer_indices") or ()
    for i in given:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n:
            raise f.error(f"attn_layer_indices holds {shown(i)}; the layers are 0 to {n - 1}")
    if f.number("z_loss_coefficient", default=0.0):
        raise f.error("z_loss_coefficient is not 0; the loss of the logits' size is not estimated, set it to 0")
    rotary_factor(f, 0.5)
    f.ignore("layers_block_type", "layer_types", "attn_rotary_emb", "time_step_limit", "rope_parameters")
    mamba, ffn = _mamba(f, hidden_size), mlp(f, family)
    layers = [LayerSpec(spec if i in given else mamba, ffn) for i in range(n)]
    return model(f, family, layers, hidden_size=hidden_size, rotary_dim=spec.kv_channels)


def read_jamba(f: Fields) -> ModelSpec:
    """``JambaAttentionDecoderLayer``, ``JambaMambaDecoderLayer``: each before an MLP or experts, without positions."""
    hidden_size, n = f.integer("hidden_size"), num_layers(f)
    family = Family(bias_keys=())
    spec = replace(attention(f, family, hidden_size), rotary=False)
    if "num_key_value_heads" not in f.config:
        spec = replace(spec, num_query_groups=8)  # the class's default
    rank = f.raw("mamba_dt_rank")[1]
    rank = -(-hidden_size // 16) if rank in (None, "auto") else f.integer("mamba_dt_rank")
    mamba = Mamba1Spec(
        inner_size=f.integer("mamba_expand", default=2) * hidden_size, state_dim=f.integer("mamba_d_state", default=16),
        dt_rank=rank, conv_kernel=f.integer("mamba_d_conv", default=4),
        conv_bias=f.flag("mamba_conv_bias", default=True), proj_bias=f.flag("mamba_proj_bias"),
    )
    dense: FeedForward = mlp(f, family)
    routed = dense
    number = f.integer("num_experts", "num_local_experts", default=16)
    if number > 1:
        experts, topk = number, f.integer("num_experts_per_tok", default=2)
        if topk > experts:
            raise f.error(f"num_experts_per_tok ({topk}) is larger than num_experts ({experts})")
        routed = MoESpec(
            num_experts=experts, topk=topk, moe_ffn_hidden_size=f.integer("intermediate_size"),
            activation=activation(f, family),
        )
    at = {what: _periodic(f, what, *defaults) for what, defaults in (("attn", (8, 4)), ("expert", (2, 1)))}
    # Derived from the periods by the class.
    f.ignore("layers_block_type", "layer_types", "layers_num_experts", "num_experts_per_tok", "mlp_bias")
    layers = [
        LayerSpec(
            spec if i % at["attn"][0] == at["attn"][1] else mamba,
            routed if i % at["expert"][0] == at["expert"][1] else dense,
        )
        for i in range(n)
    ]
    return model(f, family, layers, hidden_size=hidden_size, rotary_dim=0, position_embedding_type="none")


def _periodic(f: Fields, what: str, period: int, offset: int) -> tuple[int, int]:
    """(every how many layers, from which on) of attention or of experts."""
    period, offset = f.integer(f"{what}_layer_period", default=period), f.count(f"{what}_layer_offset", default=offset)
    if offset >= period:
        raise f.error(f"{what}_layer_offset ({offset}) is not smaller than {what}_layer_period ({period})")
    return period, offset


def read_lfm2(f: Fields) -> ModelSpec:
    """``Lfm2DecoderLayer``, ``Lfm2MoeDecoderLayer``: dense layers first."""
    hidden_size, n = f.integer("hidden_size"), num_layers(f)
    experts = f.model_type == "lfm2_moe"
    family = Family(tied=True, bias_keys=(), qk_layernorm="head")
    spec = attention(f, family, hidden_size)
    conv = ShortConvSpec(kernel=f.integer("conv_L_cache", default=3), bias=f.flag("conv_bias"))
    kinds = layer_types(f, n, ("conv", "full_attention"))
    numbers = f.items("full_attn_idxs")
    if kinds is None:
        found = [*range(n)] if numbers is None else numbers
        kinds = ["full_attention" if i in found else "conv" for i in range(n)]
    dense = MLPSpec(_lfm2_width(f, experts=experts), gated=True)
    routed: FeedForward = dense
    first = n
    if experts:
        number, topk = expert_count(f, "num_experts")
        first = f.count("num_dense_layers", default=2)
        routed = MoESpec(
            num_experts=number, topk=topk, moe_ffn_hidden_size=f.integer("moe_intermediate_size"),
            router_enable_expert_bias=f.flag("use_expert_bias", default=True), router_score_function="sigmoid",
        )
    f.ignore("tie_embedding", "rope_parameters", "rope_theta", "theta", "conv_dim", "conv_dim_out", "block_dim")
    f.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init")
    f.ignore("block_norm_eps", "use_pos_enc", "num_heads", "conv_use_xavier_init")
    layers = [
        LayerSpec(spec if kind == "full_attention" else conv, dense if i < first else routed)
        for i, kind in enumerate(kinds)
    ]
    tied = f.config.get("tie_embedding")
    made = model(f, family, layers, hidden_size=hidden_size, rotary_dim=spec.kv_channels)
    return made if tied is None else replace(made, share_embeddings_and_output_weights=bool(tied))


def _lfm2_width(f: Fields, *, experts: bool) -> int:
    """``Lfm2MLP.__init__``: two thirds of the config's width, times a factor, rounded up to a multiple."""
    width = f.integer("block_ff_dim", default=None) or f.integer("intermediate_size")
    f.ignore("intermediate_size")
    if experts or not f.flag("block_auto_adjust_ff_dim", default=True):
        f.ignore("block_ffn_dim_multiplier", "block_multiple_of")
        return int(width)
    width = int(f.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    multiple = f.integer("block_multiple_of", default=256)
    return int(-(-width // multiple) * multiple)


def _mamba(f: Fields, hidden_size: int) -> MambaSpec:
    """The Mamba-2 mixer of Bamba and Granite 4: one norm over all channels."""
    number, expand = f.integer("mamba_n_heads", default=128), f.integer("mamba_expand", default=2)
    width = f.raw("mamba_d_head")[1]
    inner = expand * hidden_size
    if width in (None, "auto"):
        width = inner // number
    if not isinstance(width, int) or width * number != inner:
        raise f.error(
            f"mamba_n_heads ({number}) x mamba_d_head ({shown(width)}) is not mamba_expand x hidden_size ({inner})"
        )
    return MambaSpec(
        num_heads=number, head_dim=width, state_dim=f.integer("mamba_d_state", default=256),
        num_groups=f.integer("mamba_n_groups", default=1), conv_kernel=f.integer("mamba_d_conv", default=4),
        chunk_size=f.integer("mamba_chunk_size", default=256), conv_bias=f.flag("mamba_conv_bias", default=True),
        proj_bias=f.flag("mamba_proj_bias"),
    )
