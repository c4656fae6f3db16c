"""The flags that describe a run, shared by every command that needs one, and their way into a RunSpec.

Short names (``--tp``) and Megatron's long ones (``--tensor-model-parallel-size``) mean the same. A flag that was not
given leaves the spec's default alone; what had to be supposed is said in the run's assumptions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.fields import MOST_GPUS
from bridge_memory.spec.gaps import idle_modules
from bridge_memory.spec.release import read_release

if TYPE_CHECKING:
    from bridge_memory.report.gpus import Gpu

DEFAULT_SEQ_LENGTH = 4096
_UNSET: Any = argparse.SUPPRESS


class Flag(NamedTuple):
    """One flag: its spellings, the group and field of the spec that it sets, and how its value is read."""

    names: str
    group: str
    field: str
    help: str
    kind: str = "int"  # int, float, str, list, switch (--x / --no-x)
    choices: tuple[str, ...] = ()
    metavar: str = "N"


_DTYPES = ("fp32", "fp16", "bf16", "fp8")
FLAGS = (
    # Parallelism
    Flag("--tp --tensor-model-parallel-size", "parallel", "tensor_model_parallel_size", "tensor parallel size"),
    Flag("--pp --pipeline-model-parallel-size", "parallel", "pipeline_model_parallel_size", "pipeline parallel size"),
    Flag(
        "--vpp --virtual-pipeline-model-parallel-size", "parallel", "virtual_pipeline_model_parallel_size",
        "virtual chunks a pipeline stage (interleaved schedule)",
    ),
    Flag("--cp --context-parallel-size", "parallel", "context_parallel_size", "context parallel size"),
    Flag("--ep --expert-model-parallel-size", "parallel", "expert_model_parallel_size", "expert parallel size"),
    Flag(
        "--etp --expert-tensor-parallel-size", "parallel", "expert_tensor_parallel_size",
        "tensor parallel size inside experts (default: --tp, as in Megatron)",
    ),
    Flag("--num-gpus --world-size", "parallel", "world_size", "GPUs of the job; the data parallel size follows"),
    Flag(
        "--sequence-parallel", "parallel", "sequence_parallel", "sequence parallelism (default: on when --tp > 1)",
        "switch",
    ),
    Flag(
        "--num-layers-in-first-pipeline-stage --decoder-first-pipeline-num-layers", "parallel",
        "num_layers_in_first_pipeline_stage", "layers on the first pipeline stage",
    ),
    Flag(
        "--num-layers-in-last-pipeline-stage --decoder-last-pipeline-num-layers", "parallel",
        "num_layers_in_last_pipeline_stage", "layers on the last pipeline stage",
    ),
    Flag(
        "--pipeline-model-parallel-layout", "parallel", "pipeline_model_parallel_layout",
        'Megatron\'s layout string, such as "Et*3|(tt|)*29,m|L"', "str", metavar="LAYOUT",
    ),
    Flag(
        "--account-for-embedding-in-pipeline-split", "parallel", "account_for_embedding_in_pipeline_split",
        "count the embedding as a layer when splitting", "switch",
    ),
    Flag(
        "--account-for-loss-in-pipeline-split", "parallel", "account_for_loss_in_pipeline_split",
        "count the loss as a layer when splitting", "switch",
    ),
    Flag(
        "--microbatch-group-size-per-vp-stage", "parallel", "microbatch_group_size_per_vp_stage",
        "microbatches a virtual stage runs in a row (default: --pp)",
    ),
    Flag(
        "--num-distributed-optimizer-instances", "parallel", "num_distributed_optimizer_instances",
        "copies of the sharded optimizer over data-parallel ranks",
    ),
    # Batch
    Flag("--micro-batch-size", "batch", "micro_batch_size", "sequences a microbatch"),
    Flag("--global-batch-size", "batch", "global_batch_size", "sequences a step, over the whole job"),
    Flag("--seq-length", "batch", "seq_length", f"tokens a sequence (default: {DEFAULT_SEQ_LENGTH})"),
    # Precision
    Flag("--precision", "precision", "params_dtype", "dtype of parameters and activations", "str",
         ("bf16", "fp16", "fp32"), "DTYPE"),
    Flag("--fp8 --fp8-format", "precision", "fp8", "compute linears in fp8", "str", ("hybrid", "e4m3"), "FORMAT"),
    Flag("--fp8-recipe", "precision", "fp8_recipe", "scaling recipe of fp8", "str",
         ("delayed", "tensorwise", "blockwise", "mxfp8"), "RECIPE"),
    Flag("--fp8-param-gather --fp8-param", "precision", "fp8_param", "keep parameters in fp8", "switch"),
    Flag("--fp32-residual-connection", "precision", "fp32_residual_connection", "residual stream in fp32", "switch"),
    # Optimizer
    Flag("--optimizer", "optimizer", "optimizer", "optimizer", "str", ("adam", "sgd", "muon"), "NAME"),
    Flag("--use-distributed-optimizer", "data_parallel", "use_distributed_optimizer",
         "shard the optimizer over data-parallel ranks (default: on)", "switch"),
    Flag("--grad-reduce-in-fp32 --accumulate-allreduce-grads-in-fp32", "data_parallel", "grad_reduce_in_fp32",
         "fp32 gradient buffers (default: on)", "switch"),
    Flag("--overlap-grad-reduce", "data_parallel", "overlap_grad_reduce", "reduce gradients in buckets", "switch"),
    Flag("--overlap-param-gather", "data_parallel", "overlap_param_gather", "gather parameters in buckets", "switch"),
    Flag("--ddp-bucket-size", "data_parallel", "bucket_size", "elements of a gradient bucket"),
    Flag("--use-precision-aware-optimizer", "optimizer", "use_precision_aware_optimizer",
         "optimizer states in the dtypes below", "switch"),
    Flag("--main-grads-dtype", "optimizer", "main_grads_dtype",
         "dtype of main gradients (bf16: gradient buffers too)", "str", ("fp32", "bf16"), "DTYPE"),
    Flag("--main-params-dtype", "optimizer", "main_params_dtype", "dtype of main parameters", "str", ("fp32", "fp16"),
         "DTYPE"),
    Flag("--exp-avg-dtype", "optimizer", "exp_avg_dtype", "dtype of Adam's first moment", "str", _DTYPES, "DTYPE"),
    Flag("--exp-avg-sq-dtype", "optimizer", "exp_avg_sq_dtype", "dtype of the second moment", "str", _DTYPES, "DTYPE"),
    Flag("--store-param-remainders", "optimizer", "store_param_remainders",
         "keep only the lower half of fp32 main parameters beside bf16 weights (default: on)", "switch"),
    Flag("--optimizer-cpu-offload", "optimizer", "optimizer_cpu_offload", "optimizer states in host memory", "switch"),
    Flag("--optimizer-offload-fraction", "optimizer", "optimizer_offload_fraction", "how much of them", "float",
         metavar="FRACTION"),
    # Recomputation
    Flag("--recompute-granularity", "recompute", "granularity", "recompute whole layers or selected modules", "str",
         ("full", "selective"), "WHAT"),
    Flag("--recompute-method", "recompute", "method", "how full recomputation picks layers", "str",
         ("uniform", "block"), "HOW"),
    Flag("--recompute-num-layers", "recompute", "num_layers", "layers a group (uniform) or a chunk (block)"),
    Flag("--recompute-modules", "recompute", "modules",
         "modules that selective recomputation covers, such as core_attn,moe_act,layernorm", "list", metavar="A,B"),
    Flag("--distribute-saved-activations", "recompute", "distribute_saved_activations",
         "shard kept layer inputs over TP", "switch"),
    # Implementation
    Flag("--transformer-impl", "implementation", "transformer_impl", "which modules run", "str",
         ("transformer_engine", "local"), "IMPL"),
    Flag("--attention-backend", "implementation", "attention_backend", "attention kernels", "str",
         ("auto", "flash", "fused", "unfused", "local"), "BACKEND"),
    Flag("--cp-comm-type", "implementation", "cp_comm_type", "how context parallelism exchanges", "str",
         ("p2p", "a2a", "all_gather", "a2a+p2p"), "TYPE"),
    Flag("--cross-entropy-loss-fusion", "implementation", "cross_entropy_loss_fusion", "fused cross entropy",
         "switch"),
    Flag("--cross-entropy-fusion-impl", "implementation", "cross_entropy_fusion_impl", "which fused cross entropy",
         "str", ("native", "te", "linear"), "IMPL"),
    Flag("--gradient-accumulation-fusion", "implementation", "gradient_accumulation_fusion",
         "weight gradients straight into main gradients (default: on)", "switch"),
    Flag("--bias-activation-fusion", "implementation", "bias_activation_fusion", "fused activation (default: on)",
         "switch"),
    Flag("--bias-dropout-fusion", "implementation", "bias_dropout_fusion", "fused bias-dropout-add (default: on)",
         "switch"),
    Flag("--masked-softmax-fusion", "implementation", "masked_softmax_fusion", "fused softmax (default: on)",
         "switch"),
    Flag("--apply-rope-fusion", "implementation", "apply_rope_fusion", "fused rotary embedding (default: on)",
         "switch"),
    Flag("--calculate-per-token-loss", "implementation", "calculate_per_token_loss", "loss a token", "switch"),
    Flag("--deterministic-mode", "implementation", "deterministic_mode", "deterministic kernels", "switch"),
    Flag("--moe-imbalance", "implementation", "moe_imbalance",
         "tokens of the most loaded rank over the balanced number (default: 1, balanced)", "float", metavar="FACTOR"),
    Flag("--moe-token-dispatcher-type", "implementation", "moe_token_dispatcher_type", "token dispatcher", "str",
         ("alltoall", "allgather", "flex"), "TYPE"),
    Flag("--moe-grouped-gemm", "implementation", "moe_grouped_gemm", "grouped GEMM in experts (default: on)", "switch"),
    Flag("--moe-permute-fusion", "implementation", "moe_permute_fusion", "fused token permutation", "switch"),
    Flag("--moe-router-fusion", "implementation", "moe_router_fusion", "fused router", "switch"),
    Flag("--moe-router-dtype", "implementation", "moe_router_dtype", "dtype of routing", "str", ("fp32", "fp64"),
         "DTYPE"),
    Flag("--moe-expert-capacity-factor", "implementation", "moe_expert_capacity_factor",
         "token capacity of an expert", "float", metavar="FACTOR"),
    Flag("--moe-pad-expert-input-to-capacity", "implementation", "moe_pad_expert_input_to_capacity",
         "pad experts' tokens to capacity", "switch"),
    Flag("--moe-shared-expert-overlap", "implementation", "moe_shared_expert_overlap",
         "overlap shared experts with dispatch", "switch"),
    Flag("--overlap-moe-expert-parallel-comm", "implementation", "overlap_moe_expert_parallel_comm",
         "overlap expert communication over microbatches", "switch"),
    Flag("--cpu-offloading-num-layers", "implementation", "cpu_offloading_num_layers",
         "layers whose activations go to host memory"),
    Flag("--offload-modules", "implementation", "offload_modules",
         "modules whose saved tensors go to host memory (fine-grained offloading)", "list", metavar="A,B"),
)
_SPECS = {
    "parallel": ParallelSpec, "batch": BatchSpec, "precision": PrecisionSpec, "optimizer": OptimizerSpec,
    "data_parallel": DataParallelSpec, "recompute": RecomputeSpec, "implementation": ImplementationSpec,
}
_TITLES = {
    "parallel": "parallelism", "batch": "batch", "precision": "precision", "optimizer": "optimizer",
    "data_parallel": "gradients and data parallelism",
    "recompute": "activation recomputation", "implementation": "implementation",
}


#: The flag of each package whose releases have rules -> the package's name. Its field is argparse's.
PACKAGES = {"--megatron-core": "megatron-core", "--transformer-engine": "Transformer Engine", "--torch": "PyTorch"}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare MODEL and every flag of a run on ``parser``."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a preset (org/name or name), a config.json or its folder, or a Hugging Face Hub id",
    )
    model.add_argument("--custom-config", metavar="JSON", help="the config itself, as JSON text, in place of MODEL")
    model.add_argument(
        "--megatron-args", metavar="ARGS",
        help="Megatron-LM's arguments in place of MODEL: the text, or a file (launch script or YAML)",
    )
    model.add_argument(
        "--mapping", choices=("builtin", "mbridge"), default="builtin",
        help="who reads the config: this package, or mbridge where it is installed",
    )
    model.add_argument("--mtp-num-layers", type=_integer, metavar="N", help="MTP depths; 0 trains without")
    model.add_argument("--num-layers", type=_integer, metavar="N", help="train only the first N decoder layers")
    model.add_argument("--make-vocab-size-divisible-by", type=_integer, metavar="N",
                       help="pad the vocabulary to a multiple of N x TP, as Megatron-LM does with 128")
    model.add_argument("--hidden-dropout", type=_number, metavar="P", help="dropout of the residual stream")
    model.add_argument("--attention-dropout", type=_number, metavar="P", help="dropout of attention probabilities")
    for package, name in PACKAGES.items():
        model.add_argument(package, metavar="X.Y", help=f"{name} release whose rules apply")
    groups = {name: parser.add_argument_group(title) for name, title in _TITLES.items()}
    for flag in FLAGS:
        _add(groups[flag.group], flag)


def _add(group: Any, flag: Flag) -> None:
    dest = f"{flag.group}.{flag.field}"
    if flag.kind == "switch":
        group.add_argument(*flag.names.split(), dest=dest, default=_UNSET, help=flag.help,
                           action=argparse.BooleanOptionalAction)
        return
    read = {"int": _integer, "float": _number, "str": str, "list": _names}[flag.kind]
    group.add_argument(*flag.names.split(), dest=dest, default=_UNSET, type=read, help=flag.help,
                       choices=flag.choices or None, metavar="|".join(flag.choices) or flag.metavar)


def _integer(text: str) -> int:
    # int() also reads "1_6" and the digits of other scripts; on a command line those are typing errors.
    try:
        if not text.removeprefix("-").isdecimal() or not text.isascii():
            raise ValueError
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _number(text: str) -> float:
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.replace(",", " ").split() if name)


def run_from_arguments(args: argparse.Namespace, *, gpu_arch: str | None = None) -> RunSpec:
    """The run that the flags describe. Raises SpecError.

    ``gpu_arch``: generation of the GPU that was named, for workspace sizes.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in _SPECS}
    for key, value in vars(args).items():
        group, dot, name = key.partition(".")
        if dot and group in given:
            given[group][name] = value
    sources = [x for x in (args.model, args.custom_config, args.megatron_args) if x is not None]
    if len(sources) != 1:
        raise SpecError(
            "model: give exactly one of MODEL, --custom-config and --megatron-args"
            + ("" if sources else "; `bridge-memory models` lists the presets")
        )
    if args.megatron_args is not None:
        return _run_from_megatron(args, given, gpu_arch)
    assumptions: list[str] = []
    model = _model(args)
    parallel = _parallel(given["parallel"], assumptions)
    if "seq_length" not in given["batch"]:
        given["batch"]["seq_length"] = DEFAULT_SEQ_LENGTH
        assumptions.append(f"seq_length {DEFAULT_SEQ_LENGTH} (--seq-length)")
    if "global_batch_size" not in given["batch"]:
        assumptions.append("enough microbatches to fill the pipeline (--global-batch-size)")
    given["implementation"].update(_releases(args))
    _check_silent(given, model)
    _complete(given, assumptions)
    if gpu_arch:
        given["implementation"]["gpu_arch"] = gpu_arch
    if given["precision"].get("fp8") and "fp8_recipe" in given["precision"]:
        given["optimizer"].setdefault("fp8_recipe", given["precision"]["fp8_recipe"])
    groups = {name: spec(**given[name]) for name, spec in _SPECS.items() if name != "parallel"}
    return RunSpec(model=model, parallel=parallel, assumptions=tuple(assumptions), **groups)


