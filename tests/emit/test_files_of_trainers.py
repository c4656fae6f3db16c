"""Commands and the files of trainers: random runs as flags, emitted, and typed back: the same run, and the same peak.

A file that would start another run is refused by name. What is emitted goes through the classes of DeepSpeed,
accelerate, transformers and torchtitan where they are installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_read_back import different
from tiers import few_fast
from wide_runs import freeze

from bridge_memory import RecomputeSpec, RunSpec, SpecError, peaks
from bridge_memory.arguments.flags import FLAGS, add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.emit.commands import field_words, left_idle
from bridge_memory.emit.formats import FORMATS, emitted
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.parts import MEGATRON_ENGINES

DRAWN, DEEP = 120, 300
GPU = find_gpu("H100")
SAID = {flag.field for flag in FLAGS}
SUFFIX = {"deepspeed": ".json", "accelerate": ".yaml", "trainer": ".json", "trl": ".yaml", "torchtitan": ".toml"}


@cache
def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(exit_on_error=False)
    add_run_arguments(found)
    found.add_argument("--gpu")
    return found


def parsed(words: list[str]) -> argparse.Namespace:
    return parser().parse_args(words)


def drawn_flags(draw: Random) -> list[str]:
    engine = draw.choice(freeze.ENGINES)
    case = freeze.drawn(engine, draw)
    given = {
        f"{group}.{name}": value for group, values in case["groups"].items() for name, value in values.items()
        if f"{group}.{name}" in SAID
    }  # fmt: skip
    if engine not in (*MEGATRON_ENGINES, "megatron_deepspeed"):
        given |= _as_trainers_run(engine, draw)
        if draw.random() < 0.25:
            case["model"] = "meta-llama/Llama-3.1-8B"
            given |= _as_torchtitan_runs(engine, draw)
    words = [str(case["model"]), *field_words(given)]
    if draw.random() < 0.2:
        words += ["--hidden-dropout", "0.1"]
    if draw.random() < 0.2:
        words += ["--num-layers", str(draw.randint(1, 16))]
    return words


def _as_trainers_run(engine: str, draw: Random) -> dict[str, Any]:
    sharded = engine.startswith("fsdp")
    given: dict[str, Any] = {
        "optimizer.optimizer": draw.choice(("adamw", "adamw", "adamw", "adam", "adamw_8bit", "adafactor", "lion")),
        "optimizer.torch_implementation": draw.choice(("foreach", "fused")),
    }  # fmt: skip
    if draw.random() < 0.5:
        given["transformers.transformers_version"] = (5, 2)
    if draw.random() < 0.5:
        given["precision.params_dtype"] = "fp32"
        if sharded:
            wrap = "torchtitan" if engine == "fsdp2" else "TRANSFORMER_BASED_WRAP"
            given |= {"fsdp.param_dtype": "bf16", "fsdp.reduce_dtype": draw.choice(("bf16", "fp32")),
                      "fsdp.auto_wrap_policy": wrap}  # fmt: skip
        elif not engine.startswith("zero"):
            given["transformers.autocast"] = "bf16"
    if draw.random() < 0.3:
        given |= {"peft.scheme": "lora", "peft.dim": 16,
                  "peft.target_modules": draw.choice((("all-linear",), ("q_proj", "v_proj")))}  # fmt: skip
    if draw.random() < 0.3:
        given["transformers.gradient_checkpointing"] = True
    return given


def _as_torchtitan_runs(engine: str, draw: Random) -> dict[str, Any]:
    given: dict[str, Any] = {
        "implementation.transformer_impl": "torchtitan", "transformers.attention_mask": "none",
        "optimizer.optimizer": draw.choice(("adam", "adamw")),
    }  # fmt: skip
    if engine == "fsdp2":
        given |= {"fsdp.auto_wrap_policy": "torchtitan", "fsdp.reduce_dtype": "fp32",
                  "fsdp.param_dtype": draw.choice(("bf16", "fp32"))}  # fmt: skip
    if engine == "ddp":
        given["ddp.bucket_cap_mb"] = 100
    if draw.random() < 0.5:
        given["transformers.selective_ac_option"] = draw.choice(("op", "2", "3"))
    if draw.random() < 0.4:
        given["transformers.torch_compile"] = True
    return given


def asked(draw: Random) -> Iterator[tuple[argparse.Namespace, RunSpec]]:
    """Endless: the flags of a run that can be estimated, and the run."""
    while True:
        try:
            args = parsed(drawn_flags(draw))
            yield args, run_on_gpus(args, [GPU])
        except (SpecError, argparse.ArgumentError):
            continue


@cache
def drawn() -> tuple[tuple[argparse.Namespace, RunSpec], ...]:
    return tuple(itertools.islice(asked(Random("files of trainers")), DRAWN))


def said(how: str, args: argparse.Namespace, run: RunSpec) -> Any:
    """``Emitted``; None where the format has no word for something in the run."""
    megatrons = run.data_parallel.engine in MEGATRON_ENGINES and not run.implementation.torch_layers
    trainer = "megatron" if megatrons else "torch"
    if trainer not in FORMATS[how]:
        return None
    try:
        return emitted(how, trainer, run, args, GPU.name, {})
    except SpecError as error:
        assert how != "estimate" and "\n" not in str(error)
        return None


def check(how: str, args: argparse.Namespace, run: RunSpec, folder: Path, *, bytes_too: bool = True) -> bool:
    text = said(how, args, run)
    if text is None:
        return False
    line = text.text
    if how != "estimate":
        path = folder / f"file{SUFFIX[how]}"
        path.write_text(text.commented)
        line = text.note.partition("for FILE: ")[2].replace("FILE", str(path))
    read = run_on_gpus(parsed(shlex.split(line)[2:]), [GPU])
    assert not different(run, read), line
    if bytes_too:
        assert list(peaks(read)) == list(peaks(run))
    return True


FILES = [how for how in FORMATS if how not in ("megatron-args", "bridge")]


@pytest.mark.parametrize("how", few_fast(FILES, 1))
def test_what_is_typed_back_is_the_run(how: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    if how == "torchtitan":
        pytest.importorskip("tomllib")
    came = Counter(
        run.data_parallel.engine for i, (args, run) in enumerate(drawn())
        if check(how, args, run, tmp_path, bytes_too=i % 9 == 0)  # equal runs have equal bytes: tests/test_canonical.py
    )  # fmt: skip
    assert sum(came.values()) >= {"estimate": DRAWN, "torchtitan": 3}.get(how, DRAWN // 6), came


@pytest.mark.slow
def test_whatever_is_typed_it_is_typed_back(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    pytest.importorskip("tomllib")
    for i, (args, run) in enumerate(itertools.islice(asked(Random(os.environ.get("SEED", "deep"))), DEEP)):
        for how in FILES:
            check(how, args, run, tmp_path, bytes_too=i % 9 == 0)


# ---- by the classes of those who read the files ----


def files(how: str) -> Iterator[tuple[RunSpec, str]]:
    for args, run in drawn():
        if (text := said(how, args, run)) is not None:
            yield run, text.text


def test_deepspeed_takes_every_file() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config")
    for run, text in files("deepspeed"):
        table = json.loads(text)
        table["train_batch_size"] = run.batch.micro_batch_size * run.num_microbatches  # of one process
        config = runtime.DeepSpeedConfig(table)
        assert config.zero_config.stage == int(run.data_parallel.engine[-1])
        assert config.gradient_accumulation_steps == run.num_microbatches
        assert config.bfloat16_config.enabled is (run.params_dtype == "bf16")
        for name in ("reduce_bucket_size", "sub_group_size", "round_robin_gradients", "reduce_scatter"):
            assert getattr(config.zero_config, name) == getattr(run.deepspeed, name)


def test_accelerates_launcher_takes_every_file(tmp_path: Path) -> None:
    pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = tmp_path / "accelerate.yaml"
    for run, text in files("accelerate"):
        path.write_text(text)
        args, _, _ = _validate_launch_command(
            launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        )
        engine = run.data_parallel.engine
        assert args.num_processes == run.parallel.world_size
        assert (args.use_fsdp, args.use_deepspeed, args.multi_gpu) == (
            engine.startswith("fsdp"), engine.startswith("zero"), engine == "ddp"
        )  # fmt: skip


@pytest.mark.parametrize("how", ["trainer", "trl"])
def test_every_key_is_one_of_training_arguments_or_trls(how: str) -> None:
    transformers = pytest.importorskip("transformers")
    known = {f.name for f in fields(transformers.TrainingArguments)}
    if how == "trl":  # of ``trl/trainer/sft_config.py`` and ``model_config.py``, 0.23
        known |= {"model_name_or_path", "dtype", "attn_implementation", "max_length", "packing", "use_peft", "lora_r",
                  "lora_target_modules", "lora_dropout", "use_dora", "load_in_4bit", "load_in_8bit",
                  "use_bnb_nested_quant"}  # fmt: skip
    yaml = pytest.importorskip("yaml")
    for _, text in files(how):
        assert set(yaml.safe_load(text)) <= known


def test_every_key_is_one_of_torchtitans(torchtitans_fields: dict[str, set[str]]) -> None:
    tomllib = pytest.importorskip("tomllib")
    for _, text in files("torchtitan"):
        for table, values in tomllib.loads(text).items():
            assert set(values) <= torchtitans_fields[table]


@pytest.fixture
def torchtitans_fields() -> dict[str, set[str]]:
    """Table -> its keys, from the source of torchtitan 0.2's ``JobConfig``, which is not imported."""
    import ast
    from importlib.util import find_spec

    spec = find_spec("torchtitan")
    path = Path(((spec and spec.submodule_search_locations) or [""])[0]) / "config" / "job_config.py"
    if not path.is_file():
        pytest.skip("torchtitan is not installed")
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}

    def annotated(name: str) -> dict[str, str]:
        return {
            one.target.id: ast.unparse(one.annotation) for one in classes[name].body
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }  # fmt: skip

    return {table: set(annotated(kind)) for table, kind in annotated("JobConfig").items() if kind in classes}


def test_a_command_of_another_run_has_no_flag_that_does_nothing_there() -> None:
    """A choice of ``fit`` without the recomputation and the offloading that the flags give: its command, and what
    ``whatif`` and ``fit --emit flags`` say to add and to drop."""
    words = ["Llama-3.2-1B", "--num-gpus", "8", "--recompute-granularity", "selective", "--recompute-modules", "mlp",
             "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"]  # fmt: skip
    args = parsed(words)
    run = run_on_gpus(args, [GPU])
    for recompute in (RecomputeSpec(), RecomputeSpec(granularity="full", method="block", num_layers=2)):
        other = run.with_(recompute=recompute).with_fields(optimizer_cpu_offload=False, optimizer_offload_fraction=1.0)
        line = emitted("estimate", "megatron", other, args, GPU.name, {}).text
        assert not different(run_on_gpus(parsed(shlex.split(line)[2:]), [GPU]), other), line
        assert left_idle(run, other) == ["recompute.modules", "optimizer.optimizer_offload_fraction"]
    assert left_idle(run, run) == []
