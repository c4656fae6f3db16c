"""torchtitan's own Llama on the meta device, with its own checkpointing: what it keeps and peaks at."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from compiled_oracle import Kept, importable, without_data
from hf_oracle import META, Measured, passes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bridge_memory.rehearsal.torch.jobs import world
from bridge_memory.rehearsal.torch.reserved import Follower
from bridge_memory.rehearsal.tracker import Tracker
from bridge_memory.rehearsal.uncomputed import Uncomputed
from bridge_memory.workspaces.caching_allocator import Reserved

#: What torchtitan's packages import beside the modules that are wanted.
_PACKAGES = ("torchtitan", "torchtitan.models", "torchtitan.models.llama3", "torchtitan.models.llama3.model",
             "torchtitan.models.llama3.infra", "torchtitan.components", "torchtitan.protocols", "torchtitan.tools",
             "torchtitan.config", "torchtitan.distributed")  # fmt: skip


class _Anything(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *a, **k: None})


class _Protocol(torch.nn.Module):
    def __init__(self, args: Any) -> None:
        super().__init__()


def available() -> bool:
    return importlib.util.find_spec("torchtitan") is not None


def _modules() -> tuple[Any, Any]:
    """(the model, its checkpointing), without what else their packages import."""
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))).parent
    given: dict[str, ModuleType] = {}
    for name in _PACKAGES:
        package = _Anything(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        given[name] = package
    for name in ("torchtitan.components.tokenizer", "torchtitan.tools.logging", "torchtitan.tools.utils",
                 "torchtitan.models.utils", "torchtitan.config.job_config", "torchtitan.models.llama3.model.args",
                 "torchtitan.protocols.model", "torchtitan.models.attention"):
        given[name] = _Anything(name)
    given["torchtitan.tools.logging"].logger = SimpleNamespace(  # type: ignore[attr-defined]
        info=lambda *a: None, debug=lambda *a: None
    )
    given["torchtitan.models.attention"].ScaledDotProductAttentionWrapper = _Attention  # type: ignore[attr-defined]
    protocol = _Anything("torchtitan.protocols.train_spec")
    protocol.ModelProtocol = _Protocol  # type: ignore[attr-defined]
    given["torchtitan.protocols.train_spec"] = protocol
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchtitan"}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(given)
    try:
        return (importlib.import_module("torchtitan.models.llama3.model.model"),
                importlib.import_module("torchtitan.distributed.activation_checkpoint"))  # fmt: skip
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]
        sys.modules.update(kept)


class _RMSNorm(torch.autograd.Function):
    """CUDA's kernel (``aten/src/ATen/native/layer_norm.cpp: rms_norm_symint`` takes ``_fused_rms_norm`` there)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Attention(torch.nn.Module):
    """``ScaledDotProductAttentionWrapper``: CUDA's flash kernel, by its name."""

    def forward(self, q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def kept_by_layer(config: dict[str, Any], batch: int, seq: int, mode: str = "none") -> dict[str, int]:
    """Of a layer compiled by itself (``models/llama3/infra/parallelize.py: apply_compile``), around its checkpoint."""
    module, checkpoint = _modules()
    h, heads = config["hidden_size"], config["num_attention_heads"]
    with importable({module.__name__: module}), without_data():
        model = module.Transformer(_arguments(config, seq))
        _checkpointed(model, checkpoint, mode, "op")
        layer = next(iter(model.layers.values()))
        kept = Kept()
        layer.compile(backend=kept.backend)
        x = torch.empty(batch, seq, h, requires_grad=True)
        table = torch.empty(seq, h // heads // 2, dtype=torch.complex64)
        out = layer(x, table, None)
        out.backward(torch.empty_like(out))
        return kept.saved(table, *layer.parameters())


def _checkpointed(model: Any, checkpoint: Any, mode: str, option: str) -> None:
    if mode == "none":
        return
    saved = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default}
    settings = SimpleNamespace(
        mode=mode, selective_ac_option=option, per_op_sac_force_recompute_mm_shapes_by_fqns=[],
        preserve_rng_state=False, determinism_check="default", early_stop=False, debug=False,
    )
    checkpoint._layer_sac_count = 0
    with patch.object(torch._C._dynamo.eval_frame, "_set_lru_cache", lambda on: None):
        checkpoint.apply_ac(model, settings, op_sac_save_list=saved)


def _arguments(config: dict[str, Any], seq: int) -> SimpleNamespace:
    return SimpleNamespace(
        dim=config["hidden_size"], n_layers=config["num_hidden_layers"], n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"], vocab_size=config["vocab_size"], norm_eps=1e-5, depth_init=True,
        multiple_of=config["intermediate_size"], ffn_dim_multiplier=None, max_seq_len=seq, rope_theta=1e4,
        attn_type="sdpa",
        rope_scaling_args=SimpleNamespace(scaling_factor=1.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                          original_max_position_embeddings=seq),
    )  # fmt: skip


def _built(config: dict[str, Any], seq: int, mode: str, option: str, dtype: torch.dtype) -> Any:
    """The model of a Hugging Face config on the meta device, with its checkpoints."""
    model_module, checkpoint = _modules()
    f, h = config["intermediate_size"], config["hidden_size"]
    with torch.device(META):
        model = model_module.Transformer(_arguments(config, seq)).to(dtype)
        model.freqs_cis = model._precompute_freqs_cis()
    for block in model.layers.values():
        assert block.feed_forward.w1.weight.shape == (f, h)
    _checkpointed(model, checkpoint, mode, option)
    return model


def _fused_norms() -> Any:
    return patch.object(torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: _RMSNorm.apply(x, weight))


def _loss(model: Any, ids: Any) -> Any:
    """``train.py``: what the model gave is let go before backward."""
    pred = model(ids)
    return torch.nn.functional.cross_entropy(pred.flatten(0, 1).float(), ids.flatten(0, 1), reduction="sum")


def measure(config: dict[str, Any], batch: int, seq: int, mode: str, option: str = "op") -> Measured:
    """One forward and backward pass in bf16; gradients are there before."""
    model = _built(config, seq, mode, option, torch.bfloat16)
    ids = torch.zeros(batch, seq, dtype=torch.long, device=META)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tracker = Tracker(static=[ids, model.freqs_cis, *(p.grad for p in model.parameters())])
    with _fused_norms(), tracker.watching(model):
        return passes(tracker, lambda: _loss(model, ids))


def reserved(config: dict[str, Any], batch: int, seq: int, ranks: int, mode: str, steps: int = 3) -> Reserved:
    """What torch's allocator reserves in so many steps under FSDP2: fp32 shards, bf16, gradients reduced in fp32, fused
    AdamW; the embedding, every layer and the end of the model are units (``parallelize.py: apply_fsdp``)."""
    model = _built(config, seq, mode, "op", torch.float32)
    engine = SimpleNamespace(engine="fsdp2", of_deepspeed=False)
    run = SimpleNamespace(parallel=SimpleNamespace(world_size=ranks), data_parallel=engine)
    given = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    with world(run), _fused_norms(), Uncomputed():  # type: ignore[arg-type]
        mesh = init_device_mesh("cpu", (ranks,))
        for unit in (model.tok_embeddings, *model.layers.values(), [model.norm, model.output], model):
            fully_shard(unit, mesh=mesh, **given)
        tracker = Tracker(device="cpu", unit=512)
        with tracker.following(torch.nn.Module()):
            model.to_empty(device="cpu")
            model.freqs_cis = model._precompute_freqs_cis()
            follower = Follower(tracker)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
            for _ in range(steps):
                ids = torch.zeros(batch, seq, dtype=torch.long)
                optimizer.zero_grad()
                _loss(model, ids).backward()
                optimizer.step()
            return follower.done(model)
