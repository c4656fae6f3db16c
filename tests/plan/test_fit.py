"""``fit``: the fastest recomputation with which a layout fits."""

from __future__ import annotations

import json
import random
import shlex
from functools import partial
from itertools import chain, combinations, product

import pytest
from tiers import few_fast

from bridge_memory import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError, Verdict, peaks
from bridge_memory.cli import main
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.found import Limit, Row
from bridge_memory.plan.megatron.fit import fit
from bridge_memory.plan.megatron.space import useful_modules
from bridge_memory.plan.reserve import Reserve
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.speed.constants import DEFAULT
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import step_time

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


def _recomputations(run: RunSpec) -> list[dict[str, object]]:
    """Every choice of Megatron's, written down here a second time."""
    first = run.parallel.num_layers_in_first_pipeline_stage
    modules, layers = useful_modules(run), first or run.model.num_layers // run.parallel.pp
    sets = chain.from_iterable(combinations(modules, n) for n in range(1, len(modules) + 1))
    return [
        {"granularity": None},
        *({"granularity": "selective", "modules": some} for some in sets),
        *({"granularity": "full", "method": "block", "num_layers": n} for n in range(1, layers)),
        {"granularity": "full", "method": "uniform", "num_layers": 1},
    ]


def _enumerated(run: RunSpec, vary: tuple[str, ...]) -> list[RunSpec]:
    """Every combination, no two of them left out for being alike."""
    names = ("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear")
    sets = [some for n in range(len(names) + 1) for some in combinations(names, n)] if "offload" in vary else [()]
    shares = [n / 10 for n in range(11)] if "optimizer" in vary else [0.0]
    recomputations = _recomputations(run) if "recompute" in vary else [{"granularity": None}]
    own = run.optimizer
    out = [run]
    for recompute, modules, share in product(recomputations, sets, shares):
        if recompute["granularity"] == "full" and modules:
            continue
        away = {"optimizer_cpu_offload": bool(share)}
        away |= {"use_precision_aware_optimizer": True, "optimizer_offload_fraction": share} if share else {}
        if "optimizer" not in vary:
            away = {"optimizer": own}
        try:
            out.append(
                run.with_fields(recompute=RecomputeSpec(**recompute), offload_modules=modules, **away)  # type: ignore[arg-type]
            )
        except SpecError:
            continue
    return out