def run_on_gpus(args: argparse.Namespace, gpus: Sequence[Gpu]) -> RunSpec:
    """The run that the flags describe, on these GPUs. Raises SpecError, also where one does not compute its precision.

    The generation of the first of NVIDIA's, Hopper where none is named (Blackwell for mxfp8), sizes library
    workspaces, chooses attention's kernel and lays out fp8; it is an assumption unless all named GPUs are of it. AMD's
    are estimated as if they were of it, which is said.
    """
    from bridge_memory.report.gpus import check_computes, supposed_on

    first = next((gpu for gpu in gpus if gpu.arch is not None), None)
    spec = run_from_arguments(args, gpu_arch=first.arch if first else None)
    for gpu in gpus:
        check_computes(gpu, spec.precision)
    if first is None and spec.precision.fp8 and spec.precision.fp8_recipe == "mxfp8":
        spec = replace(spec, implementation=replace(spec.implementation, gpu_arch="blackwell"))
    supposed = [words for gpu in gpus for words in supposed_on(gpu, spec)]
    if first is not None and len({gpu.arch for gpu in gpus if gpu.arch is not None}) > 1:
        supposed.append(f"library workspaces, attention kernels and fp8 layouts as on {first.name}, the first --gpu")
    elif not gpus:
        named = "a Blackwell GPU (--gpu), as mxfp8 needs" if spec.implementation.gpu_arch == "blackwell" else (
            "a Hopper GPU (--gpu)"
        )
        supposed.append(f"library workspaces as on {named}")
    return replace(spec, assumptions=(*spec.assumptions, *supposed))


