"""Measure engines outside of megatron-core on one GPU: transformers models under torch's DDP, FSDP and ZeRO.

    python scripts/measure_torch_on_gpu.py --dry-run --predictions predictions.jsonl   # anywhere, before measuring
    python scripts/measure_torch_on_gpu.py --record records.jsonl                      # on a machine with a GPU

Needs torch and transformers; deepspeed for ZeRO. Writes only the files given. Each configuration runs in a separate
process as one rank of torch's fake process group; DDP's reducer needs a real group, of one rank. See
references/measuring.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge_memory.estimation import estimate, peaks
from bridge_memory.files import write_whole
from bridge_memory.readers.resolve import resolve_config
from bridge_memory.rehearsal.measuring import (
    Notebook,
    add_measuring_arguments,
    in_its_own_process,
    margins,
    snapshot_arguments,
    snapshot_to,
)
from bridge_memory.rehearsal.record import append_record, installed, record_of
from bridge_memory.rehearsal.torch.jobs import job_of, world
from bridge_memory.residual import percent, relative
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.transformers import TransformersSpec

GIB = 1 << 30
STEPS = 5
#: Fraction of the GPU's memory: configurations with a higher predicted peak are left out, with a message.
ROOM = 0.92
LLAMA, QWEN, QWEN_8B = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"
#: Engine -> the package that it needs.
PACKAGES = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed"}


@dataclass(frozen=True, slots=True)
class Configuration:
    """One rank to measure."""

    name: str
    run: RunSpec

    @property
    def engine(self) -> str:
        return self.run.data_parallel.engine


def run_of(
    model: str, engine: str, *, world: int = 8, seq: int = 4096, batch: int = 1, steps: int = 1, dtype: str = "bf16",
    optimizer: OptimizerSpec | None = None, **torch_layers: Any,
) -> RunSpec:  # fmt: skip
    """A run of a transformers model. ``dtype``: of its parameters; ``steps``: of gradient accumulation."""
    world = 1 if engine == "single" else world
    return RunSpec(
        model=model,
        parallel=ParallelSpec(world_size=world),
        batch=BatchSpec(seq_length=seq, micro_batch_size=batch, global_batch_size=world * batch * steps),
        precision=PrecisionSpec(params_dtype=dtype),
        data_parallel=DataParallelSpec(engine=engine, use_distributed_optimizer=False),
        optimizer=optimizer or OptimizerSpec(optimizer="adamw", clip_grad=1.0),
        implementation=ImplementationSpec(transformer_impl="transformers"),
        transformers=TransformersSpec(keeps_outputs=False, **torch_layers),
    )


def configurations() -> list[Configuration]:
    """The list, without configurations that the estimate refuses."""
    found = []
    for name, make in _wanted():
        try:
            run = make()
            peaks(run)
            found.append(Configuration(name, run))
        except SpecError as refusal:
            print(f"{name}: left out, {refusal}", file=sys.stderr)
    return found


def _wanted() -> Iterator[tuple[str, Callable[[], RunSpec]]]:
    def case(name: str, *args: Any, **options: Any) -> tuple[str, Callable[[], RunSpec]]:
        return name, lambda: run_of(*args, **options)

    for engine in ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"):
        yield case(f"llama-1b {engine}", LLAMA, engine)
        yield case(f"llama-1b {engine}, checkpoints", LLAMA, engine, gradient_checkpointing=True, use_reentrant=False)
        yield case(f"llama-1b {engine}, four steps of accumulation", LLAMA, engine, steps=4, seq=1024)
    for engine in ("single", "fsdp2"):
        yield case(f"llama-1b {engine}, fp32 under autocast", LLAMA, engine, dtype="fp32", autocast="bf16", seq=2048)
        for how in ("fused", "for-loop"):
            adamw = OptimizerSpec(optimizer="adamw", torch_implementation=how)
            yield case(f"llama-1b {engine}, {how} AdamW", LLAMA, engine, optimizer=adamw, seq=1024)
        yield case(f"llama-1b {engine}, SGD", LLAMA, engine, optimizer=OptimizerSpec(optimizer="sgd"), seq=1024)
        yield case(f"qwen3-0.6b {engine}, micro batch 4", QWEN, engine, batch=4, seq=2048)
        yield case(f"qwen3-0.6b {engine}, eager attention", QWEN, engine, attn_implementation="eager", seq=2048)
    reentrant = {"gradient_checkpointing": True, "use_reentrant": True}
    yield case("llama-1b single, reentrant checkpoints", LLAMA, "single", **reentrant)
    yield case("qwen3-8b fsdp2 of 64, checkpoints", QWEN_8B, "fsdp2", world=64, gradient_checkpointing=True,
               use_reentrant=False)  # fmt: skip
    yield case("qwen3-8b fsdp2 of 8, checkpoints", QWEN_8B, "fsdp2", gradient_checkpointing=True, use_reentrant=False)
    yield case("qwen3-8b zero3 of 64, checkpoints", QWEN_8B, "zero3", world=64, gradient_checkpointing=True,
               use_reentrant=False)  # fmt: skip


# ---- one rank ------------------------------------------------------------------------------------


def build(run: RunSpec, device: str) -> Any:
    """The model that transformers builds from its config, initialised, in its training dtype."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _, config = resolve_config(run.model.name)
    settings = AutoConfig.for_model(**config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[run.precision.params_dtype]
    how = run.transformers
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, attn_implementation=how.attn_implementation).to(dtype)
    if how.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how.reentrant})
        if how.reentrant:
            model.enable_input_require_grads()
    return model.train()


