"""A row described in words -> the run that it was, with what it leaves open and what is not modelled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.accuracy.described.draft import Draft, UnknownWord, unread_words
from bridge_memory.accuracy.described.setting import (
    CONTAINER_OF_CORE,
    CONTAINER_OF_MONTH,
    NEMO,
    PERFORMANCE_SCRIPTS,
    TRAINERS,
    WORKLOADS,
    read_framework,
    read_gpu,
    read_model,
)
from bridge_memory.accuracy.described.texts import PRECISION
from bridge_memory.accuracy.described.words import KEYS, SIZES, read_words
from bridge_memory.estimation import explain
from bridge_memory.readers.environment import implementation_of
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.releases import (
    BRIDGE_FUSES_FSDP_GRADIENTS,
    DEFAULT_MEGATRON_BRIDGE,
    DEFAULT_MEGATRON_CORE,
    Running,
    release_words,
)
from bridge_memory.spec import MambaSpec, ModelSpec, MoESpec, RunSpec, SpecError, show
from bridge_memory.spec.parts import ENGINE_OPTIONS, MEGATRON_ENGINES
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.unmodelled import Effect


class Reading(NamedTuple):
    """A row that is a run. ``stage``: the pipeline stage that its figures are of, where it names one."""

    run: RunSpec
    stage: int | None = None


def read_run(row: Mapping[str, Any]) -> Reading:
    """Raises SpecError for a row that leaves open what its memory depends on, contradicts itself or has a word that is
    not known (UnknownWord)."""
    config = row.get("config")
    if not isinstance(config, Mapping):
        raise SpecError(f"config ({show(config)}) is not a mapping; give args and parallel")
    args, parallel = config.get("args") or {}, config.get("parallel") or {}
    for key in config:
        if key not in ("kind", "args", "parallel", "env"):
            raise UnknownWord("config", key)
    if isinstance(args, Mapping) and args and all(str(name).startswith("--") for name in args):
        return Reading(_megatron_args(row, args))
    draft = Draft()
    read_framework(row.get("framework") or "", draft)
    generation = read_gpu(row.get("gpu"), draft)
    named = args.get("model") if isinstance(args, Mapping) else None
    rest = {k: v for k, v in args.items() if k != "model"} if isinstance(args, Mapping) else args
    read_words(draft, rest, "config.args", KEYS)
    read_words(draft, parallel, "config.parallel", {**KEYS, **SIZES})
    read_words(draft, config.get("env") or {}, "config.env", KEYS)
    model = read_model([str(t) for t in (named, row.get("model")) if t], draft)
    _from_id(row, draft)
    _from_notes(row, draft)
    _from_meaning(row, draft)
    _of_its_day(row, draft)
    draft.state("implementation.gpu_arch", generation)
    _releases(draft)
    model = _changed(model, draft)
    _engine(draft, model)
    _sizes(draft, row, model)
    _precision(draft, model)
    _optimizer(draft)
    _recomputation(draft, model)
    _implementation(draft, model, generation)
    fields = _with_defaults(draft, model, generation)
    groups: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        group, _, member = name.partition(".")
        groups.setdefault(group, {})[member] = value
    built: dict[str, Any] = {group: GROUPS[group](**members) for group, members in groups.items()}
    run = RunSpec(
        model=model, **built, assumptions=tuple(draft.assumptions), not_modelled=tuple(draft.unmodelled)
    )
    if draft.facts.get("sizes leave tying open"):
        run = _tied_as_logged(run, row)
    stage = draft.facts.get("stage")
    if stage is not None and not 0 <= stage < run.parallel.pp:
        raise SpecError(f"stage ({stage}) is not one of {run.parallel.pp} pipeline stages; correct it")
    return Reading(run, stage)


def _megatron_args(row: Mapping[str, Any], args: Mapping[str, Any]) -> RunSpec:
    """Megatron-LM's arguments, verbatim."""
    draft = Draft()
    read_framework(row.get("framework") or "", draft)
    _releases(draft)
    release = draft.stated.get("implementation.megatron_core")
    return run_from_megatron_args(
        args, world_size=_world(row), gpu=str(row.get("gpu") or "") or None,
        megatron_core=release_words(release) if release else None,
        transformer_engine=draft.stated.get("implementation.transformer_engine"),
        torch=draft.stated.get("implementation.torch"),
    )


