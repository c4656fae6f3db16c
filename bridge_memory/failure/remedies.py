"""What to do first: each with what it frees and costs, as options of the user's own trainer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from bridge_memory.emit.bridge import bridge_overrides
from bridge_memory.emit.fixes import flag_words
from bridge_memory.emit.torch import deepspeed_config, torchtitan_config, trainer_arguments
from bridge_memory.failure.causes import Cause, Finding, Known, gib
from bridge_memory.failure.runs import ENGINES, Trainer
from bridge_memory.failure.texts import Kind
from bridge_memory.outside.phase import Phase
from bridge_memory.plan.changes import Effect, WhatIf
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.speed.hardware import HARDWARE

#: Things to do that are named.
MOST = 3


class Remedy(NamedTuple):
    """A thing to do.

    ``do``: what to set or type; ``frees_bytes``: None where it cannot be counted, which ``frees`` then says in words;
    ``fits``: whether the step is predicted to fit with it; None: not known.

    Example:
        >>> from bridge_memory import why
        >>> why("RuntimeError: DataLoader worker is killed by signal: Bus error.\\n").remedies[1].costs
        'slower loading'
    """

    do: str
    frees: str
    costs: str
    frees_bytes: int | None = None
    fits: bool | None = None


def remedies(
    known: Known, found: tuple[Finding, ...], trainer: Trainer, run: RunSpec | None, text: str
) -> tuple[Remedy, ...]:
    """At most ``MOST``, the first to try first."""
    out: list[Remedy] = []
    for finding in found:
        out += _BY_CAUSE.get(finding.cause, _none)(known, trainer, text)
    needs_less = {Cause.TOO_LARGE, Cause.OUTSIDE, Cause.IMBALANCE, Cause.NO_ROOM, Cause.FRAGMENTED, Cause.REQUEST}
    if needs_less & {finding.cause for finding in found}:
        if run is not None and known.gpu is not None:
            out += _of_run(known, run, trainer)
        else:
            out += _of_engine(trainer) if trainer in ENGINES else _in_general(known, trainer)
    first: dict[str, Remedy] = {}
    for one in out:
        first.setdefault(one.do, one)
    return tuple(first.values())[:MOST]


def _none(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    return iter(())


# ---- by cause ----


def _allocator_variable(text: str) -> str:
    """As the message names it: PYTORCH_ALLOC_CONF since torch 2.9, whose older name is still read."""
    return "PYTORCH_ALLOC_CONF" if "PYTORCH_ALLOC_CONF" in text else "PYTORCH_CUDA_ALLOC_CONF"


def _fragmented(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    unallocated = known.event.figures.unallocated or 0
    yield Remedy(
        f"{_allocator_variable(text)}=expandable_segments:True in the environment", f"up to {gib(unallocated)}",
        "next to nothing", unallocated,
    )


def _other_process(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    f = known.event.figures
    sizes = [nbytes for _, nbytes in f.others]
    if len(sizes) > 1 and max(sizes) < 1.5 * min(sizes):
        yield Remedy(
            "torch.cuda.set_device(local_rank) before the first CUDA call of every rank", gib(sum(sizes)), "nothing",
            sum(sizes),
        )
    yield Remedy(
        "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv; end process "
        + ", ".join(str(pid) for pid, _ in f.others[:3]), gib(f.of_others), "that process", f.of_others,
    )
    yield Remedy(
        "CUDA_VISIBLE_DEVICES with GPUs that nobody else uses, or an exclusive allocation", gib(f.of_others), "nothing",
        f.of_others,
    )


def _outside(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    if known.phase is not None:
        largest = sorted(known.phase.outside, key=lambda part: -part.most)[:2]
        named = ", ".join(f"{part.name} {gib(part.most)}" for part in largest)
        frees = f"of what is predicted: {named}"
    else:
        frees = "not known: the text does not say what is there"
    yield Remedy(
        "NCCL_DEBUG=INFO for one start: count communicators and channels; NCCL_MAX_NCHANNELS or fewer parallel groups",
        frees, "slower collectives with fewer channels",
    )


def _limit(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    f = known.event.figures
    more = (f.total or 0) - (f.allowed or 0)
    yield Remedy(
        "raise or drop torch.cuda.set_per_process_memory_fraction", gib(more), "room for what is beside it", more
    )


def _request(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    yield Remedy(
        "print the shapes at the frame where it failed: a length, vocabulary or mask of another size than meant",
        "the whole allocation", "nothing",
    )
    if trainer not in ENGINES:
        yield Remedy(_FUSED_LOSS[trainer], "logits in fp32: 4 bytes a token and vocabulary entry", "nothing")


def _no_room(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    if known.event.kind is Kind.NCCL:
        yield Remedy(
            "torch.cuda.empty_cache() before the first collective of each group, or a barrier on every group at the "
            "start", "what torch reserves and does not use", "once, at the start",
        )
    yield Remedy(
        "torch.cuda.set_per_process_memory_fraction(0.95): torch then frees its cache before the card is full",
        "5% of the card for what is outside of torch", "allocator retries if the run needs more",
    )


def _leak(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    growth = known.growth
    assert growth is not None
    each = f"{gib(growth.slope)} a step"
    if growth.series.figure == "host memory":
        yield Remedy("num_workers=0 of the data loader for some steps: does it still grow?", each, "slower loading")
        return
    yield Remedy(
        "total_loss += loss.item() (or .detach()) wherever a loss, output or metric is kept over steps", each, "nothing"
    )
    yield Remedy(
        "torch.cuda.memory._record_memory_history(); _dump_snapshot(\"s.pickle\") after 10 steps; bridge-memory why "
        "s.pickle", "names what grows, by its stack", "some time of 10 steps",
    )


def _imbalance(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    run = None if known.job is None else known.job
    words = {
        Trainer.MEGATRON: "--moe-expert-capacity-factor 1.25, or a higher --moe-aux-loss-coeff",
        Trainer.BRIDGE: "model.moe_expert_capacity_factor=1.25, or a higher model.moe_aux_loss_coeff",
    }.get(
        trainer, "of experts: a capacity factor or a stronger balancing loss; of data: batches by tokens, not sequences"
    )
    if run is not None and run.overload is None:
        words = "batches of equal numbers of tokens on every rank: routing does not change this run's memory"
    yield Remedy(words, "the difference between ranks", "dropped tokens, with a capacity")


#: Trainer or engine -> its names of the engine's share, the longest sequence, requests at once, tokens of a prefill.
_ENGINE_NAMES: Mapping[Trainer, tuple[str, str, str, str]] = {
    Trainer.VERL: (
        "actor_rollout_ref.rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.max_model_len",
        "actor_rollout_ref.rollout.max_num_seqs", "actor_rollout_ref.rollout.max_num_batched_tokens",
    ),
    Trainer.SGLANG: (
        "--mem-fraction-static", "--context-length", "--max-running-requests (or --cuda-graph-max-bs)",
        "--chunked-prefill-size",
    ),
    Trainer.VLLM: ("--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"),
}  # fmt: skip
_ANY_ENGINE = (
    "--gpu-memory-utilization (SGLang: --mem-fraction-static)", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens",
)  # fmt: skip


def _rollout(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    share, longest, requests, _ = _ENGINE_NAMES.get(trainer, _ANY_ENGINE)
    if "less than desired" in known.event.line:
        yield Remedy(f"lower {share}", "the share that is not there", "fewer sequences at a time")
        yield Remedy(
            "free what training still holds before it wakes: empty_cache(), offload of parameters and optimizer",
            "what the trainer holds", "copies over PCIe in every step",
        )
        return
    if "warming up" in known.event.line:
        yield from _of_engine(trainer)
        return
    if "Try to lower your batch size" in known.event.line:
        yield Remedy(f"lower {requests}", "KV cache of the requests that do not run", "fewer sequences at a time")
    yield Remedy(f"raise {share}, if the GPU has room", "KV cache, as much as is given", "memory of training")
    yield Remedy(f"lower {longest} to the longest sequence in use", "KV cache, in proportion", "shorter sequences")


def _of_engine(trainer: Trainer) -> list[Remedy]:
    """Of an engine that has too little beside its weights and KV cache."""
    share, _, requests, tokens = _ENGINE_NAMES.get(trainer, _ANY_ENGINE)
    return [
        Remedy(f"lower {share}", "that share of the GPU, from the KV cache", "fewer sequences at a time"),
        Remedy(f"lower {requests}", "graphs and buffers of the largest batches", "fewer sequences at a time"),
        Remedy(f"lower {tokens}", "activations of a prefill, in proportion", "slower prefill"),
    ]


def _host(known: Known, trainer: Trainer, text: str) -> Iterator[Remedy]:
    if known.event.kind is Kind.SHARED:
        yield Remedy("docker run --shm-size=64g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm",
                     "as much as is given", "host memory")  # fmt: skip
        yield Remedy("num_workers=0, or fewer, of the data loader", "the batches of each worker", "slower loading")
        return
    if known.event.kind is Kind.SIGKILL:
        yield Remedy("dmesg -T | grep -i 'killed process'; docker inspect or kubectl describe pod: OOMKilled?",
                     "says whether it was memory", "nothing")  # fmt: skip
    yield Remedy(
        "more memory for the job: --mem of Slurm, the container's limit", "as much as is given", "nodes with it"
    )
    job = known.job
    offloads = [] if job is None else [part for part in job.host.rank if part.most > 1 << 30]
    if offloads:
        largest = max(offloads, key=lambda part: part.most)
        yield Remedy(f"less of: {largest.name}", f"{gib(largest.most)} a rank", "GPU memory, if it is an offload",
                     largest.most)  # fmt: skip
    else:
        yield Remedy("no offload of optimizer or parameters; fewer ranks that load a checkpoint at once",
                     "what is offloaded; a copy of the weights a rank", "GPU memory; a slower start")  # fmt: skip
    yield Remedy("fewer data loader workers", "the memory of each", "slower loading")


_BY_CAUSE: Mapping[Cause, Callable[[Known, Trainer, str], Iterator[Remedy]]] = {
    Cause.FRAGMENTED: _fragmented, Cause.OTHER_PROCESS: _other_process, Cause.OUTSIDE: _outside, Cause.LIMIT: _limit,
    Cause.REQUEST: _request, Cause.NO_ROOM: _no_room, Cause.LEAK: _leak, Cause.IMBALANCE: _imbalance,
    Cause.ROLLOUT: _rollout, Cause.HOST: _host,
}  # fmt: skip

# ---- changes of the run ----


def _of_run(known: Known, run: RunSpec, trainer: Trainer) -> list[Remedy]:
    """Changes with which the step fits, the cheapest first; after them those that free most. Each of the first also
    frees what was missing, which matters where the run takes more than is predicted."""
    assert known.gpu is not None
    missing = known.event.figures.missing or 0
    whatif = WhatIf(run, HARDWARE.get(known.gpu.name))
    enough = (effect for effect in whatif.to_try(known.gpu) if effect.freed >= missing)
    found = {effect.changes: (effect, True) for effect in islice(enough, MOST)}
    kinds = {effect.changes[0].kind for effect, _ in found.values()}
    if len(found) < MOST:
        for effect in whatif.singles:
            if effect.changes[0].kind not in kinds and len(found) < MOST:
                found[effect.changes] = effect, False
                kinds.add(effect.changes[0].kind)
    return [
        Remedy(said(effect, run, trainer), gib(effect.freed), _cost(effect), effect.freed, fits)
        for effect, fits in found.values()
    ]


def _cost(effect: Effect) -> str:
    if effect.slowdown is None:
        return "a time that is not known"
    percent = round(100 * (effect.slowdown - 1))
    return f"{percent}% more time" if percent > 0 else f"nothing, {-percent}% less time" if percent else "nothing"


def said(effect: Effect, run: RunSpec, trainer: Trainer) -> str:
    """The change in the words of the trainer; as flags of this command where it has no words for it."""
    try:
        words = _said(effect, run, trainer)
    except SpecError:
        words = ""
    return words or flag_words(effect, run, megatrons=trainer is Trainer.MEGATRON)


def _said(effect: Effect, run: RunSpec, trainer: Trainer) -> str:
    if trainer is Trainer.BRIDGE:
        before = set(bridge_overrides(run).text.split("\n"))
        return "; ".join(line for line in bridge_overrides(effect.run).text.split("\n") if line not in before)
    if trainer is Trainer.TORCHTITAN:
        return " ".join(f"--{name} {_word(value)}" for name, value in _changed(torchtitan_config, run, effect.run))
    if trainer is Trainer.HUGGING_FACE:
        return " ".join(f"--{name} {_word(value)}" for name, value in _changed(trainer_arguments, run, effect.run))
    if trainer is Trainer.DEEPSPEED and not run.data_parallel.of_megatron:
        return ", ".join(f"{name}: {_word(value)}" for name, value in _changed(deepspeed_config, run, effect.run))
    if trainer is Trainer.VERL:
        return " ".join(_of_verl(effect, run))
    return ""


def _changed(
    config: Callable[[RunSpec], Mapping[str, Any]], before: RunSpec, after: RunSpec
) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of what differs in a trainer's configuration."""
    old, new = dict(_flat(config(before))), dict(_flat(config(after)))
    return ((name, value) for name, value in new.items() if old.get(name, object()) != value)