def train(run: RunSpec, device: str, note: Callable[[str], None], steps: int = STEPS) -> None:
    """Train ``steps`` steps; ``note(name)`` after building, after the first forward and backward, and after each
    step."""
    import torch

    job = job_of(run, build(run, device), device=device)
    note("model built")
    shape = (run.batch.micro_batch_size, run.batch.seq_length)
    ids = torch.randint(0, run.model.vocab_size, shape, device=device)
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.transformers.autocast or "")
    for step in range(1, steps + 1):
        for microbatch in range(run.num_microbatches):
            last = microbatch == run.num_microbatches - 1
            with job.microbatch(last=last):
                with torch.autocast(device, autocast, enabled=autocast is not None):
                    loss = job.forward(
                        {"input_ids": ids, "labels": ids, "use_cache": run.transformers.use_cache}
                    ).loss
                if step == 1 and not microbatch:
                    note("first forward")
                job.backward(loss / run.num_microbatches)
            del loss
            if not last:
                job.go_on()
        if step == 1:
            note("first backward")
        if not run.data_parallel.of_deepspeed and run.optimizer.clip_grad:
            torch.nn.utils.clip_grad_norm_(job.parameters(), run.optimizer.clip_grad)
        job.step()
        note(f"step {step}, before zero_grad")
        job.zero_grad()
        note(f"step {step}")


def measure_one(c: Configuration, to: Path, snapshot: str | None) -> None:
    """Train one configuration in this process and write its record."""
    import torch

    notebook = Notebook()
    with snapshot_to(snapshot), world(c.run, device="cuda"):
        torch.cuda.reset_peak_memory_stats()
        train(c.run, "cuda", notebook.note)
    phases = notebook.phases
    record = record_of(c.run, 0, torch.cuda.get_device_name(), STEPS, phases)
    # The peak of the last step: of its passes or of its optimizer step.
    record["measured"][0]["max_allocated_bytes"] = max(p.max_allocated for p in phases[-2:])
    record["id"] = f"engines/{c.name}"
    record["family"] = f"engines/{c.engine}"
    record["framework"]["name"] = c.engine
    record["framework"] |= {name: installed(name) for name in ("transformers", "deepspeed", "accelerate")}
    record["config"]["command"] = ["scripts/measure_torch_on_gpu.py", "--only", c.name]
    append_record(to, record)