def _run_from_megatron(
    args: argparse.Namespace, given: dict[str, dict[str, Any]], gpu_arch: str | None
) -> RunSpec:
    """Megatron-LM's own arguments say everything; beside them only the number of GPUs may be given."""
    import os

    from bridge_memory.readers.megatron_args import run_from_megatron_args

    extra = [f"{group}.{name}" for group, values in given.items() for name in values if name != "world_size"]
    extra += [name for name in ("hidden_dropout", "attention_dropout", "mtp_num_layers", "num_layers",
                                "make_vocab_size_divisible_by") if getattr(args, name) is not None]
    if extra:
        field = extra[0].split(".")[-1]
        raise SpecError(f"{field} belongs inside --megatron-args; beside it only --num-gpus may stand")
    text = args.megatron_args
    if os.path.isfile(text):
        try:
            with open(text, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"--megatron-args {args.megatron_args}: {error}") from None
    if "world_size" not in given["parallel"]:
        raise SpecError("world_size: --megatron-args needs --num-gpus (the GPUs of the job)")
    run = run_from_megatron_args(
        text, world_size=given["parallel"]["world_size"], **_releases(args)
    )
    if gpu_arch:
        run = replace(run, implementation=replace(run.implementation, gpu_arch=gpu_arch))
    return run


