"""verl's configuration (``trainer/config``), composed or as overrides of a release's defaults.

Source: verl 0.7.0, 0.8.0 and 0.9.1: ``workers/engine_workers.py: ActorRolloutRefWorker``, ``workers/engine/{megatron,
fsdp}/transformer_impl.py``, ``workers/megatron_workers.py`` (0.7), ``trainer/ppo/utils.py: need_critic,
need_reference_policy``, ``workers/rollout/{vllm,sglang}_rollout``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge_memory.files import read_text
from bridge_memory.readers.engines.files import table_of
from bridge_memory.rollout.inference import InferenceSpec
from bridge_memory.rollout.setup import Critic, PostTraining, Reference
from bridge_memory.rollout.sources.common import MOST_BYTES, defaults, model_of
from bridge_memory.rollout.sources.hydra import Options, flat, overrides, words_of_script
from bridge_memory.rollout.trainer import UPDATE_ALONE
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.errors import bounded, show

ENTRY = "verl.trainer.main_ppo"
_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
#: The newest release whose micro batches may hold more tokens than their limit (``utils/seqlen_balancing.py:
#: rearrange_micro_batches``), and the newest whose vLLM runs in the worker's process (``workers/rollout``).
_SOFT_LIMITS, _IN_PROCESS = (0, 8), (0, 7)
#: The newest engines that a release of verl takes (its wheels' Requires-Dist); none: today's.
_ENGINES = {
    (0, 7): {"vllm": "0.12.0", "sglang": "0.5.6"}, (0, 8): {"vllm": "0.12.0", "sglang": "0.5.8"},
    (0, 9): {"vllm": "0.24.0", "sglang": "0.5.12"},
}  # fmt: skip
#: Options that move no memory, or none that is asked about: by name, or by a part of it.
_HARMLESS = re.compile(
    r"(^|\.)(lr|lr_.*|min_lr.*|weight_decay.*|betas|clip_grad|grad_clip|clip_ratio.*|tau_.*|kl_.*|loss_.*|"
    r"entropy_coeff|"
    r"seed|shuffle|temperature|top_k|top_p|do_sample|ignore_eos|n|rollout_n|gamma|lam|norm_adv.*|adv_estimator|"
    r"policy_loss|total_training_steps|ppo_epochs|_target_|strategy|profiler|trace|checkpoint|agent|multi_turn|"
    r"val_kwargs|"
    r"warmup_style|num_cycles|optimizer_impl|zero_indexed_step|data_loader_seed|cliprange.*|disable_log_stats|"
    r"load_format|"
    r"enable_chunked_prefill|calculate_log_probs|mode|nccl_timeout|hybrid_engine|trust_remote_code|external_lib|"
    r"tokenizer_path|custom_chat_template|lora_alpha|alpha|use_shm|dist_checkpointing.*|use_dist_checkpointing|"
    r"layered_summon|multi_stage_wake_up|over_sample_rate|skip_.*|grad_offload|use_mbridge|vanilla_mbridge|"
    r"use_torch_compile|freeze_vision.*|use_dynamic_bsz|filter_.*|rollout_correction|critic_warmup|override_config|"
    r"target_modules|exclude_modules|logprobs_mode|use_checkpoint_opt_param_scheduler|attention_backend|"
    r"load_weight|prometheus|rollout_.*|free_cache_engine|fused_kernel_options|enable_prefix_caching)(\.|$)"
)
_HARMLESS_SECTIONS = ("data", "trainer", "algorithm", "reward_model", "reward", "custom_reward_function", "ray_kwargs",
                      "ray_init", "global_profiler", "transfer_queue", "hydra", "defaults", "env", "reward_manager",
                      "distillation",
                      "sandbox_fusion", "wandb", "searchpath", "model_engine", "prompt", "custom")  # fmt: skip
#: Sections whose options are listed with their defaults.
_LISTED = ("actor_rollout_ref", "critic", "algorithm", "trainer", "data")
#: Dtypes as verl writes them.
_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
#: Fields of TransformerConfig that are read, or that move nothing here.
_IGNORED_TRANSFORMER = (
    "attention_backend", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "apply_rope_fusion",
    "moe_router_bias_update_rate", "moe_token_dispatcher_type", "moe_enable_deepep", "moe_router_dtype",
    "moe_permute_fusion", "moe_shared_expert_overlap", "moe_grouped_gemm", "gradient_accumulation_fusion",
    "persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion",
    "deallocate_pipeline_outputs", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_loss_in_pipeline_split", "account_for_embedding_in_pipeline_split", "pipeline_model_parallel_layout",
    "mtp_num_layers", "freeze_moe_router", "moe_router_fusion", "calculate_per_token_loss", "moe_z_loss_coeff",
)  # fmt: skip


def read_verl(
    source: str, words: Sequence[str] = (), *, release: str = "", model: str | None = None, text: str | None = None,
    critic: bool = True,
) -> PostTraining:  # fmt: skip
    """The job of a configuration.

    Args:
        source: A YAML (composed or not), a launch script, or a release such as "0.9" whose defaults hold.
        text: What would be in the file ``source``, which is then only its name; no file is read.
        critic: Whether the critic is read too.
        words: Overrides, as on the command line.
        release: Of verl; empty: the one that ``source`` says, else the newest that is known.
        model: In place of ``actor_rollout_ref.model.path``.

    Raises:
        SpecError: An option is unknown or has a value that verl would refuse, or what it asks for is not modelled.
    """
    table: dict[str, Any] = {}
    given, files = list(words), text is None
    if files and re.fullmatch(r"v?\d+\.\d+(\.\w+)*", source) and not os.path.exists(source):
        release = release or source
    else:
        if text is None:
            give = "give a configuration of verl, the script that starts it, or a release such as 0.9"
            text = read_text(source, give, MOST_BYTES)
        if source.endswith((".sh", ".bash", ".slurm")) or text.startswith("#!") or ENTRY in text:
            given = [*words_of_script(text, ENTRY), *given]
        else:
            table = _flat(table_of(text, source), source)
    return _reader(table, given, release, model, files).read(bool(release), critic=critic)


def update_of_verl(config: Mapping[str, Any], name: str = "verl's configuration") -> RunSpec:
    """The update of the policy alone, which is the training step of a configuration whose values are resolved.

    Raises:
        SpecError: As ``read_verl``.
    """
    job = _reader(_flat(config, name), [], "", None).read(False, critic=False)
    left_out = [f"not modelled: {', '.join(job.not_modelled)}"] * bool(job.not_modelled)
    return job.update_run().with_(assumptions=(UPDATE_ALONE, *job.assumptions, *left_out))


def _flat(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Options by their whole names."""
    table = dict(flat({k: v for k, v in config.items() if k not in ("defaults", "hydra")}))
    if not any(option.startswith("actor_rollout_ref.") for option in table):
        raise SpecError(f"{bounded(name, 80)} has no actor_rollout_ref; give a configuration of verl")
    return table


