"""No flag of a run does nothing in silence: each moves a number or a sentence, or is refused by name. Megatron's own
spellings are taken."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from pathlib import Path

import pytest

from bridge_memory import find_gpu
from bridge_memory.arguments.flags import FLAGS, add_run_arguments
from bridge_memory.arguments.run import run_from_arguments
from bridge_memory.cli import COMMANDS, main
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.job.job import job_of
from bridge_memory.spec import SpecError

DENSE = "Llama-3.2-1B --num-gpus 16 --global-batch-size 48"
PIPED = f"{DENSE} --pp 2"
EXPERTS = "Qwen3-30B-A3B --num-gpus 16 --ep 4 --global-batch-size 32"
SHARED = "DeepSeek-V2-Lite --num-gpus 16 --tp 2 --ep 4 --global-batch-size 32"
AWARE = f"{DENSE} --use-precision-aware-optimizer"
HUGGING = "Llama-3.2-1B --num-gpus 1 --engine single --implementation transformers"
TUNE = "Llama-3.2-1B --num-gpus 1 --engine single --implementation torchtune --torch-implementation fused"
ADAPTED = f"{HUGGING} --peft lora --lora-target-modules q_proj,v_proj"
QLORA = f"{ADAPTED} --engine single --load-in-4bit"
EXPERTS_AFTER_ONE = "DeepSeek-V2-Lite --num-gpus 16 --ep 4 --global-batch-size 32"
SHARDED = f"{DENSE} --engine megatron_fsdp --data-parallel-sharding-strategy optim_grads_params"

DDP = "Llama-3.2-1B --num-gpus 8 --seq-length 512 --engine ddp"
#: Its vectors are no multiples of 512 bytes, so that buckets with other parameters are rounded otherwise.
ODD_BUCKETS = "Qwen2.5-0.5B --num-gpus 8 --seq-length 512 --engine ddp --ddp-bucket-cap-mb 41"
FSDP1, FSDP2, ZERO1, ZERO2, ZERO3 = (
    DDP.replace("ddp", engine) for engine in ("fsdp1", "fsdp2", "zero1", "zero2", "zero3")
)
#: Norms of 2,050 bytes, so many in one unit that their alignment to 16 is more than the allocator's rounding.
UNALIGNED = (
    '--custom-config {"model_type":"llama","hidden_size":1025,"intermediate_size":2048,"num_hidden_layers":64,'
    '"num_attention_heads":4,"num_key_value_heads":4,"head_dim":64,"vocab_size":32000,"max_position_embeddings":4096,'
    '"rms_norm_eps":1e-5} --num-gpus 2 --seq-length 128 --engine fsdp1 --fsdp-auto-wrap-policy NO_WRAP'
)

#: Flag -> (the rest of the command line, what the flag is given).
#: What a budget of rows needs.
BUDGET = (
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --use-transformer-engine-op-fuser "
    "--megatron-core 0.19"
)
#: Jobs of which the whole is compared: their checkpoints.
SAVED = "Llama-3.2-1B --num-gpus 2 --megatron-core 0.19"
SHARED_EXPERTS = "Qwen3-30B-A3B --ep 4 --num-gpus 8 --num-layers 2"
#: Small models with an encoder.
_ENCODERS = Path(__file__).parents[1] / "data" / "encoders"
VISION, AUDIO = str(_ENCODERS / "qwen2_5_vl.json"), str(_ENCODERS / "qwen2_audio.json")
CASES = {
    "--tp": (DENSE, "2"), "--pp": (DENSE, "2"), "--vpp": (PIPED, "2"), "--cp": (DENSE, "2"), "--ep": (EXPERTS, "8"),
    "--etp": (f"{EXPERTS} --tp 2", "1"), "--num-gpus": ("Llama-3.2-1B", "8"),
    "--sequence-parallel": (f"{DENSE} --tp 2", "no"),
    "--num-layers-in-first-pipeline-stage": (PIPED, "6"), "--num-layers-in-last-pipeline-stage": (PIPED, "6"),
    "--pipeline-model-parallel-layout": (PIPED, "Et*9|t*7,L"),
    "--account-for-embedding-in-pipeline-split": (
        f"{PIPED} --account-for-loss-in-pipeline-split --num-layers 14".replace("--pp 2", "--pp 4"), ""),
    "--account-for-loss-in-pipeline-split": (
        f"{PIPED} --account-for-embedding-in-pipeline-split --num-layers 14".replace("--pp 2", "--pp 4"), ""),
    "--microbatch-group-size-per-vp-stage": (f"{PIPED} --vpp 2", "3"),
    "--num-distributed-optimizer-instances": (DENSE, "2"),
    "--micro-batch-size": (DENSE, "3"), "--global-batch-size": ("Llama-3.2-1B --pp 4 --num-gpus 4", "1"),
    "--seq-length": (DENSE, "8192"), "--packed-sequences": (DENSE, ""),
    "--peft": (DENSE, "lora"), "--lora-dim": (f"{DENSE} --peft lora", "8"),
    "--lora-target-modules": (f"{DENSE} --peft lora", "linear_qkv,linear_proj"),
    "--precision": (DENSE, "fp32"), "--fp8": (DENSE, "e4m3"), "--fp8-recipe": (f"{DENSE} --fp8 e4m3", "mxfp8"),
    "--fp4": (DENSE, "e2m1"), "--fp4-param-gather": (f"{DENSE} --fp4 e2m1", ""),
    "--num-layers-at-start-in-bf16": (f"{DENSE} --fp8 e4m3 --fp8-recipe mxfp8", "1"),
    "--num-layers-at-end-in-bf16": (f"{DENSE} --fp8 e4m3 --fp8-recipe mxfp8", "1"),
    "--fp8-dot-product-attention": (f"{DENSE} --fp8 e4m3", ""),
    "--fsdp-double-buffer": (SHARDED, ""),
    "--fsdp-db-use-persist-buf-on-alloc-fail": (f"{SHARDED} --fsdp-double-buffer", ""),
    "--megatron-fsdp-max-pool-double-buffer": (
        # From 0.19 on the dense layer is not gathered while what stands before it runs, and is not at the peak.
        f"{SHARDED.replace(DENSE, EXPERTS_AFTER_ONE)} --fsdp-double-buffer --megatron-core 0.18", ""
    ),
    "--fp8-param-gather": (f"{DENSE} --fp8 e4m3", ""),
    "--fp32-residual-connection": (f"{DENSE} --transformer-impl local", ""),
    "--optimizer": (DENSE, "sgd"), "--use-distributed-optimizer": (DENSE, "no"),
    "--engine": (f"{DENSE} --data-parallel-sharding-strategy optim_grads_params", "megatron_fsdp"),
    "--data-parallel-sharding-strategy": (f"{DENSE} --engine megatron_fsdp", "optim_grads_params"),
    "--suggested-communication-unit-size": (SHARDED, "1000000"),
    "--grad-comm-dtype": (f"{SHARDED} --seq-length 128", "bf16"),
    "--grad-reduce-in-fp32": (DENSE, "no"), "--overlap-grad-reduce": ("phi-4 --num-gpus 7", ""),
    "--overlap-param-gather": (DENSE, ""), "--ddp-bucket-size": ("phi-4 --num-gpus 7 --overlap-grad-reduce", "1000"),
    "--use-precision-aware-optimizer": (DENSE, ""), "--main-grads-dtype": (AWARE, "bf16"),
    "--main-params-dtype": (f"{AWARE} --no-store-param-remainders", "fp16"), "--exp-avg-dtype": (AWARE, "bf16"),
    "--exp-avg-sq-dtype": (AWARE, "fp8"), "--store-param-remainders": (AWARE, "no"),
    "--optimizer-cpu-offload": (DENSE, ""), "--optimizer-offload-fraction": (f"{DENSE} --optimizer-cpu-offload", "0.5"),
    "--recompute-granularity": (SHARED, "selective"),
    "--recompute-method": (f"{DENSE} --recompute-granularity full --recompute-num-layers 2 --recompute-method block",
                           "uniform"),
    "--recompute-num-layers": (
        f"{DENSE} --recompute-granularity full --recompute-method block --recompute-num-layers 1", "2"),
    "--recompute-modules": (f"{SHARED} --recompute-granularity selective", "moe_act"),
    "--distribute-saved-activations": (
        f"{DENSE} --tp 2 --no-sequence-parallel --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1", ""),
    "--transformer-impl": (DENSE, "local"), "--attention-backend": (DENSE, "unfused"),
    "--cp-comm-type": (f"{DENSE} --cp 2", "a2a"), "--cross-entropy-loss-fusion": (DENSE, ""),
    "--cross-entropy-fusion-impl": (f"{DENSE} --cross-entropy-loss-fusion", "te"),
    "--gradient-accumulation-fusion": (DENSE, "no"), "--bias-activation-fusion": (DENSE, "no"),
    "--bias-dropout-fusion": (f"{DENSE} --hidden-dropout 0.1 --pp 4 --tp 8 --num-gpus 32 --no-sequence-parallel", "no"),
    "--masked-softmax-fusion": (f"{DENSE} --transformer-impl local", "no"), "--apply-rope-fusion": (DENSE, "no"),
    "--calculate-per-token-loss": (DENSE, ""), "--deterministic-mode": (DENSE, ""),
    "--moe-imbalance": (EXPERTS, "1.5"), "--moe-token-dispatcher-type": (EXPERTS, "flex"),
    "--moe-grouped-gemm": (EXPERTS, "no"), "--moe-permute-fusion": (EXPERTS, ""), "--moe-router-fusion": (EXPERTS, ""),
    "--deallocate-pipeline-outputs": (PIPED, "no"),
    "--moe-flex-dispatcher-backend": (f"{EXPERTS} --moe-token-dispatcher-type flex", "hybridep"),
    "--moe-flex-dispatcher-num-sms": (f"{EXPERTS} --moe-token-dispatcher-type flex", "40"),
    "--moe-hybridep-ranks-per-nvlink-domain": (
        f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "2"),
    "--use-transformer-engine-op-fuser": (f"{DENSE} --no-bias-activation-fusion", ""),
    "--moe-expert-rank-capacity-factor": (f"{EXPERTS} {BUDGET}", "1.5"),
    "--moe-router-padding-for-quantization": (f"{EXPERTS} --fp8 e4m3 --fp8-recipe mxfp8", ""),
    "--moe-z-loss-coeff": (EXPERTS, "0.001"),
    "--tp-comm-overlap": (f"{DENSE} --tp 2", ""),
    "--moe-paged-stash": (f"{EXPERTS} {BUDGET} --moe-expert-rank-capacity-factor 1.5", ""),
    "--moe-paged-stash-buffer-size-factor-cuda": (
        f"{EXPERTS} {BUDGET} --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash", "1.3"),
    "--moe-mlp-glu-interleave-size": (
        f"{EXPERTS} {BUDGET} --moe-imbalance 4 --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear", "32"),
    "--moe-router-dtype": (EXPERTS, "fp32"), "--moe-expert-capacity-factor": (f"{EXPERTS} --moe-imbalance 2", "1.5"),
    "--moe-pad-expert-input-to-capacity": (f"{EXPERTS} --moe-expert-capacity-factor 1.5", ""),
    "--moe-shared-expert-overlap": (SHARED, ""),
    "--overlap-moe-expert-parallel-comm": (f"{EXPERTS} --pp 2 --vpp 2", ""),
    "--delay-wgrad-compute": (f"{EXPERTS} --pp 2 --vpp 2 --overlap-moe-expert-parallel-comm", ""),
    "--transformers-version": (HUGGING.replace("Llama-3.2-1B", "Qwen3-30B-A3B --num-layers 2"), "5.0"),
    "--attn-implementation": (HUGGING, "eager"),
    "--sdpa-kernel": (HUGGING, "efficient"), "--gradient-checkpointing": (HUGGING, ""),
    "--checkpoint-submodules": (HUGGING, ""),
    "--use-reentrant": (f"{HUGGING} --gradient-checkpointing".replace("Llama-3.2-1B", "Llama-2-70b-hf"), "no"),
    "--autocast": (f"{HUGGING} --precision fp32", "bf16"),
    "--attention-mask": (HUGGING, "padded"), "--use-cache": (f"{HUGGING} --attention-mask none", ""),
    "--keeps-outputs": (HUGGING, ""),
    "--liger-kernel": (HUGGING, "swiglu"), "--torch-compile": (HUGGING, ""),
    "--compile-loss": (TUNE, ""),
    "--cut-cross-entropy": (HUGGING, ""),
    "--num-output-chunks": (TUNE, "8"), "--optimizer-in-bwd": (f"{TUNE} --seq-length 16", ""),
    "--enable-activation-offloading": (f"{TUNE} --gradient-checkpointing --optimizer-in-bwd", ""),
    "--selective-ac-option": (f"{HUGGING.replace('transformers', 'torchtitan')} --engine ddp", "op"),
    "--use-dora": (f"{ADAPTED} --engine single", ""),
    "--load-in-4bit": (f"{ADAPTED} --engine single", ""), "--load-in-8bit": (f"{ADAPTED} --engine single", ""),
    "--bnb-4bit-use-double-quant": (QLORA, ""),
    "--bnb-4bit-compute-dtype": (f"{QLORA} --liger-kernel fused_linear_cross_entropy", "bf16"),
    "--prepare-model-for-kbit-training": (QLORA, ""),
    "--autocast-adapter-dtype": (ADAPTED, "no"), "--lora-dropout": (ADAPTED, "0.05"),
    "--mixer-kernels": (HUGGING.replace("Llama-3.2-1B", "Qwen3-Next-80B-A3B-Instruct --num-layers 4"), ""),
    "--experts-implementation": (
        f"{HUGGING} --transformers-version 5.0".replace("Llama-3.2-1B", "Qwen3-30B-A3B --num-layers 2"), "eager"),
    "--cuda-graph-impl": (DENSE, "local"),
    "--cuda-graph-modules": (f"{DENSE} --cuda-graph-impl transformer_engine", "mlp"),
    "--cpu-offloading-num-layers": (DENSE, "4"),
    "--offload-modules": (DENSE, "core_attn"),
    "--min-offloaded-tensor-size": (f"{DENSE} --offload-modules core_attn", "8388609"),
    "--sync-each-batch": (f"{FSDP2} --global-batch-size 32", ""), "--torch-implementation": (DDP, "fused"),
    "--paged": (FSDP2, ""),
    # Norms are seen where the step is the peak and the optimizer's own temporaries are none.
    "--clip-grad": ("Llama-2-7b-hf --num-gpus 1 --seq-length 16 --engine single --torch-implementation fused", "0"),
    "--ddp-bucket-cap-mb": (ODD_BUCKETS, "100"), "--gradient-as-bucket-view": (DDP, ""),
    "--ddp-static-graph": (f"{ODD_BUCKETS} --ddp-find-unused-parameters", ""),
    "--ddp-find-unused-parameters": (ODD_BUCKETS, ""),
    "--fsdp-sharding-strategy": (FSDP1, "SHARD_GRAD_OP"), "--fsdp-reshard-after-forward": (FSDP2, "no"),
    "--fsdp-auto-wrap-policy": (FSDP2, "torchtitan"), "--fsdp-param-dtype": (f"{FSDP2} --precision fp32", "bf16"),
    "--fsdp-reduce-dtype": (FSDP2, "fp32"),
    # Forward is the peak where next to nothing trains.
    "--fsdp-forward-prefetch": (
        f"{FSDP2} --peft lora --lora-target-modules q_proj".replace("Llama-3.2-1B", "Llama-2-7b-hf"), ""
    ),
    "--fsdp-backward-prefetch": (FSDP1, "NO_PREFETCH"), "--fsdp-limit-all-gathers": (FSDP1, "no"),
    "--fsdp-use-orig-params": (UNALIGNED, ""), "--fsdp-offload-params": (FSDP2, ""),
    "--fsdp-pin-memory": (f"{FSDP2} --fsdp-offload-params", "no"), "--data-parallel-shard-degree": (FSDP2, "4"),
    "--zero-stage": (f"{DDP} --tp 2".replace("ddp", "megatron_deepspeed"), "2"),
    "--reduce-bucket-size": (ZERO2, "1000000"), "--allgather-bucket-size": (ZERO1, "1000"),
    "--overlap-comm": (ZERO2, ""), "--contiguous-gradients": (ZERO2, "no"), "--reduce-scatter": (ZERO2, "no"),
    "--round-robin-gradients": (ZERO2.replace("Llama-3.2-1B", "Llama-2-7b-hf"), ""),
    "--stage3-prefetch-bucket-size": (ZERO3, "0"), "--stage3-param-persistence-threshold": (ZERO3, "0"),
    "--stage3-model-persistence-threshold": (ZERO3, "4096"), "--stage3-max-live-parameters": (ZERO3, "1000"),
    "--stage3-max-reuse-distance": (ZERO3, "0"),
    "--sub-group-size": (ZERO3.replace("Llama-3.2-1B", "Llama-2-7b-hf"), "100000000"),
    "--offload-optimizer-device": (ZERO2, "cpu"),
    "--offload-optimizer-pin-memory": (f"{ZERO2} --offload-optimizer-device cpu", "no"),
    "--offload-optimizer-ratio": (f"{ZERO3} --offload-optimizer-device cpu --sub-group-size 10000000", "0.5"),
    "--offload-param-device": (ZERO3, "cpu"),
    "--offload-param-pin-memory": (f"{ZERO3} --offload-param-device cpu", "no"),
    "--offload-param-buffer-count": (f"{ZERO3} --offload-param-device nvme", "9"),
    "--offload-param-buffer-size": (f"{ZERO3} --offload-param-device nvme", "1000000"),
    "--zero-hpz-partition-size": (ZERO3, "2"), "--communication-data-type": (ZERO3, "fp32"),
    "--grad-accum-dtype": (ZERO2, "fp32"), "--bf16-master-weights-and-grads": (ZERO2, ""),
    "--bf16-optimizer-states": (f"{ZERO2} --bf16-master-weights-and-grads", ""),
    "--stage3-gather-16bit-weights-on-model-save": (ZERO3, ""),
    "--ckpt-format": (SAVED, "torch_dcp"), "--dist-ckpt-optim-fully-reshardable": (SAVED, ""),
    "--distrib-optim-fully-reshardable-mem-efficient": (f"{SAVED} --dist-ckpt-optim-fully-reshardable", ""),
    "--ckpt-fully-parallel-save": (SAVED, "no"),
    "--ckpt-fully-parallel-load": (f"{SHARED_EXPERTS} --no-load-optim", ""),
    "--images-per-sample": (VISION, "2"), "--image-size": (VISION, "448x448"), "--patches": (VISION, "400"),
    "--video-frames": (f"{VISION} --image-size 448x448", "8"), "--audio-seconds": (AUDIO, "0"),
    "--async-save": (SAVED, ""), "--stream-ckpt-dequant": (f"{SAVED} --fp8 hybrid --fp8-param-gather", "no"),
    "--load-optim": (SAVED, "no"), "--save-optim": (SAVED, "no"),
    "--also-save-hf-checkpoint": (SAVED, ""), "--adopt-optim-states": (SAVED, "no"),
    "--experts-in-one-tensor": (f"{SHARED_EXPERTS} --no-load-optim", ""),
}  # fmt: skip


def estimated(command: str) -> Estimate:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    return estimate(run_from_arguments(parser.parse_args(command.split())))


def said(command: str) -> tuple[object, ...]:
    try:
        found = estimated(command)
    except SpecError as error:
        return (str(error),)
    stages: object = tuple((s.components, s.host, s.phases) for s in found.stages)
    # Which read or write checkpoints, or capture graphs.
    if command.startswith((SAVED, SHARED_EXPERTS)) or "--cuda-graph-impl transformer_engine" in command:
        stages = stages, whole_of(found)
    return stages, found.assumptions, found.not_modelled


def whole_of(found: Estimate) -> object:
    """The phases of the whole job on one card."""
    return job_of(found, find_gpu("H200")).as_json()


@pytest.mark.parametrize("flag", [f.names.split()[0] for f in FLAGS])
def test_a_flag_moves_a_number_or_a_sentence(flag: str) -> None:
    command, value = CASES[flag]
    given = flag.replace("--", "--no-") if value == "no" else f"{flag} {value}"
    moved = said(f"{command} {given}")
    assert len(moved) == 3, moved
    assert moved != said(command)


@pytest.mark.parametrize(
    ("command", "blamed"),
    [
        (f"{DENSE} --fp8 e4m3 --transformer-impl local", "fp8 "),
        (f"{DENSE} --attention-backend flash --transformer-impl local", "attention_backend "),
        (f"{DENSE} --no-masked-softmax-fusion", "masked_softmax_fusion "),
        (f"{DENSE} --cp-comm-type a2a", "cp_comm_type "),
        (f"{AWARE} --optimizer-cpu-offload --exp-avg-dtype bf16", "exp_avg_dtype "),
        (f"{DENSE} --peft lora --lora-dim 0", "peft.dim (0) leaves adapters without parameters"),
        (f"{DENSE} --lora-dim 8", "peft.dim does nothing without --peft lora"),
        (f"{DENSE} --lora-target-modules linear_qkv", "peft.target_modules does nothing without --peft lora"),
        (f"{AWARE} --main-grads-dtype bf16 --grad-reduce-in-fp32", "main_grads_dtype "),
        (f"{DENSE} --num-layers-at-start-in-bf16 2", "num_layers_at_start_in_bf16 does nothing without --fp8 or --fp4"),
        (f"{DENSE} --num-layers-at-end-in-bf16 2", "num_layers_at_end_in_bf16 does nothing without --fp8 or --fp4"),
        (f"{DENSE} --fsdp-db-use-persist-buf-on-alloc-fail", "fsdp_db_use_persist_buf_on_alloc_fail does nothing "),
        (f"{DENSE} --megatron-fsdp-max-pool-double-buffer", "megatron_fsdp_max_pool_double_buffer does nothing "),
        (f"{EXPERTS} --moe-flex-dispatcher-backend hybridep", "moe_flex_dispatcher_backend does nothing "),
        (f"{EXPERTS} --moe-flex-dispatcher-num-sms 40", "moe_flex_dispatcher_num_sms does nothing "),
        (
            f"{EXPERTS} --moe-token-dispatcher-type flex --moe-hybridep-ranks-per-nvlink-domain 4",
            "moe_hybridep_ranks_per_nvlink_domain does nothing ",
        ),
        (f"{EXPERTS} --moe-paged-stash-buffer-size-factor-cuda 2", "moe_paged_stash_buffer_size_factor_cuda does "),
        (f"{HUGGING} --lora-dropout 0.1", "lora_dropout does nothing without --peft lora"),
        (f"{HUGGING} --no-autocast-adapter-dtype", "autocast_adapter_dtype does nothing without --peft lora"),
        (f"{HUGGING} --bnb-4bit-compute-dtype bf16", "bnb_4bit_compute_dtype does nothing without --load-in-4bit"),
        (f"{EXPERTS} --moe-imbalance 4.5", "moe_imbalance (4.5) is more than expert_model_parallel_size (4)"),
        (
            f"{DENSE} --recompute-granularity selective --recompute-modules core_attn,moe_act",
            "recompute_modules (moe_act) needs a model with experts",
        ),
        ("Qwen3-30B-A3B --moe-imbalance 1.5", "moe_imbalance (1.5) is more than expert_model_parallel_size (1)"),
    ],
)
def test_a_flag_that_needs_another_is_refused_by_name(command: str, blamed: str) -> None:
    with pytest.raises(SpecError) as refusal:
        estimated(command)
    assert str(refusal.value).startswith(blamed) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("command", "flags", "note"),
    [
        (f"{DENSE} --tp 2", "--etp 1", "--etp does nothing"),
        (DENSE, "--moe-imbalance 1.5", "--moe-imbalance does nothing"),
        (DENSE, "--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type does nothing"),
        (DENSE, "--no-moe-grouped-gemm", "--moe-grouped-gemm does nothing"),
        (DENSE, "--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity does nothing"),
        (DENSE, "--moe-shared-expert-overlap", "--moe-shared-expert-overlap does nothing"),
        (EXPERTS, "--moe-shared-expert-overlap", "--moe-shared-expert-overlap does nothing"),
        (f"{DENSE} --recompute-granularity selective --recompute-modules core_attn", ",moe",
         "recompute_modules (moe) does nothing"),
        (f"{DENSE} --recompute-granularity selective --recompute-modules core_attn", ",layernorm",
         "recompute_modules (layernorm) does nothing"),
        (f"{EXPERTS} --recompute-granularity selective --recompute-modules core_attn", ",mlp",
         "recompute_modules (mlp) does nothing"),
        (f"{EXPERTS} --recompute-granularity selective --recompute-modules core_attn", ",shared_experts",
         "recompute_modules (shared_experts) does nothing"),
    ],
)
def test_a_flag_that_the_model_has_no_use_for_is_a_note(command: str, flags: str, note: str) -> None:
    """One set of flags serves several models: no byte changes, and the report says so."""
    plain = estimated(command)
    given = estimated(command + (flags if flags.startswith(",") else f" {flags}"))
    assert [s.components for s in given.stages] == [s.components for s in plain.stages]
    (said,) = set(given.assumptions) - set(plain.assumptions)
    assert said.startswith(note)


#: A row of a table in the guide: its first cell, and the one that names Megatron-LM's arguments.
GUIDE = Path(__file__).resolve().parents[2] / "references" / "generated" / "configuration.md"


def spelled_in_the_guide() -> list[str]:
    """Every flag that the guide's tables name as an option or as Megatron-LM's, but for what MODEL stands for."""
    found: dict[str, None] = {}
    for line in GUIDE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0].startswith("`--"):
            for cell in (cells[0], cells[2] if len(cells) > 2 else ""):
                found.update(dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]+", cell)))
    return list(found)


#: Commands whose flags the guide's tables have beside those of a run.
_OF_THE_GUIDE = ("estimate", "accuracy", "search", "rollout")


@pytest.mark.parametrize("spelling", spelled_in_the_guide())
def test_every_spelling_in_the_guide_is_taken(spelling: str) -> None:
    """Those of a run by every command that takes one; those of the output by the command beside them."""
    taken: set[str] = set()
    of_commands = [importlib.import_module(COMMANDS[name][0]).add_arguments for name in _OF_THE_GUIDE]
    for add in (add_run_arguments, *of_commands):
        parser = argparse.ArgumentParser()
        add(parser)
        taken |= parser._option_string_actions.keys()
    assert spelling in taken


@pytest.mark.parametrize(
    ("command", "megatron", "ours"),
    [
        (DENSE, "--fp16", "--precision fp16"),
        (f"{DENSE} --precision fp32", "--bf16", "--precision bf16"),
        (f"{PIPED}", "--num-virtual-stages-per-pipeline-rank 2", "--vpp 2"),
        # 16 layers over two stages are 8 each: chunks of 2 are four.
        (f"{PIPED}", "--num-layers-per-virtual-pipeline-stage 2", "--vpp 4"),
        (f"{PIPED}", "--num-layers-per-virtual-pipeline-stage 8", ""),
        # 14 and the two ends are 16 slots.
        (f"{PIPED} --num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         "--num-layers-per-virtual-pipeline-stage 2", "--vpp 4"),
        (DENSE, "--grad-reduce-in-bf16", "--no-grad-reduce-in-fp32"),
        (DENSE, "--no-bias-swiglu-fusion", "--no-bias-activation-fusion"),
        ("gpt2 --num-gpus 2 --global-batch-size 2", "--no-bias-gelu-fusion", "--no-bias-activation-fusion"),
        (f"{DENSE} --offload-modules core_attn", "--fine-grained-activation-offloading", ""),
        (f"{DENSE} --data-parallel-sharding-strategy optim", "--use-megatron-fsdp", "--engine megatron_fsdp"),
    ],
)
def test_megatrons_own_spellings_say_the_same(command: str, megatron: str, ours: str) -> None:
    assert estimated(f"{command} {megatron}").run == estimated(f"{command} {ours}").run


def test_megatron_reads_its_spellings_as_we_do() -> None:
    """The layers of a chunk in Megatron-LM's own arguments, of which the reader follows ``validate_args``."""
    from bridge_memory.readers.megatron_args import run_from_megatron_args

    text = (
        "--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
        "--micro-batch-size 1 --global-batch-size 48 --vocab-size 128256 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 2"
    )
    read = run_from_megatron_args(text, world_size=16).parallel
    assert read.vpp == estimated(f"{PIPED} --num-layers-per-virtual-pipeline-stage 2").run.parallel.vpp == 4


