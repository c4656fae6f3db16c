"""Every option of a Megatron run, alone and in random pairs, searched as arrays and one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tiers import few_fast

from bridge_memory import (
    BatchSpec,
    ModelSpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
    peaks,
    resolve_model,
)
from bridge_memory.outside.amount import Range
from bridge_memory.plan.found import Refused
from bridge_memory.plan.megatron import many
from bridge_memory.plan.megatron import space as megatron_space
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import AXES, Space, layouts, recomputations
from bridge_memory.spec.fields import Rule, rules_of
from bridge_memory.spec.run import GROUPS
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import step_time

H100 = hardware_of("H100")
GPUS = 4
#: Model -> the layers that are kept: dense; experts; latent attention, MTP, shared experts; Mamba; windows, sinks and
#: biases; gates and delta nets; norms after blocks and soft caps; learned positions and dropout.
MODELS = {
    "meta-llama/Llama-3.2-1B": (0, 4), "Qwen/Qwen3-30B-A3B": (0, 4), "deepseek-ai/DeepSeek-V3": (2, 6),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (0, 8), "openai/gpt-oss-20b": (0, 4),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (0, 4), "google/gemma-2-2b": (0, 4), "openai-community/gpt2": (0, 4),
}  # fmt: skip
#: Groups of options of Megatron's engines.
OPTIONS = ("parallel", "batch", "precision", "data_parallel", "optimizer", "peft", "recompute", "implementation",
           "deepspeed")  # fmt: skip
#: What a search varies, and the sizes that it is given.
VARIED = {field for fields in AXES.values() for field in fields if not field.startswith(("recompute", "parallel.num"))}
VARIED |= {"parallel.world_size", "batch.global_batch_size"}
#: Options of engines with layers of another trainer: no value is taken here.
OF_OTHERS = {"data_parallel.sync_each_batch", "optimizer.paged", "peft.use_dora"}
#: Options without which others are refused.
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"precision.fp8": "hybrid", "precision.fp8_recipe": "tensorwise"},
    {"precision.fp8": "hybrid", "precision.fp8_recipe": "delayed"},
    {"precision.fp8": "e4m3", "precision.fp8_recipe": "mxfp8", "implementation.gpu_arch": "blackwell"},
    {"precision.fp8": "e4m3", "precision.fp8_recipe": "blockwise"},
    {"precision.fp4": "e2m1", "implementation.gpu_arch": "blackwell"},
    {"precision.params_dtype": "fp32"},
    {"transformer_impl": "local"},
    {"data_parallel.engine": "megatron_fsdp", "data_parallel_sharding_strategy": "optim_grads_params"},
    {"data_parallel.engine": "megatron_fsdp", "data_parallel_sharding_strategy": "optim_grads_params",
     "fsdp_double_buffer": True},
    {"data_parallel.engine": "megatron_deepspeed"},
    {"data_parallel.engine": "megatron_deepspeed", "deepspeed.stage": 3},
    {"use_precision_aware_optimizer": True},
    {"use_distributed_optimizer": False},
    {"parallel.pipeline_model_parallel_size": 2},
    {"parallel.pipeline_model_parallel_size": 2, "parallel.virtual_pipeline_model_parallel_size": 2},
    {"peft.scheme": "lora", "peft.dim": 16},
    {"recompute.granularity": "full", "recompute.method": "uniform", "recompute.num_layers": 1},
    {"recompute.granularity": "full", "recompute.method": "block", "recompute.num_layers": 1},
    {"recompute.granularity": "selective"},
    {"recompute.granularity": "full", "recompute.method": "uniform", "recompute.num_layers": 1,
     "parallel.sequence_parallel": False},
    {"moe_expert_capacity_factor": 1.25},
    {"overlap_moe_expert_parallel_comm": True, "parallel.expert_model_parallel_size": 2},
    {"overlap_moe_expert_parallel_comm": True, "parallel.pipeline_model_parallel_size": 2,
     "parallel.virtual_pipeline_model_parallel_size": 2, "parallel.expert_model_parallel_size": 2},
    {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", "moe_router_dtype": "fp32",
     "use_transformer_engine_op_fuser": True, "megatron_core": (0, 19), "moe_expert_rank_capacity_factor": 1.5},
    {"offload_modules": ("core_attn",)},
    {"policy_loss": "verl"},
    {"batch.packed_sequences": True},
    {"cuda_graph_impl": "transformer_engine"}, {"cuda_graph_impl": "full_iteration", "create_attention_mask": True},
    {"implementation.megatron_core": (0, 13)},
    {"implementation.megatron_core": (0, 19), "transformer_engine": (2, 20), "torch": (2, 11)},
)  # fmt: skip
#: Values of numbers, which have no names: some that refuse a part of the layouts.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "batch.seq_length": (96, 1008, 2048, 6144), "batch.micro_batch_size": (1,),
    "implementation.megatron_core": ((0, 12), (0, 14), (0, 17), (0, 19)),
    "implementation.transformer_engine": ((2, 2), (2, 11), (2, 20)), "implementation.torch": ((2, 4), (2, 11)),
    "implementation.moe_imbalance": (1.7,), "implementation.cublas_workspace_bytes": (0, 1 << 26),
    "parallel.pipeline_model_parallel_layout": (None,),
}


def values_of(name: str, rule: Rule) -> tuple[Any, ...]:
    """Values of one option."""
    if name in NUMBERS:
        return NUMBERS[name]
    if rule.names:
        return tuple((n,) for n in rule.names) if tuple in rule.types else rule.names
    if tuple in rule.types:  # names of modules
        return (("linear_qkv",), ("*.linear_fc1", "linear_proj"))
    if bool in rule.types:
        return (True, False)
    if float in rule.types:
        return (0.0, 0.5) if rule.fraction_below_one is not None else (0.25, 1.0, 2.5)
    return (1, 2, 3, 50_000) if int in rule.types else ()


CASES = [
    (f"{group}.{field}", value)
    for group in OPTIONS for field, rule in rules_of(GROUPS[group]).items()
    if f"{group}.{field}" not in VARIED for value in values_of(f"{group}.{field}", rule)
]  # fmt: skip
NAMES = list(dict.fromkeys(name for name, _ in CASES))


@cache
def model(name: str) -> ModelSpec:
    given = resolve_model(name)
    first, last = MODELS[name]
    return replace(given, layers=given.layers[first:last])


def base_run(name: str, fields: dict[str, Any]) -> RunSpec:
    """Raises SpecError."""
    given = model(name)
    engine = fields.get("data_parallel.engine", "")
    tp = 1 if engine == "megatron_deepspeed" else 2
    sizes = ParallelSpec(
        world_size=GPUS, tensor_model_parallel_size=tp, expert_tensor_parallel_size=1 if given.has_experts else None
    )
    return RunSpec(
        model=given, parallel=sizes, batch=BatchSpec(seq_length=2048, global_batch_size=24)
    ).with_fields(**fields)  # fmt: skip


def spaces_with(chance: random.Random, *options: dict[str, Any]) -> Iterator[Space]:
    """Spaces around runs that have these options, with others beside them where they are refused alone."""
    models = chance.sample(sorted(MODELS), len(MODELS))
    for beside in BESIDE:
        for name in models:
            fields = dict(beside)
            for one in options:
                fields |= one
            try:
                base = base_run(name, fields)
            except SpecError:
                continue
            if base.implementation.torch_layers:
                continue  # ``search`` refuses them
            fixed = {"split"} if any(field.startswith("parallel.num_layers") for field in fields) else set()
            fixed |= {"recompute"} if any(field.startswith("recompute.") for field in fields) else set()
            ranges = {"mbs": (1, 4), "vpp": (1, 2)}
            yield Space(base, GPUS, 8, frozenset(fixed), ranges, global_batch_size=24)
            break


def check(space: Space, chance: random.Random, number: int, capacity: int = 1 << 60) -> int:
    """Everything that a search as arrays says of a space, beside single layouts. Returns how many layouts fit."""
    refused = Refused()
    runs = [run for alike in layouts(space, refused) for run in alike]
    ours = search(space, H100, capacity=capacity, outside=lambda run: Range(0, 1 << 30))
    assert ours.one_by_one is None and ours.refused == refused and ours.looked_at == len(runs)
    known = set(map(repr, runs))
    of_arrays = list(ours.rows.peaks())
    for i in chance.sample(range(len(ours.rows)), min(number, len(ours.rows))):
        row = ours.rows[i]
        assert repr(row.run) in known
        assert row.peak == of_arrays[i] == max(stage.peak_bytes for stage in peaks(row.run)), row.run
        assert row.time.seconds == step_time(row.run, H100).seconds
        assert seconds_of(ours.rows, i) == pytest.approx(row.time.seconds, rel=1e-9)
    return len(ours.rows)


def seconds_of(rows: Any, i: int) -> float:
    """The step time of a row as the arrays have it."""
    seconds: float = rows.seconds(i)
    return seconds


@pytest.fixture
def few_recomputations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sets of recomputation of a pipeline three: a trace of every block is made for each."""

    def few(space: Space, chunks: int) -> Iterator[RecomputeSpec]:
        first, *others = recomputations(space, chunks)
        yield first
        yield from random.Random(space.base.model.name).sample(others, min(2, len(others)))

    for module in (many, megatron_space):
        monkeypatch.setattr(module, "recomputations", few)


