"""Megatron's layer patterns: which layers hold experts, which attend linearly, which slide a window."""

from __future__ import annotations

import ast
import re
from typing import Any

from bridge_memory.readers.fields import MAX_LAYERS, shown
from bridge_memory.spec import SpecError


def layer_pattern(value: object, layers: int, name: str, *, sparse: bool = False) -> tuple[bool, ...]:
    """A frequency or a list as one answer a layer; ``name`` is what to call it in a refusal.

    A list (or tuple) of 0 and 1 is the pattern itself; so is Megatron's expression "([0]*3+[1]*58)", of which nothing
    is evaluated but lists, numbers, + and * (``megatron/training/arguments.py: moe_freq_type``). A number N, as text
    too, means one of two things:

    - ``moe_layer_freq``: True on layers 0, N, 2N, ... (``models/gpt/gpt_layer_specs.py: get_gpt_decoder_layer_specs``);
    - with ``sparse``, ``linear_attention_freq`` and ``window_attn_skip_freq``: False on each N-th layer, True elsewhere
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
        # "[[0]*3,[1]*58]", as some scripts write it, is one list.
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
