"""Megatron Bridge's import of a small Hugging Face checkpoint, onto a rank whose tensors have no data.

A process of its own, as ``bridge_rehearsal.py``: ``python tests/bridge_import.py CASE ...``. Prints one JSON line a
case: bytes above the built model at the highest moment of the import, predicted and measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bridge_child import print_answers
from bridge_rehearsal import start

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
}  # fmt: skip
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 384, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
TP2: dict[str, Any] = {"world_size": 2, "tensor_model_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "dense": (DENSE, {}, True),
    "dense, TP 2": (DENSE, TP2, True),
    "wide MLP, TP 4": (
        DENSE | {"intermediate_size": 4096}, {"world_size": 4, "tensor_model_parallel_size": 4}, True
    ),
    "tied, TP 2": (DENSE | {"tie_word_embeddings": True}, TP2, True),
    "tied": (DENSE | {"tie_word_embeddings": True}, {}, True),
    "experts": (EXPERTS, {}, True),
    "experts one by one, TP 2": (EXPERTS, TP2, False),
    "experts, EP 2": (EXPERTS, {"world_size": 2, "expert_model_parallel_size": 2}, True),
    "experts, TP 2": (EXPERTS, TP2, True),
    "wide experts, TP 2 ETP 2": (EXPERTS | {"moe_intermediate_size": 2048}, TP2, True),
    "wide experts, TP 2 EP 2 ETP 1": (
        EXPERTS | {"moe_intermediate_size": 2048},
        TP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, True,
    ),
}  # fmt: skip


def written(config: dict[str, Any], folder: Path) -> None:
    """A checkpoint of random weights, as transformers writes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = AutoConfig.for_model(**config)
    said.architectures = config["architectures"]
    AutoModelForCausalLM.from_config(said, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def answer(name: str) -> dict[str, Any]:
    from megatron.bridge import AutoBridge

    from bridge_memory.job.megatron.loading import How, loading
    from bridge_memory.outside.amount import total
    from bridge_memory.readers import model_from_hf_config
    from bridge_memory.rehearsal.model import build_chunks
    from bridge_memory.rehearsal.patches.device import tensors_call_themselves_cuda
    from bridge_memory.rehearsal.rank import on_rank
    from bridge_memory.rehearsal.tracker import Tracker
    from bridge_memory.spec import ImplementationSpec, ParallelSpec, RunSpec

    config, sizes, grouped = CASES[name]
    implementation = ImplementationSpec(moe_grouped_gemm=grouped)
    model = model_from_hf_config(config, name="small")
    run = RunSpec(model=model, parallel=ParallelSpec(**sizes), implementation=implementation)
    with tempfile.TemporaryDirectory() as folder:
        written(config, Path(folder))
        bridge = AutoBridge.from_hf_pretrained(folder)
        with on_rank(run, 0):
            tracker = Tracker()
            with tracker, tensors_call_themselves_cuda():
                chunks = build_chunks(run)
                before = tracker.live_bytes
                tracker.reset_peak()
                bridge._model_bridge.load_weights_hf_to_megatron(bridge.hf_pretrained, chunks)
                measured = tracker.peak().bytes - before
    found, built = (loading(run, 0, how) for how in (How.HUGGING_FACE, How.NONE))
    assert found is not None and built is not None
    return {"bytes": [total(found).most - total(built).most, measured]}


def main(names: list[str]) -> None:
    start()
    print_answers(names or CASES, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