def same(space: Space, capacity: int) -> None:
    """A whole search as arrays is the one of single layouts: rows, order, counts and refusals."""
    ours, theirs = (
        search(space, H100, capacity=capacity, outside=lambda run: Range(0, 1 << 30), batched=batched)
        for batched in (True, False)
    )
    objects = {name: getattr(theirs, name) for name in ("rows", "one_by_one", "keeps", "refuses", "improves")}
    assert ours._replace(**objects) == theirs
    assert list(ours.rows) == list(theirs.rows)


def drawn(chance: random.Random, names: Sequence[str]) -> dict[str, Any]:
    """A value of each option."""
    return {name: chance.choice([value for option, value in CASES if option == name]) for name in names}


@pytest.mark.usefixtures("few_recomputations")
@pytest.mark.parametrize("number", few_fast(range(24), 4))
def test_many_options_at_once_are_searched_as_arrays(number: int) -> None:
    """Every option in one of these, as many at once as a run takes."""
    chance = random.Random(number)
    left = NAMES[number::24]
    for _ in range(3):
        chance.shuffle(left)
        taken: dict[str, Any] = {}
        for name in left:
            for value in [value for option, value in CASES if option == name]:
                if next(spaces_with(random.Random(number), {**taken, name: value}), None) is not None:
                    taken[name] = value
                    break
        space = next(spaces_with(random.Random(number), taken))
        check(space, chance, 8)
        left = [name for name in left if name not in taken]
        if not left or not taken:
            break
    assert set(left) <= OF_OTHERS


