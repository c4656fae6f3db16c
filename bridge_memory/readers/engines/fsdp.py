"""FSDP's options, as accelerate and the Trainer name them -> settings of a run.

Source: accelerate ``utils/dataclasses.py: FullyShardedDataParallelPlugin``, ``accelerator.py: prepare_model``,
``utils/fsdp_utils.py: fsdp2_prepare_model`` (1.15).
"""

from __future__ import annotations

from typing import Any

from bridge_memory.readers.engines.sections import Section
from bridge_memory.readers.engines.settings import Settings
from bridge_memory.spec import show

#: In accelerate's order, since a file may give the number, from 1 on (``constants.py: FSDP_SHARDING_STRATEGY``).
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
#: Options that do not change the memory of a training step.
HARMLESS = ("state_dict_type", "cpu_ram_efficient_loading", "sync_module_states", "transformer_layer_cls_to_wrap",
            "min_num_params", "xla_fsdp_settings")  # fmt: skip
KNOWN = (
    *HARMLESS, "version", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "backward_prefetch",
    "forward_prefetch", "use_orig_params", "offload_params", "activation_checkpointing", "limit_all_gathers",
    "activation_checkpointing_offload", "ignored_modules", "mixed_precision_policy",
)  # fmt: skip


def read_fsdp(
    section: Section, settings: Settings, *, mixed_precision: str | None, version: int, wrap: str,
    use_orig_params: bool, prefix: str = "",
) -> None:  # fmt: skip
    """Read a table of FSDP options into ``settings``.

    ``prefix``: of every key ("fsdp_" in accelerate's YAML). ``version``, ``wrap``, ``use_orig_params``: defaults.
    ``mixed_precision``: "bf16", "fp16" or None.
    """
    diagnostics = settings.diagnostics

    def key(name: str) -> str:
        """The key in the file: accelerate accepts each with and without "fsdp_"."""
        other = f"fsdp_{name}" if not prefix else name
        return other if section.has(other) and not section.has(prefix + name) else prefix + name

    version = section.integer(key("version"), version, digits=True)
    if version not in (1, 2):
        section.problem(key("version"), f"is {version}", "it must be 1 or 2")
        version = 2
    found: dict[str, Any] = {}
    strategy, reshard = _sharding(section, key("sharding_strategy"), key("reshard_after_forward"), version)
    if version == 1:
        found["sharding_strategy"] = "_HYBRID_SHARD_ZERO2" if strategy == "HYBRID_SHARD_ZERO2" else strategy
        found["use_orig_params"] = section.flag(key("use_orig_params"), use_orig_params, words=True)
        found["forward_prefetch"] = section.flag(key("forward_prefetch"), False, words=True)
        found["backward_prefetch"] = section.choice(key("backward_prefetch"), PREFETCH, "NO_PREFETCH")
        found["limit_all_gathers"] = section.flag(key("limit_all_gathers"), True, words=True)
        engine = "fsdp1"
    else:
        engine = "fsdp2"
        for old in ("forward_prefetch", "backward_prefetch", "use_orig_params", "limit_all_gathers"):
            if section.has(key(old)):
                section.ignore(key(old))
                diagnostics.assume(f"{section.named(key(old))} does nothing with FSDP2")
        if not reshard:
            found["reshard_after_forward"] = False
    wrap = section.choice(key("auto_wrap_policy"), WRAPS, wrap)
    if wrap == "SIZE_BASED_WRAP":
        diagnostics.refuse(
            section.named(key("auto_wrap_policy")),
            "is SIZE_BASED_WRAP, whose units are not counted here",
            "use TRANSFORMER_BASED_WRAP",
        )
    elif wrap == "NO_WRAP" or version == 1:
        found["auto_wrap_policy"] = wrap
    else:
        # fsdp2_prepare_model wraps the embedding, and final norm with output layer, as separate units.
        found["auto_wrap_policy"] = "torchtitan"
    if section.flag(key("offload_params"), False, words=True) or section.flag(key("cpu_offload"), False, words=True):
        found["offload_params"] = True
    if mixed_precision is not None:
        found["param_dtype"] = found["reduce_dtype"] = mixed_precision
    if section.flag(key("activation_checkpointing"), False, words=True):
        # torch's checkpoint_wrapper, not reentrant, around every wrapped layer.
        settings.set(transformers__gradient_checkpointing=True, transformers__use_reentrant=False)
    if section.flag(key("activation_checkpointing_offload"), False, words=True):
        diagnostics.refuse(
            section.named(key("activation_checkpointing_offload")),
            "keeps the inputs of layers in host memory, which is not counted here",
            "set it to false",
        )
    for name in ("ignored_modules", "mixed_precision_policy"):
        if section.raw(key(name)) is not None:
            diagnostics.refuse(
                section.named(key(name)),
                f"is {show(section.data[key(name)])}, which is not counted here",
                "leave it out",
            )
    if section.flag(key("xla"), False) or section.flag(key("xla_fsdp_v2"), False):
        diagnostics.refuse(section.named(key("xla")), "runs on TPUs, which are not counted here", "drop it")
    section.ignore(key("xla_fsdp_grad_ckpt"), *(key(name) for name in HARMLESS))
    settings.set(data_parallel__engine=engine, **{f"fsdp__{name}": value for name, value in found.items()})


def _sharding(section: Section, strategy_key: str, reshard_key: str, version: int) -> tuple[str, bool]:
    """(sharding strategy, whether parameters are resharded after forward). FSDP1 reads sharding_strategy, or a strategy
    in reshard_after_forward; FSDP2 reads a bool in reshard_after_forward."""
    strategy = section.raw(strategy_key)
    reshard = section.raw(reshard_key)
    if version == 2:
        if isinstance(reshard, str) and reshard.lower() in ("true", "false"):
            reshard = reshard.lower() == "true"
        if reshard is not None and not isinstance(reshard, bool):
            section.problem(reshard_key, f"is {show(reshard)}", "with FSDP2 it must be true or false")
            reshard = None
        if strategy is not None:
            section.diagnostics.assume(f"{section.named(strategy_key)} does nothing with FSDP2 (reshard_after_forward)")
        return "FULL_SHARD", reshard is not False
    chosen, key = (strategy, strategy_key) if strategy is not None else (reshard, reshard_key)
    if strategy is None and str(reshard).lower() in ("true", "false"):
        chosen = None  # accelerate's launcher also passes the strategy, FULL_SHARD by default
    if chosen is None:
        return "FULL_SHARD", True
    if isinstance(chosen, str) and chosen.isdigit():
        chosen = int(chosen)
    if isinstance(chosen, int) and not isinstance(chosen, bool) and 1 <= chosen <= len(STRATEGIES):
        return STRATEGIES[chosen - 1], True
    if isinstance(chosen, str) and chosen.upper().removeprefix("_") in STRATEGIES:
        return chosen.upper().removeprefix("_"), True
    section.problem(key, f"is {show(chosen)}, which is unknown", f"use one of {', '.join(STRATEGIES)}")
    return "FULL_SHARD", True
