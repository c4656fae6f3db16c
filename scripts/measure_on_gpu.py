"""Measure about fifty ranks of Megatron jobs on one GPU, and print the errors of the estimate.

    python scripts/measure_on_gpu.py --record records.jsonl      # on a machine with a GPU and the megatron extra
    python scripts/measure_on_gpu.py --dry-run                   # anywhere: build and estimate the whole list
    python scripts/measure_on_gpu.py --dry-run --predictions predictions.jsonl    # before measuring, to be committed

Needs torch and megatron-core. Writes only the files given. Each rank runs in a separate process, so that neither peaks
nor running out of memory affect the next. See references/measuring.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge_memory.estimation import estimate
from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal.measuring import add_measuring_arguments, in_its_own_process, margins, snapshot_arguments
from bridge_memory.rehearsal.record import append_record
from bridge_memory.rehearsal.world import installed_release, require_megatron
from bridge_memory.residual import SIGN_PERCENT, percent, relative
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    MLASpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)

GIB = 1 << 30
#: Training steps per configuration. Records hold the figures after each; the last step's peak is compared.
STEPS = 5
#: Fraction of the GPU's memory: configurations with a higher predicted peak are left out, with a message.
ROOM = 0.92
LLAMA_1B, LLAMA_8B, QWEN3_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-8B"
GPT2, GPT3, QWEN2 = "openai-community/gpt2", "openai/GPT-3-175B", "Qwen/Qwen2-7B"
MIXTRAL, QWEN3_MOE = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"
QWEN_MOE = "Qwen/Qwen1.5-MoE-A2.7B"
LITE, DEEPSEEK = "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One rank to measure: the first of ``stage``."""

    name: str
    run: RunSpec
    stage: int = 0
    #: Environment variables of the process.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: False where the prediction does not include the measured feature, as its notes say; it is recorded nevertheless.
    scored: bool = True


def implementation(te: bool, missing: dict[str, bool]) -> ImplementationSpec:
    """Transformer Engine, or local modules; without the fusions whose kernels are ``missing``."""
    return ImplementationSpec(
        transformer_impl="transformer_engine" if te else "local",
        moe_grouped_gemm=te,
        gradient_accumulation_fusion=not missing.get("gradient_accumulation_fusion", False),
        masked_softmax_fusion=te or not missing.get("masked_softmax_fusion", False),
    )


def configurations(te: bool, missing: dict[str, bool] | None = None) -> list[Configuration]:
    """The list. Local attention saves its scores and has no MLA: its sequences are shorter, and MLA is left out."""
    impl = implementation(te, missing or {})
    wanted = _configurations(impl, 4096 if te else 2048)
    return [c for c in wanted if te or not any(isinstance(x.mixer, MLASpec) for x in c.run.model.layers)]


def _parallel(world: int, tp: int = 1, pp: int = 1, **more: Any) -> ParallelSpec:
    return ParallelSpec(
        world_size=world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **more
    )


def _first_layers(model: str, n: int) -> ModelSpec:
    whole = resolve_model(model)
    return replace(whole, layers=whole.layers[:n])


