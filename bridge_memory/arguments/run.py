"""From the flags of a command line to a RunSpec.

A flag that was not given leaves the spec's default alone; what had to be supposed is said in the run's assumptions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.files import model_of_files, with_files
from bridge_memory.arguments.flags import (
    DEFAULT_LORA_DIM,
    DEFAULT_SEQ_LENGTH,
    FLAG_OF,
    MODEL_FLAGS,
    PACKAGES,
    SPECS,
    SWITCHES,
)
from bridge_memory.arguments.silent import check_silent, drop_idle
from bridge_memory.files import read_text
from bridge_memory.spec import LayerSpec, ModelSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.spec.errors import divide
from bridge_memory.spec.fields import MOST_GPUS, called
from bridge_memory.spec.parts import layers_by_default
from bridge_memory.spec.release import read_release
from bridge_memory.spec.run import GROUPS

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu


#: Megatron-LM's default of --make-vocab-size-divisible-by.
MEGATRON_PADDING = 128


def run_from_arguments(args: argparse.Namespace, *, gpu_arch: str | None = None) -> RunSpec:
    """The run that the flags describe. Raises SpecError.

    ``gpu_arch``: generation of the GPU that was named, for workspace sizes.
    """
    if args.container is not None or args.bridge_recipe is not None:
        return _run_from_container(args, gpu_arch)
    given: dict[str, dict[str, Any]] = {name: {} for name in SPECS}
    for key, value in vars(args).items():
        group, dot, name = key.partition(".")
        if dot and group in given:
            given[group][name] = value
    if args.model is None and args.custom_config is None and args.megatron_args is None:
        args.model = model_of_files(args)
    sources = [x for x in (args.model, args.custom_config) if x is not None]
    if len(sources) > 1 or not (sources or args.megatron_args is not None):
        raise SpecError(
            "give exactly one of MODEL and --custom-config, or --megatron-args"
            + ("" if sources else "; `bridge-memory models` lists the presets")
        )
    if args.megatron_args is not None:
        return _run_from_megatron(args, given, gpu_arch)
    assumptions: list[str] = []
    model = _model(args)
    of_files, not_modelled = with_files(args, given, model)
    assumptions += of_files
    if "seq_length" not in given["batch"]:
        # No longer than a table of learned positions.
        positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
        length = min(DEFAULT_SEQ_LENGTH, positions or DEFAULT_SEQ_LENGTH)
        given["batch"]["seq_length"] = length
        assumptions.append(f"seq_length {length} (--seq-length)")
    if "global_batch_size" not in given["batch"]:
        assumptions.append("enough microbatches to fill the pipeline (--global-batch-size)")
    given["implementation"].update(releases_given(args))
    _megatron_spellings(args, given, model)
    assumptions += drop_idle(given, model)
    check_silent(given, model)
    if given["peft"].get("dim") == 0:
        raise SpecError("peft.dim (0) leaves adapters without parameters; give it 1 or more, or drop --peft")
    if given["peft"].get("scheme") == "lora" and "dim" not in given["peft"]:
        given["peft"]["dim"] = DEFAULT_LORA_DIM
        assumptions.append(f"adapters of rank {DEFAULT_LORA_DIM} (--lora-dim)")
    _complete(given, assumptions)
    if gpu_arch:
        given["implementation"]["gpu_arch"] = gpu_arch
    if given["precision"].get("fp8") and "fp8_recipe" in given["precision"]:
        given["optimizer"].setdefault("fp8_recipe", given["precision"]["fp8_recipe"])
    parallel = _parallel(given["parallel"], assumptions)
    groups = {name: GROUPS[name](**fields) for name, fields in given.items() if name != "parallel"}
    return RunSpec(
        model=model, parallel=parallel, assumptions=tuple(assumptions), not_modelled=not_modelled, **groups
    )


def run_on_gpus(args: argparse.Namespace, gpus: Sequence[Gpu]) -> RunSpec:
    """The run that the flags describe, on these GPUs. Raises SpecError, also where one does not compute its precision.

    The generation of the first of NVIDIA's, Hopper where none is named (Blackwell for mxfp8), sizes library
    workspaces, chooses attention's kernel and lays out fp8; where others are named beside it, that is said. AMD's are
    estimated as if they were of it, which is said too.
    """
    from bridge_memory.spec.gpus import check_computes, gpu_assumptions

    first = next((gpu for gpu in gpus if gpu.arch is not None), None)
    spec = run_from_arguments(args, gpu_arch=first.arch if first else None)
    for gpu in gpus:
        check_computes(gpu, spec.precision)
        if gpu.arch is not None:  # It refuses what has no attention kernel there.
            replace(spec, implementation=replace(spec.implementation, gpu_arch=gpu.arch))
    if first is None and spec.precision.quantizes and spec.precision.recipe in ("mxfp8", "nvfp4"):
        spec = replace(spec, implementation=replace(spec.implementation, gpu_arch="blackwell"))
    supposed = [words for gpu in gpus for words in gpu_assumptions(gpu, spec)]
    if first is not None and len({gpu.arch for gpu in gpus if gpu.arch is not None}) > 1:
        supposed.append(
            f"stages and components with the library workspaces, attention kernels and fp8 layouts of {first.name}, "
            "the first --gpu; the peak on each card with its own"
        )
    elif not gpus:
        named = "a Blackwell GPU (--gpu), as mxfp8 needs" if spec.implementation.gpu_arch == "blackwell" else (
            "a Hopper GPU (--gpu)"
        )
        supposed.append(f"library workspaces as on {named}; the peak on each card with its own")
    return replace(spec, assumptions=(*spec.assumptions, *supposed))


def _run_from_megatron(
    args: argparse.Namespace, given: dict[str, dict[str, Any]], gpu_arch: str | None
) -> RunSpec:
    """Megatron-LM's own arguments say everything; beside them only the number of GPUs may be given, and a MODEL, which
    they then need not say."""
    import os

    from bridge_memory.readers.megatron_args import run_from_megatron_args
    from bridge_memory.readers.megatron_args.parsing import read_arguments

    extra = [called(SPECS[group], name) for group, values in given.items() for name in values if name != "world_size"]
    of_model = args.model is not None or args.custom_config is not None
    beside = {**({} if of_model else MODEL_FLAGS), **FLAG_OF, **{name: flag for flag, (name, _) in SWITCHES.items()}}
    extra += [flag for name, flag in beside.items() if getattr(args, name) is not None]
    if extra:
        raise SpecError(f"{extra[0]} belongs inside --megatron-args; beside it only MODEL and --num-gpus may stand")
    text = args.megatron_args
    if os.path.isfile(text):
        text = read_text(text, "give Megatron-LM's arguments to --megatron-args")
    world_size = given["parallel"].get("world_size")
    if world_size is None and read_arguments(text).world_size is None:
        raise SpecError("--megatron-args needs --num-gpus, the GPUs of the job, beside it, or torchrun's options in it")
    model = None
    if of_model:
        if args.make_vocab_size_divisible_by is None:  # Megatron-LM pads, whoever describes the model.
            said = str(read_arguments(text).values.get("make_vocab_size_divisible_by", ""))
            args.make_vocab_size_divisible_by = int(said) if said.isdecimal() else MEGATRON_PADDING
        model = _model(args)
    run = run_from_megatron_args(text, world_size=world_size, model=model, **releases_given(args))
    if gpu_arch:
        run = replace(run, implementation=replace(run.implementation, gpu_arch=gpu_arch))
    return run


def _model(args: argparse.Namespace) -> ModelSpec:
    from bridge_memory.readers import model_from_json_text, resolve_model

    options = {"mapping": args.mapping, "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by}
    if args.custom_config is not None:
        model = model_from_json_text(args.custom_config, **options)
    else:
        model = resolve_model(args.model, **options)
    changes: dict[str, Any] = {}
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(args, name)
        if value is not None:
            changes[name] = value
    if args.num_layers is not None:
        if not 1 <= args.num_layers <= model.num_layers:
            raise SpecError(f"num_layers ({args.num_layers}) must be between 1 and the model's {model.num_layers}")
        # megatron-core builds MTP depths from the last decoder layer's spec (gpt_layer_specs.py:
        # get_gpt_mtp_block_spec_for_backend), whichever layer that is now; a hybrid's pattern says what is in them.
        layers = model.layers[: args.num_layers]
        repeats = model.mtp_layer == model.layers[-1] and not model.hybrid
        model = replace(model, layers=layers, mtp_layer=layers[-1] if repeats else model.mtp_layer)
    if args.mtp_num_layers is not None:
        changes["mtp_num_layers"] = args.mtp_num_layers
        changes["mtp_layer"] = _mtp_layer(model, args.mtp_num_layers)
    return replace(model, **changes) if changes else model


def _mtp_layer(model: ModelSpec, depths: int) -> LayerSpec | None:
    if depths < 0:
        raise SpecError(f"mtp_num_layers ({depths}) must not be negative; 0 trains without MTP")
    if depths == 0:
        return None
    return model.mtp_layer or model.layers[-1]


def _megatron_spellings(args: argparse.Namespace, given: dict[str, dict[str, Any]], model: ModelSpec) -> None:
    """What Megatron-LM's arguments say of fields that they do not name (``validate_args``)."""
    parallel = given["parallel"]
    a_chunk, virtual = args.num_layers_per_virtual_pipeline_stage, "virtual_pipeline_model_parallel_size"
    if a_chunk is not None:
        flag = "--num-layers-per-virtual-pipeline-stage"
        if virtual in parallel or "pipeline_model_parallel_layout" in parallel:
            raise SpecError(f"{flag} says what --vpp or --pipeline-model-parallel-layout says too; drop one of them")
        if a_chunk < 1:
            raise SpecError(f"{flag} ({a_chunk}) is below 1; give 1 or more")
        slots = model.num_layers + sum(
            parallel.get(f"account_for_{end}_in_pipeline_split", False) for end in ("embedding", "loss")
        )
        pp = max(1, parallel.get("pipeline_model_parallel_size", 1))
        a_stage = divide(slots, pp, "num_layers", "--pp", "say the virtual stages with --vpp")
        size = divide(a_stage, a_chunk, "the layers of a pipeline stage", flag, "choose a divisor")
        if size > 1:
            parallel[virtual] = size
    if args.fine_grained_activation_offloading and not given["implementation"].get("offload_modules"):
        raise SpecError("--fine-grained-activation-offloading does nothing without --offload-modules; name the modules")


