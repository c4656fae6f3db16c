"""What random layouts (``scripts/differential.py``) found to be off, made small, beside Transformer Engine.

Each is a command of ``bridge-memory rehearse`` whose saved bytes and peaks agree to half a per cent.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridge_memory.cli import main


def rows(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, dict[str, Any]]:
    code = main(["rehearse", *command.split(), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return {row["name"]: row for row in json.loads(out)["rows"]}


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FIRST = "--pp 2 --stage 0 --num-layers 2"
MAMBA = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"


@pytest.mark.parametrize(
    "command",
    [
        # A pass without gradients keeps a mask of hidden dropout for a bias alone, which Mistral has not.
        f"mistralai/Mistral-7B-v0.3 {FIRST} --tp 2 --num-gpus 4 --seq-length 1024 --hidden-dropout 0.1 {FULL}",
        f"openai/GPT-3-175B {FIRST} --tp 8 --num-gpus 16 --seq-length 1024 --hidden-dropout 0.1 {FULL}",
        # Gradients of learned positions, of the embedding and of each depth.
        "openai/GPT-3-175B --tp 4 --num-gpus 4 --num-layers 1 --mtp-num-layers 2 --seq-length 512",
        # The gradient of all depths' hidden states is gone when the first depth makes the embedding's.
        "openai/GPT-3-175B --tp 8 --num-gpus 8 --num-layers 1 --mtp-num-layers 1 --seq-length 512",
        "meta-llama/Llama-2-70b-hf --tp 2 --num-gpus 2 --num-layers 3 --mtp-num-layers 2 --seq-length 256",
        # The embedding's dropout mask is gone when its gradient is added to the output layer's.
        "openai/GPT-3-175B --tp 4 --num-gpus 4 --num-layers 2 --seq-length 1024 --hidden-dropout 0.1",
        # cuDNN takes no windows with dropout: FlashAttention is left.
        "microsoft/Phi-4-mini-instruct --tp 4 --num-gpus 4 --num-layers 2 --seq-length 1024 --micro-batch-size 2 "
        "--attention-dropout 0.1",
        # All tokens of a rank's heads, joined and put in order.
        f"{MAMBA} {FIRST} --tp 4 --cp 2 --num-gpus 16 --seq-length 2048",
        # Eight heads of one group: the gradients of B and C are sums of eight parts.
        f"{MAMBA} --tp 8 --num-gpus 8 --num-layers 1 --seq-length 8192 --make-vocab-size-divisible-by 1",
        # The ring of packed sequences: halves of keys and values, no sum in fp32.
        f"Qwen/Qwen3-1.7B {FIRST} --tp 2 --cp 2 --num-gpus 8 --packed-sequences {FULL}",
        f"Qwen/Qwen3-1.7B {FIRST} --tp 2 --cp 4 --num-gpus 16 --packed-sequences {FULL}",
        f"Qwen/Qwen3-1.7B {FIRST} --tp 2 --cp 4 --num-gpus 16 {FULL}",
        # Multi-head attention, where the ring's backward is the highest.
        "meta-llama/Llama-2-7b-hf --tp 2 --pp 2 --stage 0 --num-layers 4 --cp 4 --num-gpus 16 --packed-sequences",
        # A chunk of a depth and losses alone: the schedule keeps its input, the depth a copy.
        "meta-llama/Llama-3.2-1B --num-layers 4 --mtp-num-layers 1 --pipeline-model-parallel-layout Et|tt|t|mL --pp 4 "
        "--num-gpus 4 --stage 3 --seq-length 512",
        # Experts of many rows, which lack half a multiple of 32, or of 16, on average.
        "deepseek-ai/DeepSeek-V2 --tp 2 --etp 1 --ep 8 --num-gpus 8 --num-layers 2 --seq-length 1024 --fp8 e4m3 "
        "--fp8-recipe mxfp8 --gpu B200",
        "moonshotai/Kimi-K2-Instruct --etp 1 --pp 4 --ep 4 --num-gpus 32 --num-layers 4 --stage 1 --fp8 hybrid "
        "--fp8-recipe tensorwise",
        # 6.4 rows an expert, which fp8 pads to 16.
        "zai-org/GLM-4.5 --tp 8 --etp 2 --cp 4 --num-gpus 32 --num-layers 4 --seq-length 2048 --fp8 e4m3",
        # Shared experts beside the exchanges: their linears gather and scatter nothing themselves.
        "deepseek-ai/DeepSeek-V3 --num-layers 4 --pp 4 --stage 3 --tp 4 --etp 1 --ep 8 --num-gpus 128 --seq-length 512 "
        "--moe-shared-expert-overlap",
        "Qwen/Qwen3-Next-80B-A3B-Instruct --pp 2 --ep 2 --num-gpus 16 --num-layers 2 --stage 0 --seq-length 2048 "
        "--pipeline-model-parallel-layout Et|tL --recompute-granularity selective --recompute-modules moe_act "
        "--moe-shared-expert-overlap",
        # A stage of depths alone sends all hidden states on, joined; the one of the losses receives them.
        "meta-llama/Llama-3.2-1B --num-layers 4 --mtp-num-layers 1 --pp 4 --num-gpus 4 --seq-length 1024 "
        "--pipeline-model-parallel-layout Ett|tt|m|L --stage 2",
        "meta-llama/Llama-3.2-1B --num-layers 4 --mtp-num-layers 2 --pp 4 --tp 2 --num-gpus 8 --seq-length 512 "
        "--pipeline-model-parallel-layout Ett|tt|mm|L --stage 3",
        # Experts' activations are recomputed inside of recomputed experts: the first pass keeps no input of theirs.
        "moonshotai/Moonlight-16B-A3B --etp 2 --tp 4 --pp 4 --ep 8 --num-gpus 128 --num-layers 4 --stage 2 "
        "--seq-length 256 --recompute-granularity selective --recompute-modules moe_act,moe",
        # 62.5 tokens of a rank to each expert.
        f"mistralai/Mixtral-8x7B-v0.1 {FIRST} --etp 1 --tp 8 --ep 8 --num-gpus 64 --seq-length 1000 "
        "--micro-batch-size 2",
    ],
)
def test_it_agrees(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = rows(capsys, command)
    for name in ("parameters (elements)", "weights", "gradients", "optimizer state"):
        assert table[name]["difference"] == 0, table[name]
    for name in ("saved for backward, per microbatch", "forward peak", "backward peak", "peak"):
        assert abs(table[name]["difference"]) <= 0.005 * table[name]["found"], table[name]


def test_windows_with_dropout_are_refused_where_cudnn_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = "google/gemma-3-12b-pt --num-layers 6 --attention-dropout 0.1 --attention-backend fused"
    assert main(["rehearse", *command.split()]) == 2
    assert "--attention-backend (fused) does not go with sliding windows" in capsys.readouterr().err