# ---- all of them ---------------------------------------------------------------------------------


def predicted(c: Configuration) -> tuple[int, int]:
    """(static, peak) in bytes."""
    (stage,) = estimate(c.run).stages
    return stage.static_bytes, stage.peak_bytes


def dry_run(path: str | None) -> int:
    """Estimate everything and build every model on the meta device. Returns how many parameter counts differ."""
    from math import prod

    wrong, lines = 0, []
    print(f"{'':<52}{'parameters':>16}{'static GiB':>12}{'peak GiB':>10}")
    built: dict[str, int] = {}
    for c in configurations():
        if c.run.model.name not in built:
            built[c.run.model.name] = sum(prod(p.shape) for p in build(c.run, "meta").parameters())
        (stage,) = estimate(c.run).stages
        found = built[c.run.model.name]
        remark = "" if found == stage.parameters else f"  transformers builds {found:,}"
        wrong += bool(remark)
        static, peak = stage.static_bytes, stage.peak_bytes
        print(f"{c.name:<52}{stage.parameters:>16,}{static / GIB:>12.2f}{peak / GIB:>10.2f}{remark}")
        lines.append(json.dumps({"name": c.name, "allocated_bytes": static, "max_allocated_bytes": peak}))
    if path:
        write_whole(path, "\n".join(lines) + "\n")
    print(f"{len(lines)} configurations, {len(lines) - wrong} built as estimated")
    return wrong


def measure(args: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        raise SpecError("there is no GPU here; --dry-run proves the list without one")
    memory = torch.cuda.get_device_properties(0).total_memory
    wanted = [c for c in configurations() if args.only in ("", c.name)]
    if not wanted:
        raise SpecError(f"--only {args.only!r} is no configuration; --dry-run lists them")
    errors, failed = [], 0
    records: list[dict[str, Any]] = []
    for n, c in enumerate(wanted, 1):
        static, peak = predicted(c)
        head = f"[{n}/{len(wanted)}] {c.name}"
        package = PACKAGES.get(c.engine)
        if package and importlib.util.find_spec(package) is None:
            print(f"{head}: left out, {package} is not installed", flush=True)
            continue
        if peak > ROOM * memory:
            print(f"{head}: left out, {peak / GIB:.1f} GiB do not fit", flush=True)
            continue
        answer = in_its_own_process(__file__, c.name, snapshot_arguments(args.snapshots, n), args.timeout)
        if isinstance(answer, str):
            failed += 1
            print(f"{head}: failed, {answer}", flush=True)
            continue
        append_record(args.record, answer)
        records.append(answer)
        (found,) = answer["measured"]
        off = relative(found["max_allocated_bytes"], peak) or 0.0
        errors.append(abs(off))
        print(
            f"{head}: static {static / GIB:.3f} predicted, {found['allocated_bytes'] / GIB:.3f} measured; "
            f"peak {peak / GIB:.3f}, {found['max_allocated_bytes'] / GIB:.3f} ({percent(off, 2)} %)", flush=True,
        )  # fmt: skip
    for line in margins(records):
        print(line)
    if errors:
        errors.sort()
        print(f"peak: median {errors[len(errors) // 2]:.2%}, worst {errors[-1]:.2%} of {len(errors)}")
    return int(bool(failed) or not errors or errors[-1] > args.tolerance)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_measuring_arguments(parser)
    args = parser.parse_args(argv)
    try:
        if args.dry_run:
            return int(dry_run(args.predictions) > 0)
        if args.predictions:
            raise SpecError("--predictions is written before measuring; give --dry-run")
        if args.one:
            (c,) = [c for c in configurations() if c.name == args.one]
            measure_one(c, Path(args.to), args.snapshot)
            return 0
        if not args.record:
            raise SpecError("--record is missing; name the file that the records are added to")
        return measure(args)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
