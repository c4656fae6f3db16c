"""torchtune's own layers and loss on tensors without data, without what else its package imports."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from compiled_oracle import Kept, importable, without_data
from hf_oracle import META, Measured, passes
from torch import nn

from bridge_memory.rehearsal.tracker import Tracker

_PACKAGES = ("torchtune", "torchtune.modules", "torchtune.utils", "torchtune.utils._logging",
             "torchtune.modules.kv_cache", "torchtune.modules.attention_utils", "torchtune.models",
             "torchtune.modules.loss")  # fmt: skip


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *a, **k: None})


def available() -> bool:
    return importlib.util.find_spec("torchtune") is not None


def _attend(q: Any, k: Any, v: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = True) -> Any:
    """Flex attention keeps what CUDA's flash kernel does."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


class RMSNorm(nn.Module):
    """torchtune's own but for release 0.6: the norm is cast back before it is multiplied."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Any) -> Any:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return normed * self.scale


def _modules() -> dict[str, Any]:
    root = Path(str(importlib.util.find_spec("torchtune").origin)).parent  # type: ignore[union-attr]
    given: dict[str, ModuleType] = {}
    for name in _PACKAGES:
        package = _Anything(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        given[name] = package
    utils: Any = given["torchtune.modules.attention_utils"]
    utils._sdpa_or_flex_attention = lambda: _attend
    utils._MaskType = torch.Tensor
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchtune"}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(given)
    try:
        found: dict[str, Any] = {}
        for name in ("position_embeddings", "feed_forward", "tied_linear", "attention", "transformer"):
            found.update(_own(f"torchtune.modules.{name}"))
        found.update(_own("torchtune.modules.loss.ce_chunked_output_loss"))
        found["loaded"] = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "torchtune"}
        return found
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchtune"]:
            del sys.modules[name]
        sys.modules.update(kept)


def _own(name: str) -> dict[str, Any]:
    """Classes of a module that are no other's."""
    module = importlib.import_module(name)
    return {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == name}


def _model(config: dict[str, Any], seq: int) -> tuple[Any, dict[str, Any]]:
    m = _modules()
    h, f, a, g = (config[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    d = config.get("head_dim") or h // a

    def linear(i: int, o: int) -> nn.Linear:
        return nn.Linear(i, o, bias=False)

    rope = m["RotaryPositionalEmbeddings"](d, seq)
    for name in ("theta", "cache"):
        setattr(rope, name, getattr(rope, name).float())
    layers = []
    for _ in range(config["num_hidden_layers"]):
        attention = m["MultiHeadAttention"](
            embed_dim=h, num_heads=a, num_kv_heads=g, head_dim=d, q_proj=linear(h, a * d), k_proj=linear(h, g * d),
            v_proj=linear(h, g * d), output_proj=linear(a * d, h), pos_embeddings=rope, max_seq_len=seq,
            attn_dropout=0.0,
        )
        attention.cache_enabled = False
        mlp = m["FeedForward"](gate_proj=linear(h, f), down_proj=linear(f, h), up_proj=linear(h, f))
        layers.append(
            m["TransformerSelfAttentionLayer"](attn=attention, mlp=mlp, sa_norm=RMSNorm(h), mlp_norm=RMSNorm(h))
        )
    tokens = nn.Embedding(config["vocab_size"], h)
    tied = config["tie_word_embeddings"]
    return m["TransformerDecoder"](
        tok_embeddings=tokens, layers=layers, max_seq_len=seq, num_heads=a, head_dim=d, norm=RMSNorm(h),
        output=m["TiedLinear"](tokens) if tied else linear(h, config["vocab_size"]),
    ), m  # fmt: skip


def measure(config: dict[str, Any], batch: int, seq: int, chunks: int = 0, *, checkpoints: bool = False) -> Measured:
    """One forward and backward pass in bf16 of packed samples, as ``recipes/full_finetune_single_device.py`` runs
    them; gradients are there before."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(META):
            model, m = _model(config, seq)
            ids, places = (torch.zeros(batch, seq, dtype=torch.long) for _ in range(2))
    finally:
        torch.set_default_dtype(torch.float32)
    if checkpoints:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({m["TransformerSelfAttentionLayer"]})
        apply_activation_checkpointing(model, auto_wrap_policy=policy)
    if chunks:
        model.set_num_output_chunks(chunks)
        loss_of = m["CEWithChunkedOutputLoss"](chunks)
    else:
        loss_of = nn.CrossEntropyLoss()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    buffers = [b for b in model.buffers()]
    tracker = Tracker(static=[ids, places, *buffers, *(p.grad for p in model.parameters())])

    def loss() -> Any:
        logits = model(ids, input_pos=places)
        labels = ids.clone()
        if not chunks:
            labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        return loss_of(logits, labels)

    with tracker.watching(model):
        return passes(tracker, loss)


def kept_by_layer(config: dict[str, Any], batch: int, seq: int) -> dict[str, int]:
    """Of a layer compiled by itself (``training/_compile.py: compile_model``)."""
    with without_data():
        model, m = _model(config, seq)
        layer, kept = model.layers[0], Kept()
        layer.compile(backend=kept.backend)
        x = torch.empty(batch, seq, config["hidden_size"], requires_grad=True)
        places = torch.zeros(batch, seq, dtype=torch.long)
        with importable(m["loaded"]):
            out = layer(x, input_pos=places)
        out.backward(torch.empty_like(out))
        return kept.saved(*layer.parameters(), *layer.buffers(), places)