def _model(args: argparse.Namespace) -> ModelSpec:
    from bridge_memory.readers import model_from_json_text, resolve_model

    if args.custom_config is not None:
        model = model_from_json_text(args.custom_config, mapping=args.mapping)
    else:
        model = resolve_model(args.model, mapping=args.mapping)
    changes: dict[str, Any] = {}
    for name in ("hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by"):
        value = getattr(args, name)
        if value is not None:
            changes[name] = value
    if args.make_vocab_size_divisible_by is not None:
        changes["assumptions"] = tuple(a for a in model.assumptions if "ocabulary" not in a)
    if args.num_layers is not None:
        if not 1 <= args.num_layers <= model.num_layers:
            raise SpecError(f"num_layers ({args.num_layers}) must be between 1 and the model's {model.num_layers}")
        changes["layers"] = model.layers[: args.num_layers]
    if args.mtp_num_layers is not None:
        changes["mtp_num_layers"] = args.mtp_num_layers
        changes["mtp_layer"] = _mtp_layer(model, args.mtp_num_layers)
    return replace(model, **changes) if changes else model


def _mtp_layer(model: ModelSpec, depths: int) -> LayerSpec | None:
    if depths < 0:
        raise SpecError(f"mtp_num_layers ({depths}) must not be negative; 0 trains without MTP")
    if depths == 0:
        return None
    # megatron-core builds MTP depths from the last decoder layer's spec (gpt_layer_specs.py: get_gpt_mtp_block_spec).
    return model.mtp_layer or model.layers[-1]


