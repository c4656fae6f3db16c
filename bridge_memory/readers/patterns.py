"""Megatron's layer patterns: which layers have experts, linear attention or sliding windows; the layers of hybrids."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from bridge_memory.readers.fields import MAX_LAYERS, shown
from bridge_memory.spec import SpecError


def layer_pattern(value: object, layers: int, name: str, *, sparse: bool = False) -> tuple[bool, ...]:
    """Expand a frequency or a list into one bool per layer.

    ``name`` is used in messages. A list or tuple of 0 and 1 is the pattern itself; so is Megatron's expression
    "([0]*3+[1]*58)", which may contain lists, integers, + and * only (``megatron/training/arguments.py:
    moe_freq_type``). A number N, also as text, means one of two things:

    - ``moe_layer_freq``: True on layers 0, N, 2N, ... (``models/gpt/gpt_layer_specs.py: get_gpt_decoder_layer_specs``);
    - with ``sparse``, ``linear_attention_freq`` and ``window_attn_skip_freq``: False on every N-th layer, else True
      (``experimental_attention_variant_module_specs.py: get_linear_attention_pattern``, ``transformer/utils.py:
      is_layer_window_attention``).

    Raises SpecError.
    """
    if isinstance(value, str):
        value = _parsed(value, name)
    if type(value) is int:
        if value < 1:
            raise SpecError(f"{name} is {value}; give 1 or more, or a list of 0 and 1")
        if sparse:
            return tuple((i + 1) % value != 0 for i in range(layers))
        return tuple(i % value == 0 for i in range(layers))
    if not isinstance(value, list | tuple) or any(type(x) not in (int, bool) or x not in (0, 1) for x in value):
        raise SpecError(f"{name} is {shown(value)}; give a number, or a list of 0 and 1 such as ([0]*3+[1]*58)")
    if len(value) != layers:
        raise SpecError(f"{name} has {len(value)} entries for {layers} layers; give one a layer")
    return tuple(bool(x) for x in value)


def _parsed(text: str, name: str) -> int | list[int]:
    plain = text.strip().strip("'\"")
    try:
        if re.fullmatch(r"\d+", plain):
            return int(plain)
        found = _evaluated(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list):
        raise SpecError(f"{name} is {shown(text)}; give a number, or a list of 0 and 1 such as ([0]*3+[1]*58)")
    return found


def _evaluated(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_LAYERS:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        # Some scripts write "[[0]*3,[1]*58]": it is flattened.
        members = [_evaluated(x) for x in node.elts]
        return [x for member in members for x in (member if isinstance(member, list) else [member])]
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            one, times = (left, right) if isinstance(left, list) else (right, left)
            if len(one) * times <= MAX_LAYERS:
                return one * times
    raise ValueError("not a list of layers")


# --------------------------------------------------------------------------------------------------
# Mamba hybrids
# --------------------------------------------------------------------------------------------------

#: ``ssm/mamba_hybrid_layer_allocation.py: Symbols``; D, for sparse attention, is not supported.
MAMBA, ATTENTION, MLP, MOE, DELTA_NET, MLA = "M", "*", "-", "E", "G", "+"


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """A hybrid's layers, one symbol each: ``M`` Mamba, ``*`` attention, ``-`` MLP, ``E`` MoE, ``G`` gated delta net,
    ``+`` multi-latent attention.

    ``segments``: the decoder's layers: one string, or one per chunk if the pattern splits the pipeline. ``mtp``: the
    layers of each MTP depth.
    """

    segments: tuple[str, ...]
    mtp: tuple[str, ...] = ()

    @property
    def layers(self) -> str:
        return "".join(self.segments)

    @property
    def splits_pipeline(self) -> bool:
        return len(self.segments) > 1

    @property
    def layout(self) -> str | None:
        """Megatron's layout string if the pattern splits the pipeline, else None."""
        if not self.splits_pipeline:
            return None
        chunks = [f"t*{len(segment)}" for segment in self.segments]
        return "E" + "|".join(chunks) + "m" * len(self.mtp) + "L"


def hybrid_pattern(text: str, name: str) -> HybridPattern:
    """Parse a pattern such as "M-M*|M-M*/*E": ``|`` separates pipeline chunks, ``/`` starts an MTP depth.

    Raises SpecError. Source: ``models/hybrid/hybrid_layer_allocation.py: parse_hybrid_pattern`` (newer Megatron-LM);
    older patterns consist of symbols only.
    """
    decoder, *mtp = text.strip("'\"").split("/")
    found = HybridPattern(tuple(decoder.split("|")), tuple(mtp))
    unknown = sorted(set(found.layers + "".join(mtp)) - {MAMBA, ATTENTION, MLP, MOE, DELTA_NET, MLA})
    if unknown:
        raise SpecError(f"{name} holds {shown(''.join(unknown))}; known: M, *, -, E, G, +, and | and / between them")
    return found


def pattern_of_ratios(layers: int, attention_ratio: float, mlp_ratio: float) -> HybridPattern:
    """Attention layers evenly spaced between Mamba layers, then MLPs evenly spaced over the rest, right-justified.

    Source: ``mamba_hybrid_layer_allocation.py: _allocate_auto``.
    """
    pattern = [MAMBA] * layers
    attention = round(layers * attention_ratio)
    mamba = layers - attention
    _spread(pattern, ATTENTION, mamba / (attention + 1))
    mlp = round(layers * mlp_ratio)
    if mlp:
        _spread(pattern, MLP, (mamba - mlp) / mlp)
    return HybridPattern(("".join(pattern),))


def _spread(pattern: list[str], symbol: str, section: float) -> None:
    left = section
    for i, kind in enumerate(pattern):
        if kind != MAMBA:
            continue
        if left < 0.5:
            pattern[i] = symbol
            left += section
        else:
            left -= 1
