"""``fit``: the fastest recomputation with which a layout fits."""

from __future__ import annotations

import json
import random
import shlex
from functools import partial
from itertools import chain, combinations

import pytest

from bridge_memory import BatchSpec, ParallelSpec, RunSpec, SpecError, peaks
from bridge_memory.cli import main
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.megatron.fit import fit, lowest
from bridge_memory.plan.megatron.space import useful_modules
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.speed.constants import DEFAULT
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import step_time
from bridge_memory.verdict import MemoryLimit

GPU = find_gpu("H100")
MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B")


def _drawn(seed: int) -> RunSpec:
    draw = random.Random(seed)
    model = MODELS[seed % len(MODELS)]
    tensor, stages = draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
    experts = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1} if "A3B" in model else {}
    parallel = ParallelSpec(
        world_size=tensor * stages * 2, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages,
        **experts,
    )  # fmt: skip
    batch = BatchSpec(seq_length=draw.choice((4096, 8192)), micro_batch_size=draw.choice((1, 2)), global_batch_size=32)
    return RunSpec(model=model, parallel=parallel, batch=batch)


def _choices(run: RunSpec) -> list[RunSpec]:
    """Every choice of Megatron's, written down here a second time."""
    modules, layers = useful_modules(run), run.model.num_layers // run.parallel.pp
    sets = chain.from_iterable(combinations(modules, n) for n in range(1, len(modules) + 1))
    fields = [
        {"granularity": None, "method": None, "recompute_num_layers": None},
        *({"granularity": "selective", "modules": some} for some in sets),
        *({"granularity": "full", "method": "block", "num_layers": n} for n in range(1, layers)),
        {"granularity": "full", "method": "uniform", "num_layers": 1},
    ]
    out = []
    for each in fields:
        each.pop("recompute_num_layers", None)
        try:
            out.append(run.with_(recompute=type(run.recompute)(**each)))
        except SpecError:
            continue
    return out


@pytest.mark.parametrize("seed", range(9))
def test_the_first_row_is_the_fastest_of_all_that_fit(seed: int) -> None:
    run, hardware = _drawn(seed), hardware_of(GPU.name)
    outside = partial(outside_bytes_of, gpu=GPU)
    space, found = fit(run, hardware, capacity=GPU.capacity_bytes, outside=outside)
    limit = MemoryLimit(GPU.capacity_bytes)
    best = []
    for choice in _choices(run):
        peak = max(stage.peak_bytes for stage in peaks(choice))
        if limit._replace(outside=outside(choice).most).holds(peak):
            best.append(step_time(choice, hardware, DEFAULT).seconds)
    assert bool(best) == bool(found.rows)
    if best:
        assert found.rows[0].time.seconds == pytest.approx(min(best), rel=1e-12)
        assert found.rows[0].run.parallel == run.parallel and found.rows[0].run.batch == run.batch
    assert lowest(space)[0] == min(max(s.peak_bytes for s in peaks(choice)) for choice in _choices(run))


TIGHT = ["fit", "Qwen/Qwen3-8B", "--num-gpus", "8", "--tp", "2", "--seq-length", "16384", "--gpu", "H100"]


def test_what_it_emits_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TIGHT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "bridge-memory/fit/1" and found["best"][0]["slower"] > 0
    assert main([*TIGHT, "--emit", "estimate"]) == 0
    words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
    assert words[:2] == ["bridge-memory", "estimate"]
    assert main([*words[1:], "--json", "--no-phases"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert max(stage["peak_bytes"] for stage in estimate["stages"]) == found["best"][0]["peak_bytes"]
    assert main([*words[1:], "--no-phases", "--require-fit"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["meta-llama/Llama-3.1-70B", "--num-gpus", "8", "--tp", "8"], "no change of activations can make it fit"),
        (["Qwen/Qwen3-32B", "--num-gpus", "8", "--tp", "8", "--seq-length", "65536"], "the lowest peak of them is"),
    ],
)
def test_where_nothing_fits_it_says_by_how_much(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["fit", *words, "--gpu", "H100"]) == 1
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--headroom", "-1"], "--headroom"), (["--headroom", "nan"], "--headroom"), (["--top", "0"], "--top"),
        (["--tp", "1", "--engine", "fsdp2"], "engine (fsdp2)"), (["--tp", "3"], "--tp"),
        (["--row", "900", "--emit", "bridge"], "--row"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main([*TIGHT, *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