def _parallel(values: dict[str, Any], assumptions: list[str]) -> ParallelSpec:
    if "world_size" in values:
        return ParallelSpec(**values)
    sizes = ParallelSpec(**values)
    world = lcm(sizes.tp * sizes.pp * sizes.cp, sizes.etp * sizes.ep * sizes.pp)
    if world >= MOST_GPUS:
        return sizes  # The checks against the model name the size that is wrong.
    assumptions.append(f"{world} GPUs, the fewest that the parallel sizes allow (--num-gpus)")
    return replace(sizes, world_size=world)


#: Flags that are taken because they belong to a run, and of which nothing in memory depends.
_NO_TENSOR = (("data_parallel", "overlap_param_gather"), ("implementation", "calculate_per_token_loss"))


def _complete(given: dict[str, dict[str, Any]], assumptions: list[str]) -> None:
    """What Megatron concludes from a flag, and what it does not do to memory."""
    ddp, impl = given["data_parallel"], given["implementation"]
    if given["optimizer"].get("main_grads_dtype") == "bf16":  # Megatron-LM arguments.py: validate_args
        if ddp.get("grad_reduce_in_fp32"):
            raise SpecError("main_grads_dtype (bf16) does not go with grad_reduce_in_fp32 (True); drop one of them")
        ddp["grad_reduce_in_fp32"] = False
        assumptions.append("gradient buffers in bf16, as --main-grads-dtype bf16 asks for")
    if impl.get("deterministic_mode"):
        # TransformerConfig and Transformer Engine refuse one without NVTE_ALLOW_NONDETERMINISTIC_ALGO=0.
        impl["nvte_deterministic"] = True
    for group, name in _NO_TENSOR:
        if given[group].get(name):
            assumptions.append(f"{name} makes no tensor that stays")