def _reader(
    table: dict[str, Any], given: list[str], release: str, model: str | None, files: bool = True
) -> _Reader:
    """``table``: options by their whole names; ``given``: overrides of them."""
    megatron = _is_megatron(table, given)
    given = [word for word in given if not word.startswith(("model_engine=", "--"))]
    number = _release(release, megatron, {*table, *(name for name, _, mark in overrides(given) if not mark)})
    name = f"verl {'.'.join(map(str, number))}"
    options = Options(_options(number, megatron), name, [s for s in _HARMLESS_SECTIONS if s not in _LISTED])
    options.update(table.items())
    options.override(given)
    return _Reader(options, number, megatron, model, files)


def _options(release: tuple[int, int], megatron: bool) -> dict[str, Any]:
    found = defaults("verl_defaults")[".".join(map(str, release))]
    return {**found["shared"], **found["megatron" if megatron else "fsdp"]}


def _release(text: str, megatron: bool, names: set[str]) -> tuple[int, int]:
    """The release that was given; else the one that knows most of the options, the newest of several."""
    known: list[tuple[int, int]] = sorted(
        (int(name.split(".")[0]), int(name.split(".")[1])) for name in defaults("verl_defaults")
    )
    if not text:
        return max(known, key=lambda one: (-len(names - _options(one, megatron).keys()), one))
    match = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.\w+)*", text)
    if match is None:
        raise SpecError(f"verl's release ({bounded(text, 40)}) is no release; give one such as 0.9")
    asked = int(match[1]), int(match[2])
    if asked < known[0]:
        raise SpecError(f"verl {text} is older than what is known (0.7 to 0.9); give --release of one of these")
    return max(one for one in known if one <= asked)


