"""What ``import bridge_memory`` gives: everything at hand, and only what an estimate needs imported."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import bridge_memory
from bridge_memory import ParallelSpec, RunSpec, SpecError, estimate, explain, find_gpu, fits, peaks, resolve_model


def test_every_name_is_there_and_is_listed() -> None:
    assert sorted(bridge_memory.__all__) == bridge_memory.__all__
    for name in bridge_memory.__all__:
        assert getattr(bridge_memory, name) is not None
        assert name in dir(bridge_memory)


@pytest.mark.parametrize("name", bridge_memory.__all__)
def test_no_name_is_that_of_a_module(name: str) -> None:
    """``import bridge_memory.estimate`` fails, whatever was imported before, and the name stays what it is."""
    public = getattr(bridge_memory, name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"bridge_memory.{name}")
    assert getattr(bridge_memory, name) is public


def test_every_name_is_what_it_was_after_every_module_is_imported() -> None:
    """A module that is imported becomes an attribute of the package: none may take the place of a name."""
    rooms = {path.stem for path in Path(bridge_memory.__file__).parent.iterdir()} - {"__init__", "__main__", "py"}
    assert not rooms & set(bridge_memory.__all__)


STRICT = """
from pathlib import Path
from typing_extensions import assert_type

import bridge_memory
from bridge_memory import Comparison, Effect, Estimate, RunSpec, StagePeak, compare, estimate, peaks, search, whatif

run = RunSpec(model="meta-llama/Llama-3.2-1B")
assert_type(estimate(run), Estimate)
assert_type(peaks(run), tuple[StagePeak, ...])
assert_type(whatif(run, gpu="H100").singles, list[Effect])
assert_type(compare(run, Path("train.log")), Comparison)
row = search(run, gpu="H100", num_gpus=8, global_batch_size=64).rows[0]
assert_type(row.peak, int)
assert_type(row.run, RunSpec)
callback = bridge_memory.MemoryReportCallback()
"""


@pytest.mark.slow
def test_a_type_checker_sees_every_name(tmp_path: Path) -> None:
    """``mypy --strict`` over a user's program, with the package as it is installed (py.typed)."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    every = "\n".join(f"bridge_memory.{name}" for name in bridge_memory.__all__)
    program.write_text(f"{STRICT}\n{every}\n")
    root = Path(bridge_memory.__file__).parents[1]
    options = ("--strict", "--follow-imports=silent", "--python-version=3.10", "--config-file=")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path), str(program)],
        capture_output=True, text=True, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    program.write_text(f"{STRICT}\nbridge_memory.searched\npeaks(5)\n")
    wrong = subprocess.run(done.args, capture_output=True, text=True, cwd=root)
    assert 'has no attribute "searched"' in wrong.stdout and '"peaks" has incompatible type "int"' in wrong.stdout


def test_a_star_import_needs_nothing_else() -> None:
    """All names, in a fresh interpreter; without transformers the Trainer's callback says in one line what it needs."""
    code = (
        "import sys; sys.modules['transformers'] = sys.modules['torch'] = None\n"
        "from bridge_memory import *\n"
        "try: MemoryReportCallback()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "MemoryReportCallback is for the Trainer of transformers, which is not installed; install it: "
    assert done.stdout == f"{said}pip install transformers\n"


def test_a_rehearsal_without_torch_is_refused() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from bridge_memory.cli import main\n"
        "sys.exit(main(['rehearse', 'Llama-3.2-1B', '--engine', 'single', '--num-gpus', '1']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "rehearse --engine single runs the real torch, which is not installed; install it: pip install torch"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"bridge-memory: error: {said}\n")


def test_what_an_estimate_does_not_need_is_imported_when_it_is_asked_for() -> None:
    code = (
        "import sys, bridge_memory\n"
        "loaded = lambda: {m.removeprefix('bridge_memory.') for m in sys.modules if m.startswith('bridge_memory.')}\n"
        "before = loaded()\n"
        "rooms = ('report', 'live', 'cli', 'calibration', 'api', 'plan', 'comparison', 'rehearsal', 'speed')\n"
        "assert not any(m.startswith(rooms) for m in before), before\n"
        "assert not before & {'readers.megatron_args', 'readers.config_container', 'readers.transformer_config'}\n"
        "bridge_memory.run_from_megatron_args, bridge_memory.fits\n"
        "assert {'readers.megatron_args', 'verdict'} <= loaded()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(bridge_memory, "estimat")


def test_a_stage_that_is_none_is_refused_in_one_line() -> None:
    run = RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=2, pipeline_model_parallel_size=2))
    for stage in (-1, 2, True, 1.0, "0", None):
        with pytest.raises(SpecError, match=r"^stage \(.*\) is not a stage .*; give a number from 0 to 1$"):
            explain(run, stage)  # type: ignore[arg-type]