def _check_silent(given: dict[str, dict[str, Any]], model: ModelSpec) -> None:
    """A flag that would do nothing is a mistake, and is named."""
    precision, recompute, impl = given["precision"], given["recompute"], given["implementation"]
    optimizer, parallel = given["optimizer"], given["parallel"]
    needs = [
        ("fp8_recipe", "fp8_recipe" in precision, "fp8" in precision, "--fp8"),
        ("fp8_param", precision.get("fp8_param", False), "fp8" in precision, "--fp8"),
        ("recompute_method", "method" in recompute, recompute.get("granularity") == "full",
         "--recompute-granularity full"),
        ("recompute_num_layers", "num_layers" in recompute, recompute.get("granularity") == "full",
         "--recompute-granularity full"),
        ("recompute_modules", "modules" in recompute, recompute.get("granularity") == "selective",
         "--recompute-granularity selective"),
        ("cross_entropy_fusion_impl", "cross_entropy_fusion_impl" in impl,
         impl.get("cross_entropy_loss_fusion", False), "--cross-entropy-loss-fusion"),
        ("optimizer_offload_fraction", "optimizer_offload_fraction" in optimizer,
         optimizer.get("optimizer_cpu_offload", False), "--optimizer-cpu-offload"),
        ("moe_pad_expert_input_to_capacity", impl.get("moe_pad_expert_input_to_capacity", False),
         "moe_expert_capacity_factor" in impl, "--moe-expert-capacity-factor"),
        ("ddp_bucket_size", "bucket_size" in given["data_parallel"],
         given["data_parallel"].get("overlap_grad_reduce", False),
         "--overlap-grad-reduce"),
        ("store_param_remainders", "store_param_remainders" in optimizer,
         optimizer.get("use_precision_aware_optimizer", False), "--use-precision-aware-optimizer"),
        ("distribute_saved_activations", recompute.get("distribute_saved_activations", False),
         recompute.get("granularity") == "full", "--recompute-granularity full"),
        ("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_vp_stage" in parallel,
         "virtual_pipeline_model_parallel_size" in parallel or "pipeline_model_parallel_layout" in parallel, "--vpp"),
    ]
    needs += [
        (name, parallel.get(name, False) is not False, parallel.get("pipeline_model_parallel_size", 1) != 1,
         "--pp of 2 or more")
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
                     "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    ]
    needs += [
        (name, name in optimizer, optimizer.get("use_precision_aware_optimizer", False),
         "--use-precision-aware-optimizer")
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ]
    needs += [
        (name, impl.get(name, False) is not False, model.has_experts, "a model with experts")
        for name in impl if name.startswith("moe_")
    ]
    needs.append(("expert_tensor_parallel_size", "expert_tensor_parallel_size" in parallel, model.has_experts,
                  "a model with experts"))
    local = impl.get("transformer_impl") == "local"
    unfused = local or impl.get("attention_backend") in ("unfused", "local")
    unfused = unfused or given["precision"].get("params_dtype") == "fp32"
    shared = any(
        isinstance(layer.ffn, MoESpec) and layer.ffn.shared_expert_intermediate_size for layer in model.layers
    )
    needs += [
        ("fp8", "fp8" in precision, not local, "--transformer-impl transformer_engine"),
        ("transformer_engine", "transformer_engine" in impl, not local, "--transformer-impl transformer_engine"),
        ("attention_backend", impl.get("attention_backend") in ("flash", "fused"), not local,
         "--transformer-impl transformer_engine"),
        ("masked_softmax_fusion", "masked_softmax_fusion" in impl, unfused,
         "--attention-backend unfused or --transformer-impl local"),
        ("cp_comm_type", "cp_comm_type" in impl, parallel.get("context_parallel_size", 1) != 1, "--cp of 2 or more"),
        ("moe_shared_expert_overlap", impl.get("moe_shared_expert_overlap", False), shared,
         "a model with shared experts"),
    ]
    needs += [
        (name, name in optimizer, not optimizer.get("optimizer_cpu_offload", False),
         "--no-optimizer-cpu-offload: the offloaded optimizer keeps fp32 states")
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")
    ]
    needs += [
        (f"recompute_modules ({name})", name in recompute.get("modules", ()), False, want)
        for name, want in idle_modules(model, not local).items()
    ]
    for field, used, present, what in needs:
        if used and not present:
            raise SpecError(f"{field} does nothing without {what}; add it or drop the flag")
    imbalance, ranks = impl.get("moe_imbalance", 1.0), parallel.get("expert_model_parallel_size", 1)
    if imbalance > max(1, ranks):
        raise SpecError(
            f"moe_imbalance ({imbalance:g}) is more than expert_model_parallel_size ({ranks}), that of one rank with "
            "every token; lower it"
        )


def _releases(args: argparse.Namespace) -> dict[str, Any]:
    """Field -> release, for the packages whose release was given. Raises SpecError."""
    fields = [flag.removeprefix("--").replace("-", "_") for flag in PACKAGES]
    return {name: read_release(text, name) for name in fields if (text := getattr(args, name)) is not None}