def _is_megatron(table: dict[str, Any], words: Sequence[str]) -> bool:
    named = f"{_ACTOR}.strategy"
    said = [word.partition("=")[2].strip("'\"") for word in words if word.lstrip("+").startswith(f"{named}=")]
    said += [word.partition("=")[2] for word in words if word.startswith("model_engine=")]
    if not said and any(word.startswith("--config-name") and "megatron" in word for word in words):
        return True
    if not said and named in table:
        said = [str(table[named])]
    strategy = said[-1] if said else ""
    if strategy in ("megatron", "mcore"):
        return True
    if strategy in ("", "???"):
        return any(f"{_ACTOR}.megatron." in name for name in (*table, *words))
    if strategy not in ("fsdp", "fsdp2", "dp"):
        raise SpecError(f"{named} ({bounded(strategy, 40)}) is not modelled; give fsdp, fsdp2 or megatron")
    return False


class _Reader:
    """One configuration."""

    def __init__(
        self, options: Options, release: tuple[int, int], megatron: bool, model: str | None, files: bool
    ) -> None:
        self.o, self.release, self.megatron, self.given_model, self.files = options, release, megatron, model, files
        self.assumptions: list[str] = []
        self.not_modelled: list[str] = []

    def read(self, release_given: bool, *, critic: bool = True) -> PostTraining:
        o = self.o
        if not release_given:
            self.assumptions.append(f"verl {'.'.join(map(str, self.release))} (--release)")
        model, said = model_of(o.text(f"{_MODEL}.path"), f"{_MODEL}.path", self.given_model, files=self.files)
        self.assumptions += [said] * bool(said)
        world = self._need("trainer.n_gpus_per_node", 8) * self._need("trainer.nnodes", 1)
        prompt, response = self._need("data.max_prompt_length"), self._need("data.max_response_length")
        longest = prompt + response
        trainer = self._trainer(model, world, _ACTOR)
        packed = trainer.batch.packed_sequences
        dynamic = o.flag(f"{_ACTOR}.use_dynamic_bsz") and packed
        update = self._tokens(
            _ACTOR, "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", longest, trainer, dynamic
        )
        logs = self._tokens(_ROLLOUT, "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu", longest,
                            trainer, o.flag(f"{_ROLLOUT}.log_prob_use_dynamic_bsz") and packed)  # fmt: skip
        reference = self._reference(trainer)
        refs = 0
        if reference is not Reference.NONE:
            refs = self._tokens(_REF, "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu", longest,
                                trainer, o.flag(f"{_REF}.log_prob_use_dynamic_bsz") and packed)  # fmt: skip
        part = self._part(_ACTOR)
        ppo, n = self._need(f"{_ACTOR}.ppo_mini_batch_size"), self._need(f"{_ROLLOUT}.n", 1)
        entropy = o.flag(f"{_ACTOR}.calculate_entropy") or bool(o.number(f"{_ACTOR}.entropy_coeff"))
        chunked = o.flag(f"{part}.entropy_from_logits_with_chunking")
        chunk = o.integer(f"{part}.entropy_from_logits_chunk_size", 2048) if chunked else 0
        engine = self._engine(model, longest)
        vllm = engine.framework == "vllm"
        in_process = vllm and self.release <= _IN_PROCESS
        bucket = (
            o.integer(
                f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
                o.integer(f"{_ROLLOUT}.update_weights_bucket_megabytes", 512),
            )
            or 0
        )
        lora = trainer.peft.scheme != "none"
        level = 1 if lora and not o.flag(f"{_MODEL}.lora.merge") else 2
        if not o.flag(f"{_ROLLOUT}.free_cache_engine", True):
            level = 0
        log_probs = not o.flag("algorithm.rollout_correction.bypass_mode")
        trained = self._critic(world, longest) if critic else None
        found = self._built(
            framework="verl", release=self.release, trainer=trainer, engine=engine, longest=longest,
            update_tokens=update, log_prob_tokens=logs, reference_tokens=refs,
            update_sequences=max(1, ppo * n // trainer.parallel.data_parallel_size),
            hard_limit=self.release > _SOFT_LIMITS, dynamic=bool(dynamic), update_entropy=entropy,
            log_prob_entropy=log_probs, log_probs=log_probs, chunk_size=chunk or 0,
            fused_kernels=o.flag(f"{_MODEL}.use_fused_kernels"), param_offload=self._offloads(part, trainer),
            optimizer_offload=o.flag(f"{part}.optimizer_offload"), reference=reference, critic=trained,
            sleep_level=level, in_process=in_process, bucket_bytes=0 if in_process else bucket << 20,
            validates=o.flag("trainer.val_before_train", True) or (o.number("trainer.test_freq") or 0) > 0,
            gpus_per_node=self._need("trainer.n_gpus_per_node", 8),
        )  # fmt: skip
        self._unread()
        return found.with_(assumptions=tuple(self.assumptions), not_modelled=tuple(self.not_modelled))

    def _offloads(self, part: str, trainer: RunSpec) -> bool:
        """Whether parameters and gradients leave the GPU: buffers of megatron-core's DDP do, and modules of FSDP."""
        asked = self.o.flag(f"{part}.param_offload")
        if asked and trainer.data_parallel.engine == "megatron_fsdp":
            self.assumptions.append(f"{part}.param_offload leaves the buffers of Megatron-FSDP on the GPU")
            return False
        return asked

    def _built(self, **fields: Any) -> PostTraining:
        """Refusals in verl's words."""
        try:
            return PostTraining(**fields)
        except SpecError as error:
            text = str(error).replace("log_prob_tokens", f"{_ROLLOUT}.log_prob_max_token_len_per_gpu")
            raise SpecError(text.replace("update_tokens", f"{_ACTOR}.ppo_max_token_len_per_gpu")) from None

    def _need(self, name: str, default: int | None = None) -> int:
        found = self.o.integer(name, default)
        if found is None:
            raise SpecError(f"{name} is not given; give a whole number")
        return found

    def _part(self, role: str) -> str:
        if self.megatron:
            return f"{role}.megatron"
        return f"{role}.fsdp_config" if role != "critic" else self._critic_part()

    def _critic_part(self) -> str:
        new = any(name.startswith("critic.fsdp.") for name in self.o.table("critic") or ())
        return (
            "critic.fsdp" if new or self.o.get("critic.fsdp.param_offload") is not None else "critic.model.fsdp_config"
        )

    def _trainer(self, model: ModelSpec, world: int, role: str) -> RunSpec:
        return self._of_megatron(model, world, role) if self.megatron else self._of_fsdp(model, world, role)

    def _of_megatron(self, model: ModelSpec, world: int, role: str) -> RunSpec:
        o, part = self.o, f"{role}.megatron"
        transformer = o.table(f"{part}.override_transformer_config")
        ddp = o.table(f"{part}.override_ddp_config")
        optim = o.table(f"{role}.optim.override_optimizer_config")
        for key in transformer:
            if key not in _IGNORED_TRANSFORMER:
                self.not_modelled.append(f"{part}.override_transformer_config.{bounded(key, 60)}")
        if o.flag(f"{part}.dynamic_context_parallel"):
            self.not_modelled.append(f"{part}.dynamic_context_parallel")
        if o.flag(f"{part}.qat.enable"):
            self.not_modelled.append(f"{part}.qat")
        if o.text(f"{part}.router_replay.mode", "disabled") != "disabled":
            self.not_modelled.append(f"{part}.router_replay: recorded routes")
        if o.flag(f"{_MODEL}.mtp.enable"):
            self.not_modelled.append(f"{_MODEL}.mtp")
        tp = self._need(f"{part}.tensor_model_parallel_size", 1)
        fields: dict[str, Any] = {
            name: transformer[name] for name in (
                "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
                "account_for_loss_in_pipeline_split", "account_for_embedding_in_pipeline_split",
                "pipeline_model_parallel_layout",
            ) if transformer.get(name) not in (None, False)
        }  # fmt: skip
        parallel = ParallelSpec(
            world_size=world, tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=self._need(f"{part}.pipeline_model_parallel_size", 1),
            virtual_pipeline_model_parallel_size=o.integer(f"{part}.virtual_pipeline_model_parallel_size"),
            context_parallel_size=self._need(f"{part}.context_parallel_size", 1),
            expert_model_parallel_size=self._need(f"{part}.expert_model_parallel_size", 1),
            expert_tensor_parallel_size=o.integer(f"{part}.expert_tensor_parallel_size"),
            sequence_parallel=o.flag(f"{part}.sequence_parallel", True) and tp > 1, **fields,
        )  # fmt: skip
        recompute: dict[str, Any] = {}
        if transformer.get("recompute_granularity") is not None:
            recompute["granularity"] = transformer["recompute_granularity"]
            for name in ("method", "num_layers"):
                if transformer.get(f"recompute_{name}") is not None:
                    recompute[name] = transformer[f"recompute_{name}"]
            if recompute["granularity"] == "selective" and transformer.get("recompute_modules"):
                recompute["modules"] = tuple(transformer["recompute_modules"])
        optimizer: dict[str, Any] = {}
        name = o.text(f"{role}.optim.optimizer", "adam").lower()
        if name not in ("adam", "adamw", "sgd", "muon"):
            raise SpecError(f"{role}.optim.optimizer ({bounded(name, 40)}) is not modelled; give adam, sgd or muon")
        if name != "adamw":
            optimizer["optimizer"] = name
        for key in ("optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer",
                    "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):  # fmt: skip
            value = optim.get(key, o.get(f"{role}.optim.{key}"))
            if value is not None:
                optimizer[key] = _DTYPES.get(value, value) if isinstance(value, str) else value
        if not optimizer.get("use_precision_aware_optimizer"):
            for key in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
                optimizer.pop(key, None)
        for key in optim:
            if key not in optimizer and key not in (
                "overlap_cpu_optimizer_d2h_h2d",
                "use_torch_optimizer_for_cpu_offload",
            ):
                self.not_modelled.append(f"{role}.optim.override_optimizer_config.{bounded(key, 60)}")
        dtype = _DTYPES.get(o.text(f"{part}.dtype", "bfloat16"), "bf16")
        impl: dict[str, Any] = {}
        for key in ("moe_token_dispatcher_type", "moe_permute_fusion", "moe_router_dtype", "moe_shared_expert_overlap",
                    "moe_grouped_gemm", "apply_rope_fusion", "gradient_accumulation_fusion",
                    "moe_router_fusion", "calculate_per_token_loss"):  # fmt: skip
            if transformer.get(key) is not None and (model.has_experts or not key.startswith("moe")):
                impl[key] = transformer[key]
        if transformer.get("moe_enable_deepep"):
            impl["moe_token_dispatcher_type"] = "flex"
        megatron_fsdp = o.flag(f"{part}.use_megatron_fsdp")
        data: dict[str, Any] = {
            "engine": "megatron_fsdp", "grad_reduce_in_fp32": bool(ddp.get("grad_reduce_in_fp32", False)),
            "data_parallel_sharding_strategy": str(ddp.get("data_parallel_sharding_strategy", "optim_grads_params")),
        } if megatron_fsdp else {
            "use_distributed_optimizer": o.flag(f"{part}.use_distributed_optimizer", True),
            "grad_reduce_in_fp32": bool(ddp.get("grad_reduce_in_fp32", True)), "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        }  # fmt: skip
        if not megatron_fsdp and not data["grad_reduce_in_fp32"]:
            optimizer.setdefault("main_grads_dtype", "fp32")
        packed = o.flag(f"{part}.use_remove_padding", True)
        return RunSpec(
            model=model, parallel=parallel, batch=BatchSpec(packed_sequences=packed),
            precision=PrecisionSpec(params_dtype=dtype), optimizer=OptimizerSpec(**optimizer),
            data_parallel=DataParallelSpec(**data), recompute=RecomputeSpec(**recompute),
            implementation=ImplementationSpec(**impl), peft=self._peft(),
        )  # fmt: skip

    def _of_fsdp(self, model: ModelSpec, world: int, role: str) -> RunSpec:
        from bridge_memory.spec import FSDPOptions
        from bridge_memory.spec.transformers import TransformersSpec

        o, part = self.o, self._part(role)
        strategy = o.text(f"{role}.strategy", "fsdp")
        engine = "fsdp2" if strategy == "fsdp2" else "fsdp1"
        dtype = _DTYPES.get(o.text(f"{part}.model_dtype", "fp32") or "fp32")
        if dtype is None:
            raise SpecError(f"{part}.model_dtype ({show(o.get(f'{part}.model_dtype'))}) is no dtype; give fp32 or bf16")
        mixed = o.table(f"{part}.mixed_precision")
        degree = o.integer(f"{part}.fsdp_size", least=-1)
        sharded = None if degree in (None, -1, 0) or degree >= world else degree
        whole = o.flag(f"{part}.reshard_after_forward", True)
        fsdp: dict[str, Any] = {
            "param_dtype": _DTYPES.get(str(mixed.get("param_dtype", "bf16")), "bf16"),
            "reduce_dtype": _DTYPES.get(str(mixed.get("reduce_dtype", "fp32")), "fp32"),
            "forward_prefetch": o.flag(f"{part}.forward_prefetch"), "shard_degree": sharded,
        }  # fmt: skip
        if engine == "fsdp1":
            kind = "FULL_SHARD" if whole else "SHARD_GRAD_OP"
            fsdp["sharding_strategy"] = kind if sharded is None else "HYBRID_SHARD" if whole else "_HYBRID_SHARD_ZERO2"
            fsdp["use_orig_params"] = o.flag(f"{part}.use_orig_params")
        else:
            fsdp["offload_params"] = o.flag(f"{part}.offload_policy")
            if not whole:
                fsdp["reshard_after_forward"] = False
            fsdp.pop("forward_prefetch")
        sequence = self._need(f"{role}.ulysses_sequence_parallel_size", 1)
        if sequence > 1:
            self.assumptions.append(f"Ulysses over {sequence} ranks: each holds the tokens of its limit")
        moved = f"{_MODEL}.enable_activation_offload"
        if o.flag(moved):
            self.not_modelled.append(moved)
        if o.flag(f"{_MODEL}.tiled_mlp.enabled"):
            self.not_modelled.append(f"{_MODEL}.tiled_mlp")
        checkpointing = o.flag(f"{_MODEL}.enable_gradient_checkpointing", True)
        packed = o.flag(f"{_MODEL}.use_remove_padding", True)
        hf: dict[str, Any] = {
            "attn_implementation": "flash_attention_2", "gradient_checkpointing": checkpointing,
            "attention_mask": "none" if packed else "padded",
        }  # fmt: skip
        if checkpointing:
            hf["use_reentrant"] = False
        if o.flag(f"{_MODEL}.use_liger"):
            self.not_modelled.append(f"{_MODEL}.use_liger: kernels of liger")
        return RunSpec(
            model=model, parallel=ParallelSpec(world_size=world), batch=BatchSpec(packed_sequences=packed),
            precision=PrecisionSpec(params_dtype=dtype), data_parallel=DataParallelSpec(
                engine=engine, sync_each_batch=not o.flag(f"{part}.use_no_sync_for_gradient_accumulation"),
            ),
            fsdp=FSDPOptions(**fsdp), transformers=TransformersSpec(**hf), peft=self._peft(),
        )  # fmt: skip

    def _peft(self) -> PeftSpec:
        rank = self.o.integer(f"{_MODEL}.lora_rank", 0, 0) or self.o.integer(f"{_MODEL}.lora.rank", 0, 0) or 0
        if not rank:
            return PeftSpec()
        if not self.megatron:
            return PeftSpec(scheme="lora", dim=rank)
        targets = self.o.get(f"{_MODEL}.lora.target_modules")
        fields: dict[str, Any] = {}
        if isinstance(targets, list) and targets:
            fields["target_modules"] = tuple(targets)
        return PeftSpec(scheme="lora", dim=rank, **fields)

    def _tokens(self, role: str, limit: str, rows: str, longest: int, trainer: RunSpec, dynamic: bool) -> int:
        """Tokens of a micro batch, of all context-parallel ranks."""
        if dynamic:
            return self._need(f"{role}.{limit}") * trainer.parallel.cp
        number = self.o.integer(f"{role}.{rows}")
        if number is None:
            whole = self.o.integer(f"{role}.{rows.removesuffix('_per_gpu')}")
            if whole is not None:
                number = max(1, whole // trainer.parallel.data_parallel_size)
        if number is None:
            raise SpecError(f"{role}.{rows} is not given; give it, or {_ACTOR}.use_dynamic_bsz=True with {limit}")
        return number * longest

    def _reference(self, trainer: RunSpec) -> Reference:
        o = self.o
        if not (o.flag(f"{_ACTOR}.use_kl_loss") or o.flag("algorithm.use_kl_in_reward")):
            return Reference.NONE
        if trainer.peft.scheme != "none":
            return Reference.ADAPTERS_OFF
        if not self.megatron:
            return Reference.STREAMED
        return Reference.LOADED if o.flag(f"{_REF}.megatron.param_offload") else Reference.GPU

    def _engine(self, model: ModelSpec, longest: int) -> InferenceSpec:
        o = self.o
        name = o.text(f"{_ROLLOUT}.name", "vllm")
        if name == "???":
            name = "vllm"
            self.assumptions.append(f"{_ROLLOUT}.name vllm")
        if name not in ("vllm", "sglang"):
            raise SpecError(f"{_ROLLOUT}.name ({bounded(name, 40)}) is not modelled; give vllm or sglang")
        if o.flag(f"{_ROLLOUT}.disaggregation.enabled"):
            raise SpecError(f"{_ROLLOUT}.disaggregation is not modelled; give an engine that shares the trainer's GPUs")
        if o.integer(f"{_ROLLOUT}.nnodes", 0, 0):
            raise SpecError(f"{_ROLLOUT}.nnodes: an engine on nodes of its own is not modelled; give 0")
        own = o.table(f"{_ROLLOUT}.engine_kwargs.{name}")
        share = o.number(f"{_ROLLOUT}.gpu_memory_utilization")
        dp = self._need(f"{_ROLLOUT}.data_parallel_size", 1)
        tp, ep = self._need(f"{_ROLLOUT}.tensor_model_parallel_size"), self._need(f"{_ROLLOUT}.expert_parallel_size", 1)
        sizes = o.get(f"{_ROLLOUT}.cudagraph_capture_sizes")
        fields: dict[str, Any] = {
            "model": model, "framework": name, "tensor_parallel_size": tp, "data_parallel_size": dp,
            "pipeline_parallel_size": self._need(f"{_ROLLOUT}.pipeline_model_parallel_size", 1),
            "max_model_len": o.integer(f"{_ROLLOUT}.max_model_len") or longest,
            "max_num_seqs": o.integer(f"{_ROLLOUT}.max_num_seqs"),
            "enforce_eager": o.flag(f"{_ROLLOUT}.enforce_eager"), "expert_parallel": ep > 1,
            "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(
                _DTYPES.get(o.text(f"{_ROLLOUT}.dtype", "bfloat16"), ""), "bfloat16"),
            "enable_prefix_caching": o.flag(f"{_ROLLOUT}.enable_prefix_caching", True),
        }  # fmt: skip
        newest = _ENGINES.get(self.release, {}).get(name, "")
        if newest:
            fields["release"] = newest
            self.assumptions.append(f"{name} {newest}, the newest that this verl takes (--rollout-release)")
        if isinstance(sizes, list) and sizes:
            fields["cuda_graph_sizes"] = tuple(sizes)
        quantization = o.get(f"{_ROLLOUT}.quantization")
        if quantization:
            fields["quantization"] = str(quantization)
        if name == "vllm":
            fields |= {"gpu_memory_utilization": share,
                       "max_num_batched_tokens": o.integer(f"{_ROLLOUT}.max_num_batched_tokens")}  # fmt: skip
        else:
            fields["mem_fraction_static"] = share
            if ep > 1:
                fields["expert_parallel"] = ep
            if own.get("chunked_prefill_size") is not None:
                fields["chunked_prefill_size"] = own.pop("chunked_prefill_size")
        if own.get("kv_cache_dtype") is not None:
            fields["kv_cache_dtype"] = own.pop("kv_cache_dtype")
        lora = self.o.integer(f"{_MODEL}.lora_rank", 0, 0) or self.o.integer(f"{_MODEL}.lora.rank", 0, 0) or 0
        if lora and not o.flag(f"{_MODEL}.lora.merge"):
            fields |= {"max_loras": 1, "max_lora_rank": lora}
        self.not_modelled += [
            f"{_ROLLOUT}.engine_kwargs.{name}.{bounded(key, 60)}" for key, value in own.items()
            if value not in (None, {}, False) and key not in ("disable_mm_preprocessor_cache", "attention_backend")
        ]  # fmt: skip
        return InferenceSpec(**fields)

    def _critic(self, world: int, longest: int) -> Critic | None:
        from dataclasses import replace

        o = self.o
        enabled = o.get("critic.enable")
        if enabled is None:
            enabled = o.text("algorithm.adv_estimator", "gae") == "gae"
        if not enabled:
            o.table("critic")
            return None
        path = o.text("critic.model.path")
        if "critic.model.path" not in o.given:
            path = o.text(f"{_MODEL}.path")
            self.assumptions.append("the critic is a model like the policy (critic.model.path)")
        model, said = model_of(path, "critic.model.path", self.given_model, files=self.files)
        self.assumptions += [said] * bool(said and said.replace("critic.model", _MODEL) not in self.assumptions)
        model = replace(model, share_embeddings_and_output_weights=True)
        run = self._trainer(model, world, "critic")
        dynamic = o.flag("critic.use_dynamic_bsz") and run.batch.packed_sequences
        tokens = self._tokens(
            "critic", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", longest, run, dynamic
        )
        part = self._part("critic")
        offloads = o.flag(f"{part}.param_offload"), o.flag(f"{part}.optimizer_offload")
        o.table("critic")
        return Critic(run=run, tokens=tokens, param_offload=offloads[0], optimizer_offload=offloads[1])

    def _unread(self) -> None:
        """Options of a configuration that nothing here reads, and that can move memory."""
        if self.o.flag("distillation.enabled"):
            self.not_modelled.append("distillation: a teacher and its logits")
        for name in self.o.unread():
            section = name.partition(".")[0]
            if section in _HARMLESS_SECTIONS or _HARMLESS.search(name):
                continue
            # The reference is laid out as the actor is.
            if name.startswith(f"{_REF}.") and self.o.get(name) == self.o.get(name.replace(_REF, _ACTOR, 1)):
                continue
            self.not_modelled.append(bounded(name, 120))