def _parallel(values: dict[str, Any], assumptions: list[str]) -> ParallelSpec:
    if "world_size" in values:
        return ParallelSpec(**values)
    sizes = ParallelSpec(**values)
    world = lcm(sizes.tp * sizes.pp * sizes.cp, sizes.etp * sizes.ep * sizes.pp)
    if world >= MOST_GPUS:
        return sizes  # The checks against the model name the size that is wrong.
    assumptions.append(f"{world} GPU{'s' * (world > 1)}, the fewest that the parallel sizes allow (--num-gpus)")
    return replace(sizes, world_size=world)


def _complete(given: dict[str, dict[str, Any]], assumptions: list[str]) -> None:
    """What Megatron concludes from a flag."""
    ddp, impl = given["data_parallel"], given["implementation"]
    if "transformer_impl" not in impl:
        fields, said = layers_by_default(ddp.get("engine"))
        impl.update(fields)
        assumptions.extend(said)
    if given["optimizer"].get("main_grads_dtype") == "bf16":  # Megatron-LM arguments.py: validate_args
        if ddp.get("grad_reduce_in_fp32"):
            raise SpecError("main_grads_dtype (bf16) does not go with grad_reduce_in_fp32 (True); drop one of them")
        ddp["grad_reduce_in_fp32"] = False
        assumptions.append("gradient buffers in bf16, as --main-grads-dtype bf16 asks for")
    if impl.get("deterministic_mode"):
        # TransformerConfig and Transformer Engine refuse one without NVTE_ALLOW_NONDETERMINISTIC_ALGO=0.
        impl["nvte_deterministic"] = True


