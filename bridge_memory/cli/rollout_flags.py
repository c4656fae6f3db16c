"""A post-training job from flags alone: a trainer as ``estimate`` takes it, and an engine beside it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.rollout.setup import PostTraining


def setup_of_flags(args: argparse.Namespace, gpu: Gpu) -> PostTraining:
    """As verl runs it, with the newest of its releases. Raises SpecError."""
    from bridge_memory.rollout.inference import InferenceSpec
    from bridge_memory.rollout.setup import Critic, PostTraining, Reference

    for name in ("rollout_tp", "rollout_dp", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
                 "max_tokens_per_gpu", "log_prob_max_tokens_per_gpu"):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not 1 <= value < 1 << 28:
            raise SpecError(f"--{name.replace('_', '-')} ({value}) is below 1, or too large; give 1 or more")
    for name in ("gpu_memory_utilization", "mem_fraction_static"):
        value = getattr(args, name)
        if value is not None and not 0 < value <= 1:
            raise SpecError(f"--{name.replace('_', '-')} ({value:g}) is no share; give one above 0 and at most 1")
    if args.max_model_len and "batch.seq_length" not in vars(args):
        setattr(args, "batch.seq_length", args.max_model_len)
    run = run_on_gpus(args, [gpu])
    longest = args.max_model_len or run.batch.seq_length
    most = (args.max_tokens_per_gpu or longest) * run.parallel.cp
    logs = (args.log_prob_max_tokens_per_gpu or args.max_tokens_per_gpu or longest) * run.parallel.cp
    framework = args.rollout or "vllm"
    vllm = framework == "vllm"
    for name, right in (("gpu_memory_utilization", vllm), ("mem_fraction_static", not vllm),
                        ("max_num_batched_tokens", vllm)):  # fmt: skip
        if getattr(args, name) is not None and not right:
            other = "vllm" if name != "mem_fraction_static" else "sglang"
            raise SpecError(f"--{name.replace('_', '-')} is an option of {other}; drop it, or give --rollout {other}")
    fields: dict[str, Any] = {"gpu_memory_utilization": args.gpu_memory_utilization or 0.5} if vllm else {
        "mem_fraction_static": args.mem_fraction_static or 0.5,
    }  # fmt: skip
    engine = InferenceSpec(
        model=run.model, framework=framework, release=args.rollout_release or "",
        tensor_parallel_size=args.rollout_tp or 1, data_parallel_size=args.rollout_dp or 1,
        expert_parallel=bool(args.rollout_ep), max_model_len=longest, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens, **fields,
    )  # fmt: skip
    reference = {
        None: Reference.NONE, "none": Reference.NONE, "gpu": Reference.GPU, "loaded": Reference.LOADED,
        "host": Reference.SWAPPED,
    }[args.reference]  # fmt: skip
    if reference is not Reference.NONE and run.peft.scheme != "none":
        reference = Reference.ADAPTERS_OFF
    packed = args.max_tokens_per_gpu is not None or run.batch.packed_sequences
    trainer = run.with_(batch=replace(run.batch, packed_sequences=True)) if packed else run
    critic = None
    if args.critic:
        model = replace(run.model, share_embeddings_and_output_weights=True)
        critic = Critic(run=trainer.with_(model=model), tokens=most, param_offload=bool(args.param_offload),
                        optimizer_offload=bool(args.optimizer_offload))  # fmt: skip
    sequences = None if run.batch.global_batch_size is None else max(
        1, run.batch.global_batch_size // run.parallel.data_parallel_size
    )  # fmt: skip
    for flag, tokens in (("--max-tokens-per-gpu", most), ("--log-prob-max-tokens-per-gpu", logs)):
        if packed and tokens < longest:
            raise SpecError(
                f"{flag} ({tokens // run.parallel.cp}) holds no sequence of {longest} tokens; raise it, or lower "
                "--max-model-len"
            )
    return PostTraining(
        framework="verl", release=(0, 9), trainer=trainer, engine=engine, longest=longest, update_tokens=most,
        log_prob_tokens=logs, reference_tokens=logs, update_sequences=sequences, dynamic=packed,
        update_entropy=bool(args.entropy), log_prob_entropy=True, param_offload=bool(args.param_offload),
        optimizer_offload=bool(args.optimizer_offload), reference=reference, critic=critic, bucket_bytes=2048 << 20,
        sleep_level=1 if run.peft.scheme != "none" else 2,
        assumptions=("phases as verl 0.9 runs them",),
    )  # fmt: skip