def test_the_verbs_agree_on_a_run() -> None:
    run = RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=16, pipeline_model_parallel_size=2))
    answer = estimate(run)
    assert [p.peak_bytes for p in peaks(run)] == [s.peak_bytes for s in answer.stages]
    assert explain(run, 1) == answer.stages[1]
    (fit,) = fits(answer, [find_gpu("H100")])
    assert fit.fits is (answer.peak_stage.peak_bytes + fit.margin_bytes <= fit.capacity_bytes)


def test_a_model_is_named_by_a_path_too_and_by_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text((files("bridge_memory.readers") / "presets" / "meta-llama__Llama-3.1-8B.json").read_text())
    run = RunSpec(model=path)  # type: ignore[arg-type]
    assert peaks(run) == peaks(RunSpec(model=str(tmp_path)))
    assert resolve_model(path) == run.model
    for given in (5, None, b"x", ["meta-llama/Llama-3.1-8B"], {"hidden_size": 64}):
        with pytest.raises(SpecError, match=r"^the model \(.*\) is no name; give a preset, a path or a Hub id"):
            resolve_model(given)  # type: ignore[arg-type]


def test_a_group_of_one_rank_divides_nothing() -> None:
    """Optimizer states are divided over the two data-parallel ranks, and TP 1 and CP 1 divide nothing."""
    stage = explain(RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=2)), 0)
    assert {c.name: c.shard for c in stage.components if c.state} == {
        "weights": "", "gradients": "", "main parameters": "dp", "exp_avg": "dp", "exp_avg_sq": "dp",
    }  # fmt: skip


def test_what_is_no_estimate_and_no_card_is_refused_in_one_line() -> None:
    run = RunSpec(model="meta-llama/Llama-3.2-1B")
    with pytest.raises(SpecError, match=r"^result \(RunSpec.*\) is not an Estimate; give estimate\(run\)$"):
        fits(run)  # type: ignore[arg-type]
    for gpus, why in (("H100", "is one GPU"), (find_gpu("H100"), "is one GPU"), (None, "is no list of GPUs")):
        with pytest.raises(SpecError, match=rf"^gpus \(.*\) {why}; give "):
            fits(estimate(run), gpus)  # type: ignore[arg-type]
    for given in (3, None, ["H100"]):
        with pytest.raises(SpecError, match=r"^gpu \(.*\) is no name; "):
            find_gpu(given)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match=r"^gpu \(.*\) is no name; "):
            fits(estimate(run), [given])  # type: ignore[list-item]


@pytest.mark.parametrize("short", ["tp", "pp", "vpp", "cp", "ep", "etp", "sp"])
def test_a_short_name_is_answered_with_the_field(short: str) -> None:
    run = RunSpec(model="meta-llama/Llama-3.2-1B")
    with pytest.raises(SpecError) as refusal:
        run.with_fields(**{short: 2})
    name = str(refusal.value).removeprefix(f"{short} is no field of a RunSpec; use ")
    assert hasattr(ParallelSpec(), short) and hasattr(ParallelSpec(), name)
