"""What is safe, as the keys of a framework."""

from __future__ import annotations

from bridge_memory.rollout.answer import Limits, Rollout
from bridge_memory.rollout.setup import PostTraining
from bridge_memory.spec import SpecError

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def emitted(found: Rollout, solved: Limits, framework: str) -> str:
    """Lines of overrides (verl), YAML (nemo-rl) or arguments (slime). Raises SpecError where no share is safe."""
    share = solved.share.safe
    if share is None:
        raise SpecError(
            f"no {found.setup.share_name} is safe: {solved.share.binds} binds; change first: "
            f"{solved.first or 'the layout'}"
        )
    if framework == "slime" and found.setup.engine.framework != "sglang":
        raise SpecError(
            "slime's engine is SGLang, and the job's is vLLM, whose share means something else; give --rollout sglang"
        )
    writer = {"verl": _verl, "nemo-rl": _nemo_rl, "slime": _slime}[framework]
    return "\n".join(writer(found.setup, share, solved)) + "\n"


def _tokens(setup: PostTraining, solved: Limits) -> tuple[int, int]:
    """The token limits as they are, lowered to those that are safe."""
    cp = setup.trainer.parallel.cp
    update, logs = setup.update_tokens // cp, setup.log_prob_tokens // cp
    if not setup.dynamic:
        return update, logs
    return min(update, solved.update_tokens or update), min(logs, solved.log_prob_tokens or logs)


def _verl(setup: PostTraining, share: float, solved: Limits) -> list[str]:
    engine, p = setup.engine, setup.trainer.parallel
    update, logs = _tokens(setup, solved)
    lines = [
        f"{_ROLLOUT}.name={engine.framework}", f"{_ROLLOUT}.gpu_memory_utilization={share:g}",
        f"{_ROLLOUT}.tensor_model_parallel_size={engine.tensor_parallel_size}",
        f"{_ROLLOUT}.free_cache_engine={bool(setup.sleep_level)}",
    ]  # fmt: skip
    if setup.dynamic:
        lines += [
            f"{_ACTOR}.use_dynamic_bsz=True",
            f"{_ACTOR}.ppo_max_token_len_per_gpu={update}",
            f"{_ROLLOUT}.log_prob_max_token_len_per_gpu={logs}",
        ]
    else:
        lines += [
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu={setup.update_tokens // setup.longest}",
            f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu={setup.log_prob_tokens // setup.longest}",
        ]
    part = f"{_ACTOR}.megatron" if setup.of_megatron else f"{_ACTOR}.fsdp_config"
    lines += [f"{part}.param_offload={setup.param_offload}", f"{part}.optimizer_offload={setup.optimizer_offload}"]
    if setup.of_megatron:
        lines += [
            f"{part}.tensor_model_parallel_size={p.tp}",
            f"{part}.pipeline_model_parallel_size={p.pp}",
            f"{part}.context_parallel_size={p.cp}",
            f"{part}.expert_model_parallel_size={p.ep}",
        ]
        if p.ep > 1:
            lines.append(f"{part}.expert_tensor_parallel_size={p.etp}")
    return lines


def _nemo_rl(setup: PostTraining, share: float, solved: Limits) -> list[str]:
    engine, p = setup.engine, setup.trainer.parallel
    update, logs = _tokens(setup, solved)
    lines = [
        "policy:", f"  max_total_sequence_length: {setup.longest}",
        "  sequence_packing:", f"    enabled: {str(setup.trainer.batch.packed_sequences).lower()}",
    ]  # fmt: skip
    if setup.dynamic:
        lines += [f"    train_mb_tokens: {update * p.cp}", f"    logprob_mb_tokens: {logs * p.cp}"]
    else:
        lines[2:2] = [
            f"  train_micro_batch_size: {update // setup.longest}", f"  logprob_batch_size: {logs // setup.longest}",
        ]  # fmt: skip
    if setup.of_megatron:
        lines += [
            "  megatron_cfg:",
            "    enabled: true",
            f"    tensor_model_parallel_size: {p.tp}",
            f"    pipeline_model_parallel_size: {p.pp}",
            f"    context_parallel_size: {p.cp}",
            f"    expert_model_parallel_size: {p.ep}",
            f"    sequence_parallel: {str(p.sp).lower()}",
        ]
    name = "vllm_cfg" if engine.framework == "vllm" else "sglang_cfg"
    return [
        *lines, "  generation:", f"    backend: {engine.framework}", f"    {name}:",
        f"      {setup.share_name}: {share:g}", f"      tensor_parallel_size: {engine.tensor_parallel_size}",
    ]  # fmt: skip


def _slime(setup: PostTraining, share: float, solved: Limits) -> list[str]:
    engine, p = setup.engine, setup.trainer.parallel
    update, logs = _tokens(setup, solved)
    limits = [f"--micro-batch-size {update // setup.longest}"]
    if setup.dynamic:
        limits = ["--use-dynamic-batch-size", f"--max-tokens-per-gpu {update}"]
        limits += [f"--log-probs-max-tokens-per-gpu {logs}"] * (logs != update)
    return [
        "--colocate", f"--rollout-num-gpus-per-engine {engine.tensor_parallel_size}",
        f"--sglang-mem-fraction-static {share:g}", *limits,
        f"--tensor-model-parallel-size {p.tp}", f"--pipeline-model-parallel-size {p.pp}",
        f"--context-parallel-size {p.cp}", f"--expert-model-parallel-size {p.ep}",
        *(["--sequence-parallel"] if p.sp else []),
    ]  # fmt: skip
