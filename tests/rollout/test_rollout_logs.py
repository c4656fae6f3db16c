"""Memory lines of frameworks' logs: read in their own words, each at its moment of the step."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory import find_gpu
from bridge_memory.components import GIB
from bridge_memory.outside.amount import total
from bridge_memory.rollout.answer import Rollout, answer
from bridge_memory.rollout.log import compare, readings_of
from bridge_memory.rollout.moments import Engine, Moment, Trainer, moment_of, predicted
from bridge_memory.rollout.phases import Phase
from bridge_memory.rollout.reading import read
from bridge_memory.rollout.trainer import states

EXAMPLE = str(Path(__file__).parents[2] / "examples/verl_qwen3_30b_a3b.yaml")
SLIME = (
    "--colocate --hf-checkpoint Qwen/Qwen3-4B --actor-num-gpus-per-node 8 --rollout-max-response-len 4096 "
    "--tensor-model-parallel-size 2"
)


@cache
def job(kind: str = "verl") -> Rollout:
    return answer(read(kind, EXAMPLE if kind == "verl" else SLIME), find_gpu("H100"))


def at(trainer: Trainer, engine: Engine, kind: str = "verl") -> tuple[Any, Any]:
    return predicted(job(kind), Moment(trainer, engine))


def test_more_on_the_gpu_is_more() -> None:
    order = (Trainer.RESTS, Trainer.PARAMETERS, Trainer.GRADIENTS, Trainer.ALL)
    sizes = [at(trainer, Engine.ASLEEP)[0].most for trainer in order]
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[2]
    own = states(job().setup.update_run(), 0)
    assert sizes[1] - sizes[0] == total(own.parameters).most and sizes[2] - sizes[1] == total(own.gradients).most
    drivers = [at(Trainer.RESTS, engine)[1].most for engine in (Engine.ASLEEP, Engine.WEIGHTS, Engine.AWAKE)]
    assert drivers == sorted(drivers)


def test_moments_that_are_phases_are_those_phases() -> None:
    found = {p.phase: p for p in job().phases}
    for engine, phase in ((Engine.ASLEEP, Phase.SLEEP), (Engine.AWAKE, Phase.ROLLOUT)):
        allocated, driver = at(Trainer.RESTS, engine)
        assert allocated == total(found[phase].allocated)
        assert driver.least == found[phase].driver.least and driver.most == found[phase].driver.most


def test_a_step_of_verl_as_ray_prints_it() -> None:
    """Colours and names of workers before a line; of several lines of a kind that with most on the driver."""
    worker, memory = "(WorkerDict pid=4711)", "memory allocated (GB): 2.00, memory reserved (GB): 2.25, device memory"
    text = f"""
    \x1b[36m{worker}\x1b[0m DEBUG:2026-08-01:After offload model to cpu, {memory} used/total (GB): 30.10/79.11
    {worker} After offload model to cpu, {memory} used/total (GB): 31.20/79.11 [repeated 3x across cluster]
    {worker} After resume kv_cache, {memory} used/total (GB): 60.00/79.11
    (TaskRunner pid=1) step:1 - actor/loss:np.float64(0.1) - perf/max_memory_allocated_gb:np.float64(28.5) - perf/x:1
    """
    lines, pool = compare(job(), readings_of(text))
    assert pool == 0
    said = {line.reading.head: line for line in lines}
    assert said["After offload model to cpu"].reading.used == int(31.2 * GIB)
    assert said["After offload model to cpu"].moment == "trainer rests; engine's weights awake"
    assert said["After resume kv_cache"].moment == "trainer rests; engine awake"
    peak = said["perf/max_memory"]
    update = job().phase(Phase.UPDATE)
    assert update is not None and peak.allocated is not None and peak.reading.allocated == int(28.5 * GIB)
    assert peak.allocated.most >= total(update.allocated).most


def test_slime_pauses_what_torch_still_counts() -> None:
    usage = "{'gpu': '3', 'total_GB': 79.11, 'used_GB': 9.11, 'allocated_GB': 21.0, 'host_used_GB': 1024.0}"
    heads = ("before offload model (cleared before print)", "after offload model", "after wake_up model")
    text = "\n".join(f"[Rank 3] Memory-Usage {head}: {usage}" for head in heads)
    lines, _ = compare(job("slime"), readings_of(text))
    said = {line.reading.head: line for line in lines}
    assert said["after offload model"].allocated is None and said["after offload model"].driver is not None
    whole = said["after wake_up model"].allocated
    own = states(job("slime").setup.update_run(), 0)
    assert whole is not None
    assert whole.most >= total([*own.parameters, *own.gradients, *own.optimizer]).most
    assert said["before offload model"].moment == said["after wake_up model"].moment


# ---- verl's own words -------------------------------------------------------------------------------

#: What is written while models are built, of other trainers, and of critics.
_BUILDING = re.compile(
    r"(Before|After) (init|building|critic|apply|load base|parallelize|MegatronPPO|ref m|actor optimizer|rollout init|"
    r"FSDP|Automodel|\{role\}|offload (model|critic|ref|actor).*during (init|load))|Before SFT|After SFT|rank "
)


def sources() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.mark.slow
def test_every_line_of_a_step_of_verl_has_its_moment() -> None:
    """Of the installed release: its own words, printed by its own function."""
    root = sources()
    heads = {
        head for path in (root / "workers").rglob("*.py")
        for head in re.findall(r"log_gpu_memory_usage\(\s*f?\"([^\"]+)\"", path.read_text())
    }  # fmt: skip
    steps = sorted(head for head in heads if not _BUILDING.match(head))
    assert len(steps) >= 6
    tree = ast.parse((root / "utils/profiler/performance.py").read_text())
    wanted = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "log_gpu_memory_usage"]
    names: dict[str, Any] = {
        "dist": SimpleNamespace(is_initialized=lambda: False), "logging": SimpleNamespace(Logger=None, DEBUG=10),
        "_get_current_mem_info": lambda: ("2.00", "2.25", "31.20", "79.11"),
    }  # fmt: skip
    exec(compile(ast.Module(wanted, []), "verl", "exec"), names)
    printed: list[str] = []
    logger = SimpleNamespace(log=lambda msg, level: printed.append(msg))
    for head in steps:
        names["log_gpu_memory_usage"](head, logger)
    found = list(readings_of("\n".join(printed)))
    assert [one.head for one in found] == steps
    assert [head for head in steps if moment_of(job(), head) is None] == []
