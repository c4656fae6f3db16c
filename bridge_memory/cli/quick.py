"""``bridge-memory quick 7 --gpus 8 --engine deepspeed``: from parameters in billions to a table."""

from __future__ import annotations

import argparse
from typing import Any

from bridge_memory.arguments.flags import integer, number
from bridge_memory.cli.calculate import add_output
from bridge_memory.cli.calculate import show as printed
from bridge_memory.spec import SpecError, show

#: argparse's name -> (table, key) of the form.
_KEYS = {
    "engine": ("engine", "type"), "zero_stage": ("engine", "zero_stage"), "gpus": ("hardware", "num_gpus"),
    "gpu_mem": ("hardware", "gpu_memory_gb"), "batch_size": ("training", "batch_size"),
    "seq_length": ("model", "max_seq_len"), "dtype": ("training", "dtype"),
    "optimizer": ("training", "optimizer"), "activation_checkpointing": ("training", "activation_checkpointing"),
    "offload_optimizer": ("engine", "offload_optimizer"), "offload_param": ("engine", "offload_param"),
    "sharding_strategy": ("engine", "sharding_strategy"), "tp": ("parallelism", "tensor_parallel_size"),
    "pp": ("parallelism", "pipeline_parallel_size"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("size", metavar="SIZE", nargs="?",
                        help='parameters in billions (7, 0.5), "7B", "350M", or a preset')
    group = parser.add_argument_group("run")
    group.add_argument("--gpus", type=integer, metavar="N", default=1, help="GPUs of the job (1)")
    group.add_argument("--gpu-mem", type=number, metavar="GB", default=80, help="memory of each (80)")
    group.add_argument("--engine", metavar="ENGINE", default="pytorch_ddp",
                       help="pytorch_ddp (default), deepspeed, fsdp, megatron_lm or megatron_deepspeed")
    group.add_argument("--zero-stage", type=integer, metavar="0..3", help="DeepSpeed's stage (2)")
    group.add_argument("--batch-size", type=integer, metavar="N", default=1, help="sequences a GPU (1)")
    group.add_argument("--seq-length", type=integer, metavar="N", default=2048, help="tokens a sequence (2048)")
    group.add_argument("--dtype", metavar="DTYPE", default="bf16", help="bf16 (default), fp16 or fp32")
    group.add_argument("--optimizer", metavar="NAME", default="adamw", help="adamw (default), adam, sgd or adamw_8bit")
    group.add_argument("--activation-checkpointing", type=integer, metavar="0..4", default=0,
                       help="0 (default): none; 4: every layer")
    group.add_argument("--offload-optimizer", metavar="DEVICE", help="none, cpu or nvme (DeepSpeed)")
    group.add_argument("--offload-param", metavar="DEVICE", help="none, cpu or nvme (DeepSpeed, stage 3)")
    group.add_argument("--sharding-strategy", metavar="NAME", help="no_shard, shard_grad_op or full_shard (FSDP)")
    group.add_argument("--tp", type=integer, metavar="N", help="tensor parallel size (Megatron)")
    group.add_argument("--pp", type=integer, metavar="N", help="pipeline parallel size (Megatron)")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Estimate and print. Returns the exit code."""
    from bridge_memory.calculator import GPUMemoryCalculator

    if args.size is None:
        raise SpecError("SIZE is missing; give parameters in billions, such as 7")
    form: dict[str, Any] = {"model": _model(args.size)}
    for name, (table, key) in _KEYS.items():
        value = getattr(args, name)
        if value is not None:
            form.setdefault(table, {})[key] = value
    try:
        calculator = GPUMemoryCalculator.from_dict(form, "quick")
    except SpecError as error:
        raise SpecError(_in_flags(str(error))) from None
    return printed(calculator, args)


def _in_flags(message: str) -> str:
    """A refusal of the form, in the words that were typed."""
    message = message.removeprefix("quick: ")
    for name, (table, key) in _KEYS.items():
        message = message.replace(f"{table}.{key}", "--" + name.replace("_", "-"))
    if message.startswith("num_parameters"):
        message = message.replace("num_parameters", "SIZE", 1)
    return message


def _model(size: str) -> dict[str, Any]:
    """7 is 7 billion, 7e9 and what has a letter say themselves; anything else is a model's name."""
    from bridge_memory.calculator.form import COUNT, parameter_count

    number = _plain_number(size)
    if number is not None or COUNT.fullmatch(size):
        try:
            return {"num_parameters": parameter_count(size if number is None else _parameters(number))}
        except SpecError as error:
            raise SpecError(str(error).replace("num_parameters", "SIZE", 1)) from None
    from bridge_memory.readers.presets import find_presets

    if "/" not in size and not find_presets(size):
        raise SpecError(
            f"SIZE ({show(size)}) is neither parameters, such as 7 or 350M, nor a preset; `bridge-memory models` lists "
            "those"
        )
    return {"name": size}


def _plain_number(size: str) -> float | None:
    try:
        return float(size)
    except ValueError:
        return None


def _parameters(number: float) -> float:
    """Billions up to 100,000, parameters beyond."""
    return number * 1e9 if number < 1e5 else number
