"""How the run of a row of throughput was set up beyond its sizes: by the row's own ``config``, or by the recipe of its
release. Either becomes fields of a RunSpec; a word that is none of them is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bridge_memory.cards.names import gpu_called
from bridge_memory.files import parse_json, read_text
from bridge_memory.readers.presets.common_names import preset_called
from bridge_memory.spec import SpecError, show

#: Recipes whose layout stands in Bridge's performance tables, by the releases (NeMo containers) that they are of.
#: ``scripts/maintain/performance_recipes.py`` writes those of an installed Bridge; ``source`` says where each block is
#: from. ``near``: releases whose own recipes are not at hand; a layout equal in all sizes stands for theirs.
_RECIPES = Path(__file__).with_name("recipes.json")

#: Names in ``config`` that are fields of a RunSpec under the same name, or under another.
_FIELDS = {
    name: name for name in (
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "delay_wgrad_compute",
        "deallocate_pipeline_outputs", "grad_reduce_in_fp32", "gradient_accumulation_fusion", "moe_grouped_gemm",
        "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap", "moe_token_dispatcher_type",
        "mtp_num_layers", "overlap_grad_reduce", "overlap_moe_expert_parallel_comm", "overlap_param_gather",
        "pipeline_model_parallel_layout", "tp_comm_overlap", "use_distributed_optimizer",
        "moe_flex_dispatcher_num_sms", "moe_flex_dispatcher_backend",
    )
} | {
    "recompute_granularity": "recompute.granularity", "recompute_method": "recompute.method",
    "recompute_num_layers": "recompute.num_layers", "recompute_modules": "recompute.modules",
    "pipeline_layout": "pipeline_model_parallel_layout", "bucket_size": "data_parallel.bucket_size",
    "optimizer_offload_fraction": "optimizer_offload_fraction",
    "fine_grained_activation_offloading": "offload_modules",
}  # fmt: skip
#: Fields that a run has by itself where a row says null; of others null is Megatron's default.
_NULL_IS_UNSTATED = ("moe_flex_dispatcher_backend", "recompute_modules", "mtp_num_layers")
#: Names that move neither memory nor any time that is modelled.
_NO_FIELD = frozenset((
    "alloc_conf", "batch_p2p_comm", "batch_p2p_sync", "cuda_device_max_connections", "data", "dispatcher_transport",
    "fp32_ssm_state", "grouped_gemm_host_sync", "host_bundle", "init", "manual_gc", "manual_gc_freeze",
    "mamba_chunk_size", "moe_experts_impl", "moe_permute_fusion_into_hybridep", "moe_router_force_load_balancing",
    "nccl", "note", "overlap_p2p_comm", "pipeline_split", "recompute_source", "timing_log_level",
))  # fmt: skip
#: A layout in Megatron's own words; beside them rows describe layouts in prose.
_LAYOUT = re.compile(r"[EtmL|()*\d]+$")

#: Precision as tables write it -> as recipes' names do. ``FP8`` of Bridge's tables is current scaling.
_PRECISIONS = (
    ("nvfp4", "nvfp4"), ("blockwise/mx", "fp8mx"), ("parenthesised", "fp8mx"), ("fp8-cs", "fp8cs"), ("mx", "fp8mx"),
    ("fp8", "fp8cs"), ("bf16", "bf16"),
)  # fmt: skip


class Settings(NamedTuple):
    """Fields of a RunSpec, and whose words they are."""

    fields: Mapping[str, Any]
    #: "its config", the recipe's source, or "" where neither is at hand.
    source: str
    #: The megatron-core of the recipe.
    core: tuple[int, int] | None = None


def precision_called(text: str) -> str:
    """``bf16``, ``fp8cs``, ``fp8mx`` or ``nvfp4``; "" for others."""
    plain = text.lower().replace("_", "-")
    return next((name for word, name in _PRECISIONS if word in plain), "")


def settings_of(row: Mapping[str, Any]) -> Settings:
    """What the row's ``config`` says, and where it has none the recipe of its release. Raises SpecError for a word of
    ``config`` that is not known."""
    config = row.get("config")
    if isinstance(config, Mapping):
        return Settings(_in_fields(config), "its config")
    recipe = recipe_of(row)
    if recipe is None:
        return Settings({}, "")
    major, minor = recipe["megatron_core"]
    return Settings(recipe["settings"], recipe["source"], (major, minor))


def recipe_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The recipe that a row of NVIDIA's names, or whose sizes are the row's; None where none is at hand."""
    if not str(row.get("framework")).startswith("megatron-bridge"):
        return None
    named = row.get("recipe")
    if named:
        return next((r for block in _blocks() for r in block["recipes"] if r.get("name") == named), None)
    # A table's release, or the revision of a page.
    ref = str(row.get("ref"))
    stated = re.search(r"\((\d\d\.\d\d(?:\.\d\d)?) NeMo Container\)", ref) or re.search(r"@([0-9a-f]{7,})", ref)
    if not stated:
        return None
    release = stated[1]
    wanted = same_layout(row)
    found: Mapping[str, Any] | None = None
    for block in _blocks():
        own = release in block["releases"]
        if own or release in block["near"]:
            same: dict[str, Any] | None = next((r for r in block["recipes"] if same_layout(r) == wanted), None)
            if same is not None and own:
                return same
            found = found or same
    # The dispatchers of 2025 were others.
    return None if found is not None and release.startswith("25") and found["ep"] > 1 else found