_THEORETICAL = re.compile(r"theoretical[^\d]{0,80}(\d{1,8}(?:\.\d+)?) ?mb\b")
#: How near a logged count must be, relative: Megatron's leaves out positions and biases, and counts norms twice.
_SAME_COUNT = 0.01


def _tied_as_logged(run: RunSpec, row: Mapping[str, Any]) -> RunSpec:
    """The run with weights of embedding and output tied or not, whichever has as many parameters as Megatron's own
    "Theoretical memory footprints" of the row (``theoretical_memory_usage.py: compute_weight_and_optimizer_memory``, MB
    of 2^20); as it is where there are none, or neither has."""
    said = " ".join(str(row.get(name) or "")[:2000] for name in ("notes", "measured_meaning", "measured_verbatim"))
    found = _THEORETICAL.search(said.lower())
    if found is None or run.parallel.pp > 1 or not float(found[1]):
        return run
    width = 6 + 12 / run.parallel.data_parallel_size if run.data_parallel.use_distributed_optimizer else 18
    logged = float(found[1]) * (1 << 20) / width
    ways = {
        tied: run.with_(model=replace(run.model, share_embeddings_and_output_weights=tied)) for tied in (True, False)
    }
    off = {tied: abs(explain(way, 0).parameters / logged - 1) for tied, way in ways.items()}
    tied = off[True] < off[False]
    if off[tied] > _SAME_COUNT:
        return run
    words = f"embedding and output weights are counted as {'tied' if tied else 'untied'}, which makes the "
    return ways[tied].with_(assumptions=(*run.assumptions, f"{words}{logged / 1e9:.2f} billion parameters of its log"))


def _world(row: Mapping[str, Any]) -> int | None:
    world = row.get("world_size")
    if world is None:
        return None
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        raise SpecError(f"world_size ({show(world)}) is not a positive integer; give the number of GPUs")
    return world


def _from_id(row: Mapping[str, Any], draft: Draft) -> None:
    """A format that only the last part of the row's name says ("nvfp4/Llama 3 8B/MXFP8")."""
    if "params_dtype" in draft.facts or "fp8" in draft.facts or "precision.fp4" in draft.stated:
        return
    said = Draft()
    unread = unread_words(str(row.get("id") or "").rpartition("/")[2][:80], PRECISION, said, "id")
    if not unread and (said.facts or said.stated):
        draft.facts |= said.facts
        draft.stated |= said.stated
        draft.assume("the precision is what the row's name says")


_DOUBTS = re.compile(r"\b(?:may be|maybe|likely|unclear|contradicts?|decides|not (?:stated|said|in the \w+))\b")


def _from_notes(row: Mapping[str, Any], draft: Draft) -> None:
    """Notes of whoever transcribed the row, where they doubt it: shown, not read."""
    for part in re.split(r"[;.](?:\s|$)", str(row.get("notes") or "")[:1000]):
        if _DOUBTS.search(part.lower()):
            draft.assume(f"its notes say: {' '.join(part.split())[:160]}")