@pytest.mark.parametrize("mapping", ["builtin", "mbridge"])
def test_a_vocabulary_that_is_padded_as_told_is_no_assumption(mapping: str) -> None:
    """Llama's 128256 to a multiple of 1000 x TP 2; nothing else of what is assumed changes."""
    if mapping == "mbridge":
        pytest.importorskip("megatron.core")
        pytest.importorskip("mbridge", exc_type=ImportError)
    command = f"{DENSE} --tp 2 --mapping {mapping}"
    as_it_is, padded = estimated(command), estimated(f"{command} --make-vocab-size-divisible-by 1000")
    assert [padded.run.model.padded_vocab_size(2), as_it_is.run.model.padded_vocab_size(2)] == [130000, 128256]
    (gone,) = set(as_it_is.assumptions) - set(padded.assumptions)
    assert gone.startswith("vocab_size 128256 ") and not set(padded.assumptions) - set(as_it_is.assumptions)


@pytest.mark.parametrize(("release", "nothing"), [("0.17", True), ("0.18", False)])
def test_a_hybrid_says_that_full_recomputation_does_nothing(release: str, nothing: bool) -> None:
    """``HybridStack.forward`` of 0.18 recomputes; ``MambaStack.forward`` before it does not."""
    found = estimated(
        "Nemotron-H-56B-Base-8K --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        f"--megatron-core {release}"
    )
    said = any(line.startswith("recompute_granularity (full) does nothing") for line in found.assumptions)
    assert said == nothing


def test_bf16_main_gradients_halve_the_gradient_buffers() -> None:
    fp32, bf16 = (estimated(f"{AWARE} --main-grads-dtype {dtype}") for dtype in ("fp32", "bf16"))
    assert 2 * bf16.stages[0].gradients_bytes == fp32.stages[0].gradients_bytes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--bf16 --fp16", "--fp16: bf16 was given before it; drop one of them"),
        ("--output -", "--output - is no file; drop --output to print instead"),
        ("--torch 2", "--torch ('2') is not a release such as 2.11"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["estimate", "Qwen/Qwen3-8B", *flags.split()]) == 2
    assert words in capsys.readouterr().err
    assert main(["estimate", "Qwen/Qwen3-8B", "--brief", "--fp16", "--fp16"]) == 0