#: Sizes of a layout in a row, and what an absent one is.
_SIZES = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "mbs": None}


def same_layout(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row and its recipe share: model, GPUs, task, precision and sizes, but for the batch's."""
    model = str(row.get("model"))
    if "/" not in model:
        model = preset_called(model.partition(" (")[0]) or ""
    precision = precision_called(str(row.get("precision")))
    sizes = (row.get(name) or default for name, default in _SIZES.items())
    card = gpu_called(str(row.get("gpu")))
    return (model, card and card.name, row.get("gpus"), row.get("task"), precision, *sizes)


@cache
def _blocks() -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = parse_json(read_text(_RECIPES, "reinstall the package"))
    for block in blocks:
        for recipe in block["recipes"]:
            recipe |= {name: block[name] for name in ("source", "megatron_core")}
    return blocks


# ---- the words of ``config`` ----


def _in_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in _NO_FIELD:
            continue
        if name in _IN_WORDS:
            found.update(_IN_WORDS[name](value))
        elif name not in _FIELDS:
            raise SpecError(f"config.{show(name)} ({show(value)}) is not known here")
        elif value is None and name in _NULL_IS_UNSTATED:
            continue
        elif _FIELDS[name] == "pipeline_model_parallel_layout" and not _LAYOUT.match(str(value)):
            continue  # the same layout, described
        else:
            found[_FIELDS[name]] = tuple(value) if isinstance(value, list) else value
    return found


def _cross_entropy(value: object) -> dict[str, Any]:
    text = str(value)
    if text.startswith("te fused") or value is True:
        return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    if value is False:
        return {"cross_entropy_loss_fusion": False}
    if text.startswith("chunked linear"):
        return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    raise SpecError(f"config.cross_entropy ({show(value)}) is not known here")


def _optimizer(value: object) -> dict[str, Any]:
    text = str(value)
    aware = "precision-aware" in text.replace("not precision-aware", "")
    found: dict[str, Any] = {"use_precision_aware_optimizer": aware}
    if "bf16 moments" in text:
        found.update({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"})
    if "bf16 main grads" in text:
        found["main_grads_dtype"] = "bf16"
    return found


def _cuda_graph(value: object) -> dict[str, Any]:
    impl, _, modules = str(value).partition(" ")
    return {"cuda_graph_impl": impl, "cuda_graph_modules": tuple(re.findall(r"\w+", modules))}


def _fp8(value: object) -> dict[str, Any]:
    text = str(value)
    found: dict[str, Any] = {"fp8_param": "fp8_param True" in text}
    bf16 = re.search(r"first/last (\d+) layers BF16", text)
    if bf16:
        found.update({f"num_layers_at_{end}_in_bf16": int(bf16[1]) for end in ("start", "end")})
    return found


_IN_WORDS: dict[str, Callable[[object], dict[str, Any]]] = {
    "cross_entropy": _cross_entropy, "cross_entropy_loss_fusion": _cross_entropy, "optimizer": _optimizer,
    "cuda_graph": _cuda_graph, "fp8": _fp8,
}  # fmt: skip
