"""Megatron Bridge's providers whose layers' attention differs by more than its window -> mixers.

Does not import megatron. Source: megatron-bridge 0.6.2 ``models/stepfun/step35_provider.py: Step35DecoderLayer``,
``models/mimo_v2_flash/modeling_mimo_v2_flash.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bridge_memory.readers.config_attributes import ConfigAttributes
from bridge_memory.readers.fields import shown
from bridge_memory.spec import AttentionSpec


def step35(c: ConfigAttributes, n: int, base: AttentionSpec) -> tuple[list[AttentionSpec], AttentionSpec]:
    """(mixers of the decoder, mixer of the MTP depths): sliding layers have other numbers of heads.

    ``layer_types`` continues with the MTP depths; layers beyond its end have full attention.
    """
    depths = c.get("mtp_num_layers", 0)
    setting, types = c.get("sliding_attention_setting"), list(c.get("layer_types") or ())
    full = replace(base, window_size=None)
    if not setting:
        if "sliding_attention" in types:
            raise c.error("layer_types names sliding layers and sliding_attention_setting is not set; set it")
        return [full] * n, full
    if not isinstance(setting, dict):
        raise c.error(f"sliding_attention_setting is {shown(setting)}; it must be a dict")
    window = setting.get("window_size")
    sliding = replace(
        full,
        window_size=_positive(c, setting, "window_size", window[0] if isinstance(window, list | tuple) else window),
        num_attention_heads=_positive(c, setting, "num_attention_heads", setting.get("num_attention_heads")),
        num_query_groups=_positive(c, setting, "num_query_groups", setting.get("num_query_groups")),
        kv_channels=_positive(c, setting, "kv_channels", setting.get("kv_channels")),
    )
    kinds = {"full_attention": full, "sliding_attention": sliding}
    for kind in types:
        if not isinstance(kind, str) or kind not in kinds:
            raise c.error(f"layer_types holds {shown(kind)}; known here: {', '.join(kinds)}")
    stack = [kinds[kind] for kind in types[: n + depths]]
    stack += [full] * (n + depths - len(stack))
    return stack[:n], _one_of(c, stack[n:] or [stack[-1]])


def mimo_v2(c: ConfigAttributes, n: int, base: AttentionSpec) -> tuple[list[AttentionSpec], AttentionSpec]:
    """(mixers of the decoder, mixer of the MTP depths, which has a sliding window).

    Values are narrower than keys; sliding layers have another number of query groups, and an attention sink.
    """
    pattern = c.get("hybrid_attention_pattern")
    if not isinstance(pattern, list | tuple) or len(pattern) != n or any(one not in (0, 1) for one in pattern):
        raise c.error(f"hybrid_attention_pattern is {shown(pattern)}; it must hold a 0 or 1 for each of {n} layers")
    width = c.size("v_head_dim")
    narrow = replace(base, v_channels=None if width == base.kv_channels else width, window_size=None)
    full = replace(narrow, num_query_groups=c.size("full_attn_num_query_groups"), learnable_softmax_sink=False)
    sliding = replace(
        narrow,
        num_query_groups=c.size("swa_num_query_groups"),
        window_size=c.size("window_size"),
        learnable_softmax_sink=True,
    )
    for spec in (full, sliding):
        if spec.num_attention_heads % spec.num_query_groups:
            raise c.error(
                f"num_attention_heads ({spec.num_attention_heads}) is not divisible by the query groups "
                f"({spec.num_query_groups}) of a layer"
            )
    return [sliding if one else full for one in pattern], sliding


#: Provider -> the function that reads its attention.
LAYERWISE: dict[str, Callable[[ConfigAttributes, int, AttentionSpec], tuple[list[AttentionSpec], AttentionSpec]]] = {
    "Step35ModelProvider": step35,
    "Step37ModelProvider": step35,
    "MiMoV2FlashModelProvider": mimo_v2,
}


def _positive(c: ConfigAttributes, setting: dict[str, Any], key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise c.error(f"sliding_attention_setting[{key!r}] is {shown(setting.get(key))}; it must be a positive integer")
    return value


def _one_of(c: ConfigAttributes, depths: Sequence[AttentionSpec]) -> AttentionSpec:
    if any(one != depths[0] for one in depths):
        raise c.error("layer_types has MTP depths of both kinds, which is not estimated; make them alike")
    return depths[0]