def _front(pairs: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Those than which no other is as fast and smaller."""
    out: list[tuple[float, int]] = []
    for seconds, peak in sorted(pairs):
        if not out or peak < out[-1][1]:
            out.append((seconds, peak))
    return out


@pytest.mark.parametrize(
    ("seed", "vary"),
    few_fast(
        [
            (1, ("offload", "optimizer")), *((seed, ("recompute",)) for seed in range(9)), (0, ("offload",)),
            (2, ("recompute", "optimizer")), (4, ("recompute", "offload")), (5, ("recompute", "offload", "optimizer")),
            (7, ("offload", "optimizer")),
        ],
        5,
    ),
)  # fmt: skip
def test_the_rows_are_the_fastest_of_all_that_fit(seed: int, vary: tuple[str, ...]) -> None:
    _compared(_drawn(seed), vary)


#: Latent attention; buffers that depend on the modules; a step of the optimizer that is the peak, and that offloading
#: changes; stages that are not equal; settings that the run has already.
OTHERS: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "latent": (
        "moonshotai/Moonlight-16B-A3B", {"world_size": 8, "expert_model_parallel_size": 8}, ("offload", "optimizer"),
    ),
    "overlap": (
        "Qwen/Qwen3-30B-A3B",
        {"world_size": 8, "expert_model_parallel_size": 8, "overlap_moe_expert_parallel_comm": True}, ("offload",),
    ),
    "eight-bit states": (
        "meta-llama/Llama-3.2-1B",
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "seq_length": 1024},
        ("recompute", "optimizer"),
    ),
    "uneven": (
        "meta-llama/Llama-3.2-3B",
        {"world_size": 4, "pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 10,
         "seq_length": 16384}, ("recompute",),
    ),
    "given": (
        "meta-llama/Llama-3.1-8B",
        {"world_size": 4, "offload_modules": ("core_attn",), "optimizer_cpu_offload": True,
         "optimizer_offload_fraction": 0.35, "use_precision_aware_optimizer": True}, ("offload", "optimizer"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", few_fast(OTHERS))
def test_other_runs_have_the_same_optimum(name: str) -> None:
    model, fields, vary = OTHERS[name]
    run = RunSpec(model=model).with_fields(**{"seq_length": 4096, "global_batch_size": 32, **fields})
    _compared(run, vary)


def _compared(run: RunSpec, vary: tuple[str, ...]) -> None:
    """With every combination, one by one."""
    hardware = hardware_of(GPU.name)
    outside = partial(outside_bytes_of, gpu=GPU)
    found = fit(run, hardware, capacity=GPU.capacity_bytes, outside=outside, vary=vary)
    limit, reserve = Limit(GPU.capacity_bytes, outside), Reserve(Limit(GPU.capacity_bytes, outside))
    fitting, keeping, every = [], [], []
    for choice in _enumerated(run, vary):
        stages = peaks(choice)
        peak = max(stage.peak_bytes for stage in stages)
        every.append(peak)
        free = limit.headroom(choice, peak).least
        if free >= 0:
            time = step_time(choice, hardware, DEFAULT)
            fitting.append((time.seconds, peak))
            if reserve.kept(Row(choice, peak, 0, free, time)):
                keeping.append(fitting[-1])
    rows = [(row.time.seconds, row.peak) for row in found.rows]
    assert [peak for _, peak in _front(rows)] == [peak for _, peak in _front(fitting)]
    assert [row[0] for row in _front(rows)] == pytest.approx([row[0] for row in _front(fitting)], rel=1e-12)
    ranked = found.ranked(10**6)
    ours = [(row.time.seconds, row.peak) for row in ranked.rows[: ranked.keeping]]
    assert [peak for _, peak in ours] == [peak for _, peak in _front(keeping)]
    assert [row[0] for row in ours] == pytest.approx([row[0] for row in _front(keeping)], rel=1e-12)
    assert found.lowest.peak == min(every)
    for row in (*found.rows[:3], found.rows[-1]) if rows else ():
        assert row.run.parallel == run.parallel and row.run.batch == run.batch
        assert row.peak == peaks(row.run)[row.stage].peak_bytes
        assert row.time.seconds == pytest.approx(step_time(row.run, hardware, DEFAULT).seconds, rel=1e-12)


TIGHT = ["fit", "Qwen/Qwen3-8B", "--num-gpus", "8", "--tp", "2", "--seq-length", "16384", "--gpu", "H100"]


MOE = ["fit", "Qwen/Qwen3-30B-A3B", "--num-gpus", "16", "--ep", "8", "--global-batch-size", "512", "--gpu", "H100"]
#: Settings that the answer has to take away.
GIVEN = [*TIGHT, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "4"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [TIGHT, MOE, GIVEN], ids=["dense", "experts", "given"])
def test_what_it_emits_fits(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    assert found["schema"] == "bridge-memory/fit/2" and best["changed"]
    for how in ("estimate", "flags"):
        assert main([*command, "--emit", how]) == 0
        words = shlex.split(capsys.readouterr().out.replace("\\\n", " "))
        if how == "flags":
            words = ["bridge-memory", "estimate", *command[1:], *words]
        assert words[:2] == ["bridge-memory", "estimate"]
        assert main([*words[1:], "--json", "--no-phases"]) == 0
        estimate = json.loads(capsys.readouterr().out)
        assert max(stage["peak_bytes"] for stage in estimate["stages"]) == best["peak_bytes"]
        assert main([*words[1:], "--no-phases", "--require-fit"]) == 0
        capsys.readouterr()


def test_megatron_lm_takes_what_is_offloaded(capsys: pytest.CaptureFixture[str]) -> None:
    """``validate_args``: an offloaded optimizer asks for a precision-aware one; modules for the switch of all."""
    assert main([*MOE, "--vary", "offload,optimizer", "--emit", "megatron-args"]) == 0
    words = capsys.readouterr().out.split()
    assert ("--optimizer-cpu-offload" in words) <= ("--use-precision-aware-optimizer" in words)
    assert ("--offload-modules" in words) <= ("--fine-grained-activation-offloading" in words)
    assert "--optimizer-cpu-offload" in words or "--offload-modules" in words


def test_full_recomputation_and_offloaded_modules_are_not_combined() -> None:
    run = _drawn(0)
    found = fit(run, hardware_of("H100"), capacity=10**15, outside=partial(outside_bytes_of, gpu=GPU))
    every = [row.run for row in found.rows]
    assert not any(r.recompute.granularity == "full" and r.implementation.offload_modules for r in every)
    assert any(r.recompute.granularity == "selective" and r.implementation.offload_modules for r in every)


def test_a_search_that_is_stopped_keeps_what_it_found() -> None:
    def stop(looked_at: int, fitting: int) -> None:
        if looked_at == 5:
            raise KeyboardInterrupt

    found = fit(
        _drawn(0), hardware_of("H100"), capacity=10**15, outside=partial(outside_bytes_of, gpu=GPU), vary=["recompute"],
        progress=stop,
    )  # fmt: skip
    assert found.stopped and found.looked_at == len(found.rows) == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["Llama-3.1-70B", "--tp", "8", "--vary", "recompute,offload"], "no change of activations can make it fit"),
        (["Qwen3-32B", "--tp", "8", "--seq-length", "65536", "--vary", "recompute"], "the lowest peak of them is"),
    ],
)
def test_where_nothing_fits_it_says_by_how_much(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["fit", *words, "--num-gpus", "8", "--gpu", "H100"]) == 1
    assert says in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--headroom", "-1"], "--headroom"), (["--headroom", "nan"], "--headroom"), (["--top", "0"], "--top"),
        (["--tp", "1", "--engine", "zero3"], "engine (zero3)"), (["--tp", "3"], "--tp"),
        (["--row", "900", "--emit", "bridge"], "--row"), (["--vary", "recompute,mbs"], "vary (mbs)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main([*TIGHT, *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_choice_whose_whole_job_may_not_fit_stands_after_the_first_that_does() -> None:
    """The first two of the front are not certain; with none that is, the order is that of time."""
    run = RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8))
    found = fit(run, hardware_of(GPU.name), capacity=GPU.capacity_bytes, outside=partial(outside_bytes_of, gpu=GPU),
                vary=["recompute"])  # fmt: skip
    plain = found.ranked(10**6)
    asked: list[Row] = []  # type: ignore[type-arg]

    def third(row: Row) -> Verdict:  # type: ignore[type-arg]
        asked.append(row)
        return Verdict.TIGHT if row in plain.rows[:2] else Verdict.FITS

    some = found._replace(whole=third).ranked(10**6)
    assert asked == list(plain.rows[:3]) and some.keeping == plain.keeping - 2 > 1
    assert some.rows == (*plain.rows[2 : plain.keeping], *plain.rows[:2], *plain.rows[plain.keeping :])
    assert found._replace(whole=lambda row: Verdict.TIGHT).ranked(10**6) == plain


def test_of_few_choices_the_one_whose_job_may_fit_leads() -> None:
    """Fewer than a dozen, and none is certain: one that may fit goes before faster ones that do not."""
    run = RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8))
    found = fit(run, hardware_of(GPU.name), capacity=GPU.capacity_bytes, outside=partial(outside_bytes_of, gpu=GPU),
                vary=["recompute"])  # fmt: skip
    plain = found.ranked(10**6)
    rows = plain.rows[: plain.keeping]
    few = found._replace(rows=rows[:5])

    def second(row: Row) -> Verdict:  # type: ignore[type-arg]
        return Verdict.TIGHT if row == rows[1] else Verdict.DOES_NOT_FIT

    assert few._replace(whole=second).ranked(3).rows[0] == rows[1]


def test_the_first_row_resumes_though_a_dozen_faster_ones_do_not() -> None:
    """Offloaded optimizer states are on the GPU again while a checkpoint is read."""
    from bridge_memory import estimate, fits
    from bridge_memory import fit as ask

    parallel = ParallelSpec(world_size=8, tensor_model_parallel_size=8, sequence_parallel=True)
    found = ask(RunSpec(model="Qwen/Qwen3-32B", parallel=parallel, batch=BatchSpec(seq_length=16384)), gpu="H100")
    first, fastest = found.ranked(1).rows[0], found.rows[0]
    assert [fits(estimate(row.run), ["H100"])[0].decided_by for row in (first, fastest)] == ["", "resume"]
    assert fits(estimate(first.run), ["H100"])[0].fits