def releases_given(args: argparse.Namespace) -> dict[str, Any]:
    """Field -> release, for the packages whose release was given. Raises SpecError."""
    fields = [flag.removeprefix("--").replace("-", "_") for flag in PACKAGES]
    return {name: read_release(text, name) for name in fields if (text := getattr(args, name)) is not None}


def _run_from_container(args: argparse.Namespace, gpu_arch: str | None) -> RunSpec:
    """A container says everything but how many GPUs there are."""
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.container_file import container_from_file, container_from_recipe
    from bridge_memory.spec.errors import bounded

    named = {
        "MODEL": args.model, "--custom-config": args.custom_config, "--megatron-args": args.megatron_args,
        "--bridge-recipe": args.bridge_recipe, "--container": args.container,
    }  # fmt: skip
    sources = [name for name, value in named.items() if value is not None]
    if len(sources) != 1:
        raise SpecError(f"{sources[-1]} says everything that {sources[0]} says; give one of them")
    given = [key.partition(".") for key in vars(args) if key.partition(".")[0] in SPECS and "." in key]
    extra = [called(SPECS[group], name) for group, _, name in given if name != "world_size"]
    extra += [flag for name, flag in MODEL_FLAGS.items() if getattr(args, name) is not None]
    if extra:
        raise SpecError(f"{extra[0]} is the container's; change it there: beside {sources[0]} only --num-gpus stands")
    if args.container is not None:
        config = container_from_file(args.container)
    else:
        config = container_from_recipe(args.bridge_recipe, gpu_arch)
    found: dict[str, Any] = {"gpu_arch": gpu_arch} if gpu_arch else {}
    return run_from_config_container(
        config, world_size=getattr(args, "parallel.world_size", None),
        name=args.bridge_recipe or bounded(args.container, 120), **releases_given(args), **found,
    )