def _from_meaning(row: Mapping[str, Any], draft: Draft) -> None:
    """How the allocator was set, where only what is said of the figures says it."""
    said = re.search(r"expandable_segments(?:\s*[:=]\s*(\w+))?", str(row.get("measured_meaning") or "")[:1000].lower())
    if said and "PYTORCH_CUDA_ALLOC_CONF" not in draft.env:
        draft.env["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{(said[1] or 'true').capitalize()}"


# --------------------------------------------------------------------------------------------------
# Releases, engine, sizes
# --------------------------------------------------------------------------------------------------


#: Since this day torchtitan compiles its loss with the model; before, that line of ``components/loss.py`` was switched
#: off (pull request 1033).
_TITAN_COMPILES_LOSS = "2025-04-01"
_DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def _of_its_day(row: Mapping[str, Any], draft: Draft) -> None:
    """What a trainer did on the day that the source gives."""
    day = _DAY.search(str(row.get("source") or ""))
    compiles = draft.facts["trainer"] == "torchtitan" and draft.stated.get("transformers.torch_compile")
    if day and compiles and day[0] < _TITAN_COMPILES_LOSS:
        draft.stated.setdefault("transformers.compile_loss", False)


def _releases(draft: Draft) -> None:
    """Those that the framework's words state, else those of its container, else of that of its month."""
    stated = {"core", "te", "torch", "container"} & draft.facts.keys()
    month = CONTAINER_OF_MONTH.get(draft.facts.get("month", ""))
    if month and not stated and draft.facts["trainer"] in ("Megatron Bridge", "NeMo"):
        draft.fact("container", month)
        draft.assume(f"releases are not stated: those of the NeMo container of the row's month, {month}")
    pins = NEMO.get(draft.facts.get("container", ""))
    beside = NEMO.get(CONTAINER_OF_CORE.get(draft.facts.get("core", (0, 0)), "")) if pins is None else None
    if beside and "te" not in draft.facts:
        draft.assume(
            f"the release of Transformer Engine is not stated: counted as {release_words(beside.te)}, NVIDIA's own "
            f"beside megatron-core {release_words(beside.core)}"
        )
        pins = beside
    for name, field, pinned in (
        ("core", "megatron_core", pins and pins.core), ("te", "transformer_engine", pins and pins.te),
        ("torch", "torch", pins and pins.torch),
    ):
        release = draft.facts.get(name) or pinned
        if release:
            draft.state(f"implementation.{field}", release)
    trainer = draft.facts["trainer"]
    megatron = TRAINERS[trainer].get("data_parallel.engine", "megatron_ddp") in MEGATRON_ENGINES
    missing = [
        title for field, title in (("megatron_core", "megatron-core"), ("transformer_engine", "Transformer Engine"))
        if f"implementation.{field}" not in draft.stated
    ]  # fmt: skip
    if missing and megatron:
        draft.assume(
            f"the release of {' and '.join(missing)} is not stated: counted as the default, megatron-core "
            f"{release_words(DEFAULT_MEGATRON_CORE)}" if "megatron-core" in missing else
            "the release of Transformer Engine is not stated: counted as the default"
        )


def _engine(draft: Draft, model: ModelSpec) -> None:
    zero, trainer = draft.facts.get("zero"), draft.facts["trainer"]
    usual = TRAINERS[trainer].get("data_parallel.engine", "megatron_ddp")
    if zero is not None and usual == "megatron_deepspeed":
        draft.stated.pop("data_parallel.engine", None)
        draft.state("deepspeed.stage", zero)
    elif zero is not None:
        if zero == 0:
            raise SpecError("zero (0) is DeepSpeed without sharding, which is not read; give the stage")
        draft.state("data_parallel.engine", f"zero{zero}")
    elif draft.facts.get("fsdp") == "fsdp1":
        draft.state("data_parallel.engine", "fsdp1")
    if draft.stated.get("data_parallel.engine") == "megatron_fsdp":
        if "data_parallel.data_parallel_sharding_strategy" not in draft.stated:
            draft.state("data_parallel.data_parallel_sharding_strategy", "optim_grads_params")
            draft.assume("what Megatron-FSDP shards is not stated: counted as optim_grads_params, Bridge's default")
        if draft.stated.get("data_parallel.use_distributed_optimizer") is False:
            raise SpecError("use_distributed_optimizer (False) beside Megatron-FSDP, which has one; correct one")


def _sizes(draft: Draft, row: Mapping[str, Any], model: ModelSpec) -> None:
    """World and data-parallel size, which must agree; what a batch needs."""
    sizes = [
        draft.stated.get(f"parallel.{name}_parallel_size", 1)
        for name in ("tensor_model", "pipeline_model", "context")
    ]  # fmt: skip
    tp, pp, cp = (size if isinstance(size, int) else 1 for size in sizes)
    ep = draft.facts.get("ep")
    if ep is not None:
        draft.state("parallel.expert_model_parallel_size", ep)
    ep = draft.stated.get("parallel.expert_model_parallel_size", 1)
    etp = draft.stated.get("parallel.expert_tensor_parallel_size")
    world, replicas, gpus = _world(row), draft.facts.get("data parallel size"), draft.facts.get("gpus")
    if gpus is not None and world is not None and gpus != world:
        raise SpecError(f"world_size ({world}) is not the number of GPUs that the row names ({gpus}); correct one")
    world = world or gpus
    if world is None and replicas is not None:
        world = tp * pp * cp * replicas
    elif world is None:
        world = pp * max(tp * cp, ep * (etp or 1))
        draft.assume(f"world_size is not stated: counted as {world}, the least that its parallel sizes make")
    if replicas is not None and world != tp * pp * cp * replicas:
        raise SpecError(
            f"world_size ({world}) is not TP x PP x CP x DP ({tp} x {pp} x {cp} x {replicas}); correct one"
        )
    draft.state("parallel.world_size", world)
    if model.has_experts and etp is None and tp > 1:
        draft.state("parallel.expert_tensor_parallel_size", 1)
        draft.assume("expert_tensor_parallel_size is not stated: counted as 1")
    for name in ("seq_length", "micro_batch_size"):
        if f"batch.{name}" not in draft.stated:
            raise SpecError(f"{name} is not stated; give it")
    micro, ranks = draft.stated["batch.micro_batch_size"], max(1, world // (tp * pp * cp))
    if "microbatches" in draft.facts:
        draft.state("batch.global_batch_size", micro * ranks * draft.facts["microbatches"])
    if "batch.global_batch_size" not in draft.stated:
        draft.state("batch.global_batch_size", micro * ranks * (1 if pp == 1 else pp))
        draft.assume("global_batch_size is not stated: counted as the fewest microbatches that fill the pipeline")


# --------------------------------------------------------------------------------------------------
# Precision, optimizer, recomputation, implementation
# --------------------------------------------------------------------------------------------------


def _changed(model: ModelSpec, draft: Draft) -> ModelSpec:
    changes = dict(draft.model)
    rows = draft.facts.get("vocabulary of the run")
    if rows is not None and rows != model.vocab_size:
        if rows < 1:
            raise SpecError(f"vocab ({rows}) is below 1; give 1 or more")
        changes["vocab_size"] = rows
        draft.assume(f"the row's vocabulary is {rows}, the published one {model.vocab_size}: the row's is counted")
    depths = draft.facts.get("mtp")
    if depths is not None and depths != model.mtp_num_layers:
        if not 0 <= depths <= 64:
            raise SpecError(f"mtp ({depths}) is not a number of layers; give 0 to 64")
        changes |= {"mtp_num_layers": depths, "mtp_layer": (model.mtp_layer or model.layers[-1]) if depths else None}
    seq = draft.stated.get("batch.seq_length", 0)
    if model.position_embedding_type == "learned_absolute" and seq > model.max_position_embeddings:
        changes["max_position_embeddings"] = seq
        draft.assume(f"the table of learned positions is as long as the sequence ({seq})")
    if draft.facts.get("scan recomputed"):
        changes["layers"] = tuple(
            replace(layer, mixer=replace(layer.mixer, recompute_scan=True)) if isinstance(layer.mixer, MambaSpec)
            else layer for layer in model.layers
        )  # fmt: skip
    hidden = draft.facts.get("hidden size of the row", model.hidden_size)
    if hidden != model.hidden_size:
        raise SpecError(f"hidden_size ({hidden}) is not that of {model.name} ({model.hidden_size}); correct one")
    return replace(model, **changes) if changes else model


def _precision(draft: Draft, model: ModelSpec) -> None:
    facts, stated = draft.facts, draft.stated
    torch_engine = stated.get("data_parallel.engine", TRAINERS[facts["trainer"]].get("data_parallel.engine"))
    mixed = torch_engine in ("fsdp1", "fsdp2")
    if not ({"params_dtype", "fp8"} & facts.keys() or "precision.fp4" in stated or "precision.fp8" in stated):
        draft.assume("the precision is not stated: counted as bf16")
    dtype = facts.get("params_dtype", "bf16")
    if not mixed:
        stated["precision.params_dtype"] = dtype
    if dtype == "fp16" and facts["trainer"] == "Megatron-LM":
        # ``arguments.py``: accumulate_allreduce_grads_in_fp32 is off by default, and set by bf16 alone.
        stated.setdefault("data_parallel.grad_reduce_in_fp32", False)
    narrow = bool(facts.get("fp8")) or "precision.fp4" in stated
    if narrow and (mixed or (draft.experts_in_bf16 and model.has_experts)):
        what = "fp8 outside of megatron-core" if mixed else "fp8 of the dense linears beside experts in bf16"
        draft.leave_out(f"{what}: all is counted in bf16", Effect.EITHER,
                        "a byte for each element that these linears hold and save")  # fmt: skip
        for name in [n for n in stated if n.startswith("precision.") and n != "precision.params_dtype"]:
            del stated[name]
        return
    if facts.get("ends in bf16"):
        for end in ("start", "end"):
            stated.setdefault(f"precision.num_layers_at_{end}_in_bf16", 1)
    if facts.get("fp8") and "precision.fp4" not in stated:
        recipe = stated.get("precision.fp8_recipe")
        if recipe is None:
            draft.assume("the fp8 recipe is not stated: counted as delayed scaling")
        stated.setdefault("precision.fp8", "e4m3" if recipe in ("mxfp8", "blockwise") else "hybrid")


def _optimizer(draft: Draft) -> None:
    facts, stated = draft.facts, draft.stated
    usual = TRAINERS[facts["trainer"]].get("data_parallel.engine", "megatron_ddp")
    engine = stated.get("data_parallel.engine", usual)
    megatron = engine in MEGATRON_ENGINES or engine == "megatron_deepspeed"
    if facts.get("adamw"):
        draft.state("optimizer.optimizer", "adam" if megatron else "adamw")
    if facts.get("optimizer in 8 bit"):
        if engine in MEGATRON_ENGINES:
            draft.state("optimizer.optimizer", "adam")
            for name in ("exp_avg", "exp_avg_sq"):
                draft.state(f"optimizer.{name}_dtype", "fp8")
            draft.state("optimizer.use_precision_aware_optimizer", True)
            draft.leave_out(
                "8-bit Adam (bitsandbytes', a fork's): counted as moments in fp8 of a precision-aware optimizer",
                Effect.EITHER, "the scales of its moments, and tensors that it keeps in fp32",
            )
        else:
            draft.state("optimizer.optimizer", "adamw_8bit")
    if facts.get("optimizer offloaded"):
        if ENGINE_OPTIONS.get(engine) == "deepspeed":
            draft.state("deepspeed.offload_optimizer_device", "cpu")
        else:
            draft.state("optimizer.optimizer_cpu_offload", True)
    if facts.get("weights offloaded"):
        if ENGINE_OPTIONS.get(engine) == "deepspeed":
            draft.state("deepspeed.offload_param_device", "cpu")
        elif engine in ("fsdp1", "fsdp2"):
            draft.state("fsdp.offload_params", True)
        else:
            raise SpecError(f"offloaded weights are not of engine {engine}; correct one")
    if facts.get("optimizer of torch") and not megatron:
        draft.state("optimizer.torch_implementation", facts["optimizer of torch"])
    if engine in MEGATRON_ENGINES and not facts.get("optimizer stated"):
        draft.assume("dtypes of the optimizer's states are not stated: counted as fp32")
    if "lora" in facts:
        if facts["lora"] is None:
            raise SpecError("the rank of LoRA is not stated; give it")
        draft.state("peft.scheme", "lora")
        draft.state("peft.dim", int(facts["lora"]))
        draft.assume("the targets of LoRA are not stated: counted as Megatron Bridge's")


def _recomputation(draft: Draft, model: ModelSpec) -> None:
    facts, stated = draft.facts, draft.stated
    how, modules = facts.get("recompute"), facts.get("recomputed modules")
    usual = TRAINERS[facts["trainer"]].get("implementation.transformer_impl", "transformer_engine")
    of_torch = usual in ("transformers", "torchtitan")
    if modules and how is None:
        how = "selective"
    if modules and how in ("none", "full"):
        raise SpecError(f"recompute is {how} and names modules ({', '.join(modules)}); correct one")
    named = facts.get("layers that the recomputation names")
    if named is not None and named != model.num_layers:
        raise SpecError(f"recompute names {named} layers, the model has {model.num_layers}; correct one")
    if how == "the configuration's" or (how is None and "recompute.granularity" not in stated):
        checkpointed = TRAINERS[facts["trainer"]].get("transformers.gradient_checkpointing")
        default = "selective, op" if usual == "torchtitan" else "every layer" if checkpointed else "none"
        draft.assume(f"recomputation is not stated: counted as {default}")
        if usual == "torchtitan":
            stated.setdefault("transformers.selective_ac_option", "op")
    elif how == "full" and of_torch:
        draft.state("transformers.gradient_checkpointing", True)
        stated.pop("recompute.method", None)
        stated.pop("recompute.num_layers", None)
    elif how == "full":
        draft.state("recompute.granularity", "full")
        if "recompute.method" not in stated:
            draft.assume("how layers are grouped for full recomputation is not stated: counted as uniform, 1 layer")
        stated.setdefault("recompute.method", "uniform")
        stated.setdefault("recompute.num_layers", 1)
    elif how == "selective" and of_torch:
        stated.setdefault("transformers.selective_ac_option", "op")
        draft.assume("what is recomputed selectively is not stated: counted as the option op")
    elif how == "selective":
        draft.state("recompute.granularity", "selective")
        if modules:
            draft.state("recompute.modules", tuple(dict.fromkeys(modules)))
        else:
            draft.assume("what is recomputed selectively is not stated: counted as core_attn, Megatron's default")


#: What people call attention -> ``attention_backend``, or transformers' ``attn_implementation``.
_TRANSFORMERS_ATTENTION = {
    "flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager", "auto": "sdpa", "unfused": "eager",
}  # fmt: skip


def _implementation(draft: Draft, model: ModelSpec, generation: str) -> None:
    facts, stated = draft.facts, draft.stated
    usual = TRAINERS[facts["trainer"]]
    layers = usual.get("implementation.transformer_impl", "transformer_engine")
    attention = facts.get("attention")
    if attention and layers == "transformers":
        if attention not in _TRANSFORMERS_ATTENTION:
            raise SpecError(f"attention ({attention}) is not one of transformers'; give flash, sdpa or eager")
        draft.state("transformers.attn_implementation", _TRANSFORMERS_ATTENTION[attention])
    elif attention == "flash" and layers == "local":
        # Of the local layers only the attention differs, which has no other form here.
        draft.state("implementation.transformer_impl", "transformer_engine")
        draft.state("implementation.attention_backend", "flash")
        draft.state("implementation.gradient_accumulation_fusion", False)
        draft.assume("local layers with FlashAttention are counted as Transformer Engine's with it")
    elif attention and layers == "transformer_engine":
        draft.state("implementation.attention_backend", "auto" if attention == "sdpa" else attention)
    if "graphed modules" in facts and stated.get("implementation.cuda_graph_impl") != "none":
        stated.setdefault("implementation.cuda_graph_impl", "transformer_engine")
        draft.state("implementation.cuda_graph_modules", tuple(dict.fromkeys(facts["graphed modules"])))
    if facts.get("liger"):
        patched: tuple[str, ...] = ("rope", "rms_norm", "swiglu")
        if facts["trainer"] == "ArcticTraining":  # Liger's own class: ``apply_liger_kernel_to_llama`` by default
            patched = (*patched, "fused_linear_cross_entropy")
        else:
            draft.leave_out("Liger's fused loss: all logits are counted", Effect.DOWN, "logits and their gradients")
        draft.state("transformers.liger_kernel", patched)
    if model.has_experts and not facts.get("forced balance"):
        routing = "is natural" if facts.get("routing") == "natural" else "is not stated"
        draft.assume(f"routing {routing}: counted as balanced (moe_imbalance 1)")
    running = Running(
        stated.get("implementation.megatron_core", DEFAULT_MEGATRON_CORE),
        stated.get("implementation.transformer_engine"), stated.get("implementation.torch"),
    )
    if draft.env:
        decided, assumed = implementation_of(draft.env, generation, running)
        for name, value in decided.items():
            stated.setdefault(f"implementation.{name}", value)
        draft.assumptions.extend(assumed)


def _with_defaults(draft: Draft, model: ModelSpec, generation: str) -> dict[str, Any]:
    """What the row states over what its trainer does by default; the second is listed."""
    usual = dict(TRAINERS[draft.facts["trainer"]])
    if draft.facts.get("performance scripts"):
        usual |= PERFORMANCE_SCRIPTS
        if "implementation.cuda_graph_impl" not in draft.stated:
            usual |= WORKLOADS.get((model.name, generation), {})
    engine = draft.stated.get("data_parallel.engine", usual.get("data_parallel.engine", "megatron_ddp"))
    if draft.facts["trainer"] in ("Megatron Bridge", "NeMo"):
        # Recipes of Llama and Qwen take Transformer Engine's loss, those of hybrids megatron-core's.
        usual["implementation.cross_entropy_fusion_impl"] = "native" if model.hybrid else "te"
        if any(isinstance(layer.ffn, MoESpec) and layer.ffn.activation == "squared_relu" for layer in model.layers):
            # Every recipe of Nemotron 3 (``recipes/nemotronh``, 0.3 and 0.6).
            usual["implementation.use_fused_weighted_squared_relu"] = True
        if draft.stated.get("data_parallel.use_distributed_optimizer") is False:
            usual["data_parallel.overlap_param_gather"] = False
        if not model.has_experts:
            usual.pop("implementation.moe_permute_fusion")
        pins = NEMO.get(draft.facts.get("container", ""))
        bridge = (pins and pins.bridge) or DEFAULT_MEGATRON_BRIDGE
        if engine == "megatron_fsdp" and bridge < BRIDGE_FUSES_FSDP_GRADIENTS:
            usual["implementation.gradient_accumulation_fusion"] = False
        if draft.stated.get("implementation.cross_entropy_loss_fusion") is False:
            usual.pop("implementation.cross_entropy_fusion_impl")
        if draft.stated.get("parallel.tensor_model_parallel_size", 1) == 1:
            usual.pop("parallel.sequence_parallel")
        if model.has_experts and "implementation.moe_token_dispatcher_type" not in draft.stated:
            draft.assume("moe_token_dispatcher_type is not stated: counted as alltoall")
    open_ = {name: value for name, value in usual.items() if name not in draft.stated}
    if open_:
        words = ", ".join(f"{name.rpartition('.')[2]} {show(value)}" for name, value in open_.items())
        draft.assume(f"not stated, taken as {draft.facts['trainer']} has it by default: {words}")
    many = draft.stated.get("parallel.world_size", 1) > 1
    if many and engine == "megatron_ddp" and "data_parallel.use_distributed_optimizer" not in draft.stated:
        draft.assume("use_distributed_optimizer is not stated: counted as on")
    return {**open_, **draft.stated}