@pytest.mark.parametrize("name", ["google/gemma-2-2b", "deepseek-ai/DeepSeek-V3"])
def test_layouts_of_few_and_of_many_microbatches_are_searched_at_once(name: str) -> None:
    """What every stage holds depends on its pipeline, and few microbatches have other schedules than many."""
    graphs = {"implementation.cuda_graph_impl": "full_iteration", "implementation.create_attention_mask": True}
    space = Space(base_run(name, graphs), GPUS, 8, frozenset({"recompute"}), {"mbs": (1, 4)}, global_batch_size=8)
    assert check(space, random.Random(0), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::8])
def test_an_option_is_searched_as_arrays(name: str) -> None:
    chance = random.Random(name)
    found = 0
    for value in [value for option, value in CASES if option == name]:
        for space, _ in zip(spaces_with(chance, {name: value}), range(2), strict=False):
            found += check(space, chance, 12)
    assert (found > 0) != (name in OF_OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_options_are_searched_as_arrays(seed: int) -> None:
    chance = random.Random(seed)
    taken = 0
    while taken < 4:
        options = drawn(chance, chance.sample(NAMES, chance.choice((2, 2, 3, 4))))
        some = list(spaces_with(chance, options))
        if some:
            taken += 1
            space = chance.choice(some)
            peaks_of_rows = search(space, H100, capacity=1 << 60, outside=lambda run: Range(0, 0)).rows.peaks()
            few = sorted(peaks_of_rows)
            same(space, few[chance.randrange(len(few))] if few else 1 << 30)