def _configurations(impl: ImplementationSpec, seq: int) -> Iterator[Configuration]:
    batch = BatchSpec(seq_length=seq)

    def run(model: str | ModelSpec, parallel: ParallelSpec, **groups: Any) -> RunSpec:
        spec = resolve_model(model) if isinstance(model, str) else model
        own = groups.pop("implementation", impl)
        if any(isinstance(layer.mixer, MLASpec) for layer in spec.layers):
            own = replace(own, apply_rope_fusion=False)  # fused rotation of MLA needs YaRN
        return RunSpec(model=spec, parallel=parallel, implementation=own, **{"batch": batch, **groups})

    def llama(name: str, world: int = 8, **groups: Any) -> Configuration:
        return Configuration(f"llama-1b {name}", run(LLAMA_1B, _parallel(world), **groups))

    def full(method: str, layers: int) -> RecomputeSpec:
        return RecomputeSpec(granularity="full", method=method, num_layers=layers)

    yield llama("one GPU", world=1)
    yield llama("distributed optimizer of 8")
    yield llama("no distributed optimizer", data_parallel=DataParallelSpec(use_distributed_optimizer=False))
    yield llama("bf16 gradients", data_parallel=DataParallelSpec(grad_reduce_in_fp32=False))
    yield llama("overlapping reduction", data_parallel=DataParallelSpec(overlap_grad_reduce=True))
    yield llama("micro batch 2", batch=BatchSpec(seq_length=seq, micro_batch_size=2))
    yield llama("short sequence", batch=BatchSpec(seq_length=seq // 2))
    yield llama("recompute every layer", recompute=full("uniform", 1))
    yield llama("recompute groups of 4", recompute=full("uniform", 4))
    yield llama("recompute 8 layers", recompute=full("block", 8))
    for module in ("core_attn", "layernorm", "mlp"):
        yield llama(
            f"recompute {module}", recompute=RecomputeSpec(granularity="selective", modules=(module,))
        )
    yield llama("fused cross entropy", implementation=replace(impl, cross_entropy_loss_fusion=True))
    if impl.te:
        yield llama(
            "cross entropy of TE",
            implementation=replace(impl, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"),
        )

    yield Configuration(
        "llama-1b expandable segments", run(LLAMA_1B, _parallel(8)),
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    yield llama("optimizer in host memory", optimizer=OptimizerSpec(optimizer_cpu_offload=True))
    lora = PeftSpec(scheme="lora", dim=16)
    yield llama("LoRA (Megatron Bridge's)", peft=lora, data_parallel=DataParallelSpec(use_distributed_optimizer=False))
    yield Configuration(
        "llama-1b CUDA graphs of layers",
        run(LLAMA_1B, _parallel(8), implementation=replace(impl, cuda_graph_impl="local")), scored=False,
    )
    yield Configuration(
        "llama-1b CUDA graph of the iteration",
        run(LLAMA_1B, _parallel(8), implementation=replace(impl, cuda_graph_impl="full_iteration")), scored=False,
    )
    depths = _first_layers(QWEN3_8B, 6)
    depths = replace(depths, mtp_num_layers=2, mtp_layer=depths.layers[-1])
    yield Configuration("qwen3-8b first 6 layers with two MTP depths", run(depths, _parallel(8)))
    if impl.te:
        yield from _of_transformer_engine(llama)

    def stages(name: str, spec: RunSpec, *which: int) -> Iterator[Configuration]:
        for stage in which:
            yield Configuration(f"{name} stage {stage}", spec, stage)

    yield from stages("llama-8b tp2 pp4", run(LLAMA_8B, _parallel(64, 2, 4)), 0, 1, 3)
    yield from stages(
        "llama-8b pp2 vpp4", run(LLAMA_8B, _parallel(64, 4, 2, virtual_pipeline_model_parallel_size=4)), 0, 1
    )
    yield from stages(
        "llama-8b tp4 without sp", run(LLAMA_8B, _parallel(32, 4, 2, sequence_parallel=False)), 1
    )
    yield from stages("qwen3-8b tp4 pp2 (q/k norm)", run(QWEN3_8B, _parallel(32, 4, 2)), 0, 1)
    yield from stages("qwen2-7b tp2 pp4 (biases)", run(QWEN2, _parallel(32, 2, 4)), 0, 3)
    short = BatchSpec(seq_length=1024, micro_batch_size=8)
    yield Configuration("gpt2 (MHA, dropout)", run(GPT2, _parallel(8), batch=short))
    yield Configuration("gpt2 one sequence", run(GPT2, _parallel(8), batch=BatchSpec(seq_length=1024)))
    gpt3 = run(GPT3, _parallel(1024, 8, 16), batch=BatchSpec(seq_length=2048))
    yield from stages("gpt3 tp8 pp16", gpt3, 0, 8, 15)
    yield from stages("mixtral ep8 pp8", run(MIXTRAL, _parallel(64, 1, 8, expert_model_parallel_size=8)), 0, 7)
    yield from stages(
        "mixtral tp2 ep4 pp8",
        run(MIXTRAL, _parallel(64, 2, 8, expert_model_parallel_size=4, expert_tensor_parallel_size=1)), 4,
    )
    yield from stages("qwen3-30b ep8 pp4", run(QWEN3_MOE, _parallel(64, 1, 4, expert_model_parallel_size=8)), 0, 3)
    yield from stages(
        "qwen3-30b tp4 ep8 pp2", run(QWEN3_MOE, _parallel(64, 4, 2, expert_model_parallel_size=8,
                                                         expert_tensor_parallel_size=1)), 1,
    )  # fmt: skip
    yield from stages(
        "qwen1.5-moe ep4 pp2 (shared experts)",
        run(QWEN_MOE, _parallel(32, 1, 2, expert_model_parallel_size=4)), 0,
    )
    lite = run(LITE, _parallel(24, 1, 3, expert_model_parallel_size=8))
    yield from stages("deepseek-lite ep8 pp3 (MLA)", lite, 0, 2)
    deepseek = run(
        DEEPSEEK,
        _parallel(
            1024, 2, 16, expert_model_parallel_size=64, expert_tensor_parallel_size=1,
            pipeline_model_parallel_layout="Et*4|(tttt|)*14tmL",
        ),
        batch=BatchSpec(seq_length=seq, global_batch_size=256),
    )  # fmt: skip
    yield from stages("deepseek-v3 tp2 pp16 ep64", deepseek, 1, 15)
    yield Configuration("llama-8b first 4 layers", run(_first_layers(LLAMA_8B, 4), _parallel(8)))
    yield Configuration(
        "llama-8b first 8 layers, no distributed optimizer",
        run(_first_layers(LLAMA_8B, 8), _parallel(8), data_parallel=DataParallelSpec(use_distributed_optimizer=False)),
    )


def _of_transformer_engine(llama: Callable[..., Configuration]) -> Iterator[Configuration]:
    """Configurations that need Transformer Engine: a precision-aware optimizer with states below fp32, Hopper's fp8
    recipes, activations in host memory."""
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("moments in bf16", {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
        ("moments in fp8 and fp16", {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}),
        ("gradients in bf16", {"main_grads_dtype": "bf16"}),
        ("fp16 main parameters", {"main_params_dtype": "fp16"}),
    )
    for what, narrow in kinds:
        optimizer = OptimizerSpec(use_precision_aware_optimizer=True, **narrow)
        yield llama(f"precision-aware, {what}", optimizer=optimizer)
    for recipe in ("delayed", "tensorwise", "blockwise"):
        yield llama(f"fp8 {recipe}", precision=PrecisionSpec(fp8="hybrid", fp8_recipe=recipe))
    in_fp8 = PrecisionSpec(fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True)
    yield llama("fp8 tensorwise parameters", precision=in_fp8)
    impl = ImplementationSpec(gradient_accumulation_fusion=False, cpu_offloading_num_layers=8)
    yield llama("8 layers in host memory", implementation=impl)


# ---- without a GPU -------------------------------------------------------------------------------


def dry_run(te: bool) -> int:
    """Estimate and build every rank on the meta device. Returns how many parameter counts differ.

    Built with all of Apex's fusions, in bf16, without graphs and offloading: none of these changes a parameter.
    """
    from math import prod

    wanted = configurations(te)
    wrong = 0
    print(f"{'':<52}{'parameters':>16}{'static GiB':>12}{'peak GiB':>10}")
    for c, shapes in zip(wanted, _built([replace(c, run=_plain(c.run)) for c in wanted], te), strict=True):
        impl = replace(c.run.implementation, megatron_core=installed_release())
        stage = estimate(c.run.with_(implementation=impl)).stages[c.stage]
        if isinstance(shapes, str):
            built, remark = 0, f"  cannot be built: {shapes}"
        else:
            built = sum(prod(shape) for chunk in shapes for shape in chunk.values())
            remark = "" if built == stage.parameters else f"  megatron-core builds {built:,}"
        wrong += bool(remark)
        static, peak = stage.static_bytes / GIB, stage.peak_bytes / GIB
        print(f"{c.name:<52}{stage.parameters:>16,}{static:>12.2f}{peak:>10.2f}{remark}")
    print(f"{len(wanted)} configurations, {len(wanted) - wrong} built as estimated")
    return wrong


def _plain(run: RunSpec) -> RunSpec:
    impl = replace(run.implementation, cuda_graph_impl="none", cpu_offloading_num_layers=0)
    return run.with_(implementation=impl, precision=PrecisionSpec())


def write_predictions(te: bool, path: str) -> None:
    """A JSON object per configuration: name, stage, predicted bytes, the package's release. Raises SpecError."""
    from bridge_memory import __version__
    from bridge_memory.files import write_whole

    out = []
    for c in configurations(te):
        stage = estimate(c.run).stages[c.stage]
        out.append(
            {
                "name": c.name, "stage": c.stage, "bridge_memory": __version__, "scored": c.scored,
                "allocated_bytes": stage.static_bytes, "max_allocated_bytes": stage.peak_bytes,
            }
        )
    write_whole(path, "".join(json.dumps(x) + "\n" for x in out))


def _built(wanted: list[Configuration], te: bool) -> list[Any]:
    from bridge_memory.rehearsal.model import build_chunks, parameter_shapes
    from bridge_memory.rehearsal.patches import building
    from bridge_memory.rehearsal.te_shapes import parameter_shapes_with_te
    from bridge_memory.rehearsal.world import NotBuildable, fake_world
    from bridge_memory.spec.ranks import rank_of_stage

    if te:
        return parameter_shapes_with_te([(c.run, c.stage) for c in wanted])
    found: list[Any] = []
    for c in wanted:
        with fake_world(c.run.parallel, rank_of_stage(c.run.parallel, c.stage)), building():
            try:
                found.append(parameter_shapes(build_chunks(c.run)))
            except NotBuildable as refusal:
                found.append(str(refusal))
    return found


# ---- with a GPU ----------------------------------------------------------------------------------


def measure_one(c: Configuration, to: Path, snapshot: str | None) -> None:
    """Rehearse one configuration in this process and write its record."""
    from bridge_memory.rehearsal.gpu import rehearse_on_gpu

    measured = rehearse_on_gpu(c.run, c.stage, steps=STEPS, snapshot=snapshot)
    record = measured.as_record()
    kind = "te" if c.run.implementation.te else "local"
    record["id"] = f"rehearsal/{c.name}/{kind}"
    record["family"] = f"rehearsal/{c.name.split()[0]}/{kind}"
    record["config"]["environment"] = dict(c.environment)
    record["config"]["command"] = ["scripts/measure_on_gpu.py", "--impl", kind, "--only", c.name]
    append_record(to, record)


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the result. ``measured`` and ``predicted``: (static, peak) in bytes."""

    name: str
    predicted: tuple[int, int]
    measured: tuple[int, int]

    @property
    def errors(self) -> tuple[float, float]:
        static, peak = (relative(m, p) or 0.0 for m, p in zip(self.measured, self.predicted, strict=True))
        return static, peak


def line_of(name: str, record: dict[str, Any]) -> Line:
    """Predict a record as ``bridge-memory accuracy`` does."""
    from bridge_memory.accuracy.corpus import RecordLine
    from bridge_memory.accuracy.predictions import predict
    from bridge_memory.accuracy.records import read_record

    (outcome,) = predict(read_record(RecordLine(name, record)))
    if outcome.status != "ok":
        raise SpecError(f"{name}: {outcome.reason}")
    predicted = (outcome.predicted_allocated_bytes or 0, outcome.predicted_max_allocated_bytes or 0)
    (found,) = record["measured"]
    return Line(name, predicted, (found["allocated_bytes"], found["max_allocated_bytes"]))


def table(lines: list[Line]) -> str:
    """Predicted and measured GiB with errors, then medians and largest errors."""
    names = f"{'measured':>10}{'%':>9}"
    out = [f"GiB; {SIGN_PERCENT}", f"{'':<52}{'static: predicted':>18}{names}{'peak: predicted':>17}{names}"]
    for x in lines:
        (ps, pp), (ms, mp), (es, ep) = x.predicted, x.measured, x.errors
        out.append(
            f"{x.name:<52}{ps / GIB:>18.3f}{ms / GIB:>10.3f}{percent(es, 2):>9}"
            f"{pp / GIB:>17.3f}{mp / GIB:>10.3f}{percent(ep, 2):>9}"
        )
    for i, what in enumerate(("static", "peak")):
        off = [abs(x.errors[i]) for x in lines]
        if off:
            out.append(f"{what}: median {statistics.median(off):.2%}, worst {max(off):.2%} of {len(off)}")
    return "\n".join(out)


def verdict(lines: list[Line], failed: list[str], tolerance: float, median: float) -> int:
    """Exit code 0 where everything ran and the errors of peaks are within ``tolerance`` and ``median``, else 1."""
    off = [abs(x.errors[1]) for x in lines]
    return int(bool(failed) or not off or max(off) > tolerance or statistics.median(off) > median)


def measure(args: argparse.Namespace, te: bool) -> int:
    import torch

    from bridge_memory.rehearsal.gpu import missing_kernels

    if not torch.cuda.is_available():
        raise SpecError("there is no GPU here; --dry-run proves the list without one")
    memory = torch.cuda.get_device_properties(0).total_memory
    wanted = [c for c in configurations(te, missing_kernels()) if args.only in ("", c.name)]
    if not wanted:
        raise SpecError(f"--only {args.only!r} is no configuration; --dry-run lists them")
    lines: list[Line] = []
    unscored: list[str] = []
    failed: list[str] = []
    records: list[dict[str, Any]] = []
    for n, c in enumerate(wanted, 1):
        peak = estimate(c.run).stages[c.stage].peak_bytes
        if peak > ROOM * memory:
            print(f"[{n}/{len(wanted)}] {c.name}: left out, {peak / GIB:.1f} GiB do not fit", flush=True)
            continue
        arguments = ["--impl", "te" if te else "local", *snapshot_arguments(args.snapshots, n)]
        answer = in_its_own_process(__file__, c.name, arguments, args.timeout, c.environment)
        if isinstance(answer, str):
            failed.append(f"{c.name}: {answer}")
            print(f"[{n}/{len(wanted)}] {failed[-1]}", flush=True)
            continue
        append_record(args.record, answer)
        records.append(answer)
        if not c.scored:
            (found,) = answer["measured"]
            measured = found["max_allocated_bytes"] / GIB
            unscored.append(f"{c.name}: predicted {peak / GIB:.3f} GiB without it, measured {measured:.3f}")
            continue
        try:
            lines.append(line_of(c.name, answer))
        except SpecError as error:
            failed.append(str(error))
            continue
        print(f"[{n}/{len(wanted)}] {c.name}: peak {lines[-1].errors[1]:+.2%}", flush=True)
    print(table(lines))
    for line in margins(records):
        print(line)
    for line in unscored:
        print(f"recorded, not scored: {line}")
    for reason in failed:
        print(f"failed: {reason}")
    return verdict(lines, failed, args.tolerance, args.median)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_measuring_arguments(parser)
    parser.add_argument("--impl", choices=("auto", "te", "local"), default="auto",
                        help="modules; auto: Transformer Engine where it is importable")
    parser.add_argument("--median", type=float, default=0.015, help="accepted median error of the peaks (0.015)")
    args = parser.parse_args(argv)
    try:
        require_megatron()
        from bridge_memory.rehearsal.gpu import missing_kernels
        from bridge_memory.rehearsal.patches.modules import has_te

        te = has_te() if args.impl == "auto" else args.impl == "te"
        if args.predictions and not args.dry_run:
            raise SpecError("--predictions is written before measuring; give --dry-run")
        if args.predictions:
            write_predictions(te, args.predictions)
        if args.dry_run:
            return int(dry_run(te) > 0)
        if args.one:
            (c,) = [c for c in configurations(te, missing_kernels()) if c.name == args.one]
            measure_one(c, Path(args.to), args.snapshot)
            return 0
        if not args.record:
            raise SpecError("--record is missing; name the file that the records are added to")
        return measure(args, te)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
