"""The calculator's form -> a RunSpec and the card."""

from __future__ import annotations

import re
from typing import Any

from bridge_memory.calculator.form import Form
from bridge_memory.calculator.shapes import model_of
from bridge_memory.cards.generations import GENERATIONS
from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.rows import GPUS
from bridge_memory.readers.engines.sections import Diagnostics
from bridge_memory.spec import ModelSpec, ParallelSpec, RunSpec
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.unmodelled import Effect, Unmodelled


def run_of(form: Form, notes: Diagnostics) -> RunSpec:
    """The run that a checked form describes. Raises SpecError."""
    notes.check()
    model, assumed = model_of(form.model)
    return run_with(model, form, (*assumed, *notes.assumptions))


def run_with(model: ModelSpec, form: Form, assumed: tuple[str, ...] = ()) -> RunSpec:
    """The run of ``model`` under the rest of the form. Raises SpecError."""
    training, parallel, gpus = form.training, form.parallelism, form.hardware.num_gpus
    sentences, unmodelled = list(assumed), list[Unmodelled]()
    groups: dict[str, dict[str, Any]] = {
        "batch": {
            "micro_batch_size": training.batch_size, "seq_length": form.model.max_seq_len,
            "global_batch_size": training.batch_size * training.gradient_accumulation_steps * gpus
            // (parallel.tensor_parallel_size * parallel.pipeline_parallel_size),
        },
        "optimizer": {"optimizer": training.optimizer},
    }
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings:
        groups["batch"]["seq_length"] = min(form.model.max_seq_len, model.max_position_embeddings)
    _engine(form, groups, sentences)
    _checkpointing(form, model.num_layers, groups, sentences, unmodelled)
    specs = {name: GROUPS[name](**fields) for name, fields in groups.items()}
    sizes = ParallelSpec(
        world_size=gpus, tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor_parallel_size > 1,
    )  # fmt: skip
    return RunSpec(model=model, parallel=sizes, assumptions=tuple(sentences), not_modelled=tuple(unmodelled), **specs)


def _engine(form: Form, groups: dict[str, dict[str, Any]], sentences: list[str]) -> None:
    kind, dtype, engine = form.engine.type, form.training.dtype, form.engine
    mixed = None if dtype == "fp32" else dtype
    ours = "megatron_ddp"
    precision: dict[str, Any] = {"params_dtype": dtype}
    if kind == "pytorch_ddp":
        ours = "ddp" if form.hardware.num_gpus > 1 else "single"
        precision["params_dtype"] = "fp32"
        if mixed:
            groups["transformers"] = {"autocast": mixed}
            sentences.append(f"weights in fp32 under torch.autocast in {mixed}")
    elif kind == "fsdp":
        ours = "fsdp1" if engine.sharding_strategy == "no_shard" else "fsdp2"
        precision["params_dtype"] = "fp32"
        options: dict[str, Any] = {"auto_wrap_policy": "torchtitan"}
        if ours == "fsdp1":
            options = {"sharding_strategy": "NO_SHARD"}
        elif engine.sharding_strategy == "shard_grad_op":
            options["reshard_after_forward"] = False
        if mixed:
            options |= {"param_dtype": mixed, "reduce_dtype": mixed}
            sentences.append(f"fp32 shards, gathered and reduced in {mixed}, as accelerate configures FSDP")
        groups["fsdp"] = options
    elif kind in ("deepspeed", "megatron_deepspeed"):
        stage = engine.zero_stage
        if stage is None:
            stage = 2 if kind == "deepspeed" else 1
            sentences.append(f"ZeRO stage {stage} (engine.zero_stage)")
        offload = {
            f"offload_{what}_device": device
            for what, device in (("optimizer", engine.offload_optimizer), ("param", engine.offload_param))
            if device != "none"
        }
        if kind == "megatron_deepspeed":
            ours, offload["stage"] = "megatron_deepspeed", stage  # type: ignore[assignment]
        elif stage == 0:
            ours = "ddp" if form.hardware.num_gpus > 1 else "single"
            sentences.append("ZeRO stage 0 as PyTorch DDP: nothing is sharded")
            precision["params_dtype"] = "fp32"
            groups["transformers"] = {"autocast": mixed} if mixed else {}
            offload = {}
        else:
            ours = f"zero{stage}"
        if ours in ("zero1", "zero2", "zero3", "megatron_deepspeed"):
            groups["deepspeed"] = offload
            groups["optimizer"]["torch_implementation"] = "fused"  # DeepSpeed's FusedAdam
    else:
        sentences.append("Megatron's distributed optimizer, as Megatron Bridge enables it")
    if kind in ("megatron_lm", "megatron_deepspeed"):
        groups["optimizer"]["optimizer"] = {"adamw": "adam"}.get(form.training.optimizer, form.training.optimizer)
    else:
        groups["implementation"] = {"transformer_impl": "transformers"}
    groups["data_parallel"] = {"engine": ours}
    groups["precision"] = precision


def _checkpointing(
    form: Form, layers: int, groups: dict[str, dict[str, Any]], sentences: list[str], unmodelled: list[Unmodelled]
) -> None:
    """0 is none, 4 is every layer. Between them a level saves its share of what 4 saves: in Megatron that share of a
    stage's layers; the other engines have no such option."""
    level = form.training.activation_checkpointing
    if level == 0:
        return
    if form.engine.type in ("megatron_lm", "megatron_deepspeed"):
        if level == 4:
            groups["recompute"] = {"granularity": "full", "method": "uniform", "num_layers": 1}
        else:
            stage = -(-layers // form.parallelism.pipeline_parallel_size)
            number = max(1, (level * stage + 2) // 4)
            groups["recompute"] = {"granularity": "full", "method": "block", "num_layers": number}
            sentences.append(
                f"activation_checkpointing {level} of 4 as {number} of {stage} layers of a stage recomputed "
                f"(recompute_method block, recompute_num_layers {number})"
            )
    elif level == 4:
        groups.setdefault("transformers", {})["gradient_checkpointing"] = True
    else:
        unmodelled.append(Unmodelled(
            f"training.activation_checkpointing ({level}): levels 1 to 3 are no option of the engine; counted as 0 "
            "(4: every layer)", Effect.DOWN, order="up to what all layers save, less their inputs",
        ))  # fmt: skip


def card_of(memory_gb: float) -> Gpu:
    """A card of so many GB: of those sold with that figure the one with the least usable memory, else so many GB."""
    size = f"{memory_gb:g}GB"
    sold = [gpu for gpu in GPUS.values() if re.search(rf"\b{re.escape(size)}\b", gpu.description)]
    usable = min((gpu.capacity_bytes for gpu in sold), default=int(memory_gb * 10**9))
    # Of no vendor: the estimate's own generation is taken for it.
    return Gpu(f"{memory_gb:g} GB", f"a GPU of {memory_gb:g} GB", "", GENERATIONS["hopper"], usable)


