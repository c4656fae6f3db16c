"""``bridge-memory quick 7 --gpus 8 --engine deepspeed``: from parameters in billions to a table."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.arguments.flags import integer, number
from bridge_memory.cli.calculate import add_output
from bridge_memory.cli.calculate import show as printed
from bridge_memory.spec import SpecError, show

if TYPE_CHECKING:
    from bridge_memory.calculator import GPUMemoryCalculator
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.verdict import Fit

#: argparse's name -> (table, key) of the form.
_KEYS = {
    "engine": ("engine", "type"), "zero_stage": ("engine", "zero_stage"), "gpus": ("hardware", "num_gpus"),
    "gpu_mem": ("hardware", "gpu_memory_gb"), "batch_size": ("training", "batch_size"),
    "seq_length": ("model", "max_seq_len"), "dtype": ("training", "dtype"),
    "optimizer": ("training", "optimizer"), "activation_checkpointing": ("training", "activation_checkpointing"),
    "offload_optimizer": ("engine", "offload_optimizer"), "offload_param": ("engine", "offload_param"),
    "sharding_strategy": ("engine", "sharding_strategy"), "tp": ("parallelism", "tensor_parallel_size"),
    "pp": ("parallelism", "pipeline_parallel_size"), "sequence_parallel": ("parallelism", "sequence_parallel"),
    "gradient_accumulation_steps": ("training", "gradient_accumulation_steps"),
}  # fmt: skip
#: Tensor parallel sizes that are tried where a run does not fit: within the GPUs of a node.
_TENSOR = (1, 2, 4, 8)
#: Most layouts whose verdict is asked for.
_MOST = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("size", metavar="SIZE", nargs="?",
                        help='parameters in billions (7, 0.5), "7B", "350M", or a preset')
    group = parser.add_argument_group("run")
    group.add_argument("--gpus", type=integer, metavar="N", default=1, help="GPUs of the job (1)")
    group.add_argument("--gpu-mem", type=number, metavar="GB", default=80, help="memory per GPU (80)")
    group.add_argument("--engine", metavar="ENGINE", default="pytorch_ddp",
                       help="pytorch_ddp (default), deepspeed, fsdp, megatron_lm or megatron_deepspeed")
    group.add_argument("--zero-stage", type=integer, metavar="0..3", help="DeepSpeed's stage (2)")
    group.add_argument("--batch-size", type=integer, metavar="N", default=1, help="sequences per GPU (1)")
    group.add_argument("--seq-length", type=integer, metavar="N", default=2048, help="tokens per sequence (2048)")
    group.add_argument("--dtype", metavar="DTYPE", default="bf16", help="bf16 (default), fp16 or fp32")
    group.add_argument("--optimizer", metavar="NAME", default="adamw", help="adamw (default), adam, sgd or adamw_8bit")
    group.add_argument("--activation-checkpointing", type=integer, metavar="0..4", default=0,
                       help="0 (default): none; 4: every layer; between, that share of a stage's layers (Megatron)")
    group.add_argument("--offload-optimizer", metavar="DEVICE", help="none, cpu or nvme (DeepSpeed)")
    group.add_argument("--offload-param", metavar="DEVICE", help="none, cpu or nvme (DeepSpeed, stage 3)")
    group.add_argument("--sharding-strategy", metavar="NAME", help="no_shard, shard_grad_op or full_shard (FSDP)")
    group.add_argument("--tp", type=integer, metavar="N", help="tensor parallel size (Megatron)")
    group.add_argument("--pp", type=integer, metavar="N", help="pipeline parallel size (Megatron)")
    group.add_argument("--sequence-parallel", action="store_true", default=None,
                       help="split norms and dropout over the tensor parallel ranks (Megatron)")
    group.add_argument("--gradient-accumulation-steps", type=integer, metavar="N", help="microbatches per step (1)")
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
    if not calculator.form.engine.type.startswith("megatron"):
        return printed(calculator, args)
    wanted = _does_not_fit(calculator)
    offer = _offer(calculator, form) if wanted else None
    if args.json:
        return printed(calculator, args, {"offer": offer and _record(offer, args)})
    code = printed(calculator, args)
    if wanted:
        for line in _otherwise(offer, calculator, args):
            print(line)
    return code


class _Layout(NamedTuple):
    """A layout of the same GPUs, sequences of a step and micro batch."""

    form: dict[str, Any]
    calculator: GPUMemoryCalculator
    #: Of a step on an H100, whose generation is taken for the card.
    seconds: float


class _Offer(NamedTuple):
    """The fastest layout that fits, or the fastest tight one."""

    layout: _Layout
    fit: Fit


def _fit_of(calculator: GPUMemoryCalculator, gpu: Gpu) -> Fit:
    from bridge_memory.estimation import estimate
    from bridge_memory.job.job import fits_of_jobs

    return fits_of_jobs(estimate(calculator.run), [gpu])[0]


def _does_not_fit(calculator: GPUMemoryCalculator) -> bool:
    from bridge_memory.verdict import Verdict

    return _fit_of(calculator, calculator.gpu).verdict is Verdict.DOES_NOT_FIT


def _offer(calculator: GPUMemoryCalculator, form: dict[str, Any]) -> _Offer | None:
    """A layout for a run that does not fit; None: none of those tried fits."""
    from bridge_memory.verdict import Verdict

    layouts = sorted(_layouts(calculator, form), key=lambda layout: layout.seconds)
    offers = [_Offer(layout, _fit_of(layout.calculator, calculator.gpu)) for layout in layouts[:_MOST]]
    for verdict in (Verdict.FITS, Verdict.TIGHT):
        for offer in offers:
            if offer.fit.verdict is verdict:
                return offer
    return None


def _record(offer: _Offer, args: argparse.Namespace) -> dict[str, Any]:
    """The layout as JSON has it."""
    return {
        "command": _command(offer.layout.form, args), "verdict": str(offer.fit.verdict),
        "peak_bytes": offer.fit.peak_bytes,
    }  # fmt: skip


def _otherwise(offer: _Offer | None, calculator: GPUMemoryCalculator, args: argparse.Namespace) -> list[str]:
    """The layout in words, and as the command that says so."""
    from bridge_memory.verdict import Verdict

    gpu, gpus = calculator.gpu.name, calculator.run.parallel.world_size
    if offer is None:
        return [f"No TP with an even split over PP fits {gpu} on {gpus} GPU{'s' * (gpus > 1)}, nor with every layer "
                "recomputed; `bridge-memory search` varies more"]  # fmt: skip
    run = offer.layout.calculator.run
    p = run.parallel
    return [
        f"A layout that {'is tight on' if offer.fit.verdict is Verdict.TIGHT else 'fits'} {gpu}: "
        f"TP {p.tensor_model_parallel_size}, PP {p.pipeline_model_parallel_size}, "
        f"DP {p.data_parallel_size}, {run.num_microbatches} microbatches per step, "
        f"recompute {run.recompute.granularity or 'none'}:",
        f"peak {offer.fit.peak_bytes / 2**30:.1f} GiB; the fastest of those tried at these sequences per step",
        f"  {_command(offer.layout.form, args)}",
    ]


def _layouts(calculator: GPUMemoryCalculator, form: dict[str, Any]) -> Iterator[_Layout]:
    """Layouts whose peak fits with its margin, of those that change TP, PP and whether layers are recomputed."""
    from bridge_memory.calculator import GPUMemoryCalculator
    from bridge_memory.estimation import peaks
    from bridge_memory.speed.hardware import hardware_of
    from bridge_memory.speed.step_time import step_time
    from bridge_memory.verdict import headroom

    asked, hardware = calculator.run, hardware_of("H100")
    gpus, batch = asked.parallel.world_size, calculator.form.training.batch_size
    sequences = asked.sequences_per_step
    for level in {calculator.form.training.activation_checkpointing: None, 4: None}:
        for tp in _TENSOR:
            for pp in range(1, min(gpus // tp, asked.model.num_layers) + 1):
                if gpus % (tp * pp) or sequences % (batch * (gpus // (tp * pp))):
                    continue
                other = {table: dict(values) for table, values in form.items()}
                other.setdefault("parallelism", {}).update(
                    tensor_parallel_size=tp, pipeline_parallel_size=pp, sequence_parallel=tp > 1,
                )
                accumulated = sequences // (batch * (gpus // (tp * pp)))
                other["training"].update(activation_checkpointing=level, gradient_accumulation_steps=accumulated)
                try:
                    one = GPUMemoryCalculator.from_dict(other, "quick")
                    if headroom(one.gpu, max(stage.peak_bytes for stage in peaks(one.run)), one.run) >= 0:
                        yield _Layout(other, one, step_time(one.run, hardware).seconds)
                except SpecError:  # TP or PP divides no heads or layers, or the engine has no time
                    continue


def _command(form: dict[str, Any], args: argparse.Namespace) -> str:
    """The quick command of ``form``: what ``args`` leave at its default is not written."""
    plain = argparse.ArgumentParser()
    add_arguments(plain)
    words = ["bridge-memory", "quick", args.size]
    for name, (table, key) in _KEYS.items():
        value = form.get(table, {}).get(key)
        default = plain.get_default(name)
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [flag] * value
        elif value not in (None, default) and (value, default) != (1, None):
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


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