def _flat(table: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{start}{name}.")
        else:
            yield f"{start}{name}", value


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


#: Fields whose verl override stands in the actor's table of its engine, and others.
_MEGATRON_OF_VERL = re.compile(r"(?:tensor|pipeline|virtual_pipeline|expert)_model_parallel_size|context_parallel_size|"
                               r"expert_tensor_parallel_size|use_distributed_optimizer")  # fmt: skip
_VERL = {
    "micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "fsdp_reshard_after_forward": "actor_rollout_ref.actor.fsdp_config.reshard_after_forward",
    "fsdp_offload_params": "actor_rollout_ref.actor.fsdp_config.offload_policy",
}


def _of_verl(effect: Effect, run: RunSpec) -> Iterator[str]:
    """Overrides. Raises SpecError for a change that verl has no override for."""
    for change in effect.changes:
        for name, value in change.fields:
            if name == "micro_batch_size" and run.batch.micro_batch_size == 1:
                raise SpecError("micro_batch_size (1) cannot be lower; lower ppo_max_token_len_per_gpu")
            if name in _VERL:
                yield f"{_VERL[name]}={value}"
            elif _MEGATRON_OF_VERL.fullmatch(name):
                yield f"actor_rollout_ref.actor.megatron.{name}={value}"
            elif run.data_parallel.of_megatron and "." not in name:
                shown = json.dumps(list(value)) if isinstance(value, tuple) else value
                yield f"+actor_rollout_ref.actor.megatron.override_transformer_config.{name}={shown}"
            else:
                raise SpecError(f"{name} has no override in verl; give it otherwise")


# ---- without a run ----

_FUSED_LOSS = {
    Trainer.MEGATRON: "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
    Trainer.BRIDGE: "model.cross_entropy_loss_fusion=True model.cross_entropy_fusion_impl=te",
    Trainer.VERL: "actor_rollout_ref.model.use_fused_kernels=True",
    Trainer.HUGGING_FACE: "--use_liger_kernel True",
    Trainer.DEEPSPEED: "a fused or chunked loss (Liger's fused_linear_cross_entropy)",
    Trainer.TORCHTITAN: "--compile.enable --compile.components loss",
    Trainer.TORCH: "a fused or chunked loss (Liger's fused_linear_cross_entropy)",
}
_BATCH = {
    Trainer.MEGATRON: "half the --micro-batch-size, with the same --global-batch-size",
    Trainer.BRIDGE: "half of train.micro_batch_size, with the same train.global_batch_size",
    Trainer.VERL: "half of actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (or ppo_max_token_len_per_gpu)",
    Trainer.HUGGING_FACE: "half the --per_device_train_batch_size, twice the --gradient_accumulation_steps",
    Trainer.DEEPSPEED: "half of train_micro_batch_size_per_gpu, twice gradient_accumulation_steps",
    Trainer.TORCHTITAN: "half the --training.local_batch_size",
    Trainer.TORCH: "half the micro batch, twice the accumulation steps",
}
_RECOMPUTE = {
    Trainer.MEGATRON: "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    Trainer.BRIDGE: "model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=1",
    Trainer.VERL: "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    Trainer.HUGGING_FACE: "--gradient_checkpointing True",
    Trainer.DEEPSPEED: "gradient checkpointing of every layer (model.gradient_checkpointing_enable())",
    Trainer.TORCHTITAN: "--activation_checkpoint.mode full",
    Trainer.TORCH: "torch.utils.checkpoint around every layer",
}
_SHARD = {
    Trainer.MEGATRON: "--use-distributed-optimizer; else twice the --tensor-model-parallel-size or pipeline stages",
    Trainer.BRIDGE: "ddp.use_distributed_optimizer=True; else twice model.tensor_model_parallel_size",
    Trainer.VERL: "actor_rollout_ref.actor.strategy=fsdp2 with fsdp_config.offload_policy=True",
    Trainer.HUGGING_FACE: "--deepspeed with ZeRO stage 3, or --fsdp \"full_shard auto_wrap\"",
    Trainer.DEEPSPEED: "zero_optimization.stage 3; else offload_optimizer.device cpu",
    Trainer.TORCHTITAN: "--parallelism.data_parallel_shard_degree -1",
    Trainer.TORCH: "fully_shard (FSDP2) over all ranks",
}


def _in_general(known: Known, trainer: Trainer) -> list[Remedy]:
    """The usual first steps of a trainer, where no run says what each frees."""
    batch = Remedy(_BATCH[trainer], "half of the activations", "smaller kernels: little")
    again = Remedy(_RECOMPUTE[trainer], "nearly all activations", "up to a third more time")
    shard = Remedy(_SHARD[trainer], "weights, gradients and optimizer state, by the ranks", "more communication")
    where = known.event.phase
    state_only = where in (Phase.BUILD, Phase.LOAD, Phase.SAVE) or known.event.place == "optimizer step"
    return [shard] if state_only else [batch, again, shard]


