"""Megatron-FSDP: buckets counted by hand from its source, what moves beside each layer, its options, measured runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge_memory.accuracy.predictions import predict
from bridge_memory.accuracy.records import load_runs
from bridge_memory.components import MADE_BY_FIRST_STEP, Lifetime, Part, Role, State
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.engine import StageState
from bridge_memory.engines.fsdp_buckets import Sharding, aligned_to_rows, places_of
from bridge_memory.engines.megatron_fsdp import fsdp_states
from bridge_memory.estimation import estimate
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.job.megatron.building import building
from bridge_memory.outside.amount import total
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.chain import Concurrent, EngineBytes, Label, Link, with_engine
from bridge_memory.tapes.context import context_of

MIB = 1 << 20
FSDP = DataParallelSpec(engine="megatron_fsdp", data_parallel_sharding_strategy="optim_grads_params")
DENSE = LayerSpec(AttentionSpec(8, 8, 64), MLPSpec(2048, gated=True))
EXPERTS = LayerSpec(AttentionSpec(8, 8, 64), MoESpec(8, 2, 1024))
#: Elements of DENSE at h = 512: qkv 3 x 512 x 512, proj 512 x 512, fc1 2 x 2048 x 512, fc2 2048 x 512, two norms.
LAYER = 4 * 512**2 + 3 * 2048 * 512 + 2 * 512
#: Of 2,048 tokens at h = 512, embedding and output layer, and the final norm.
OUTSIDE = 2 * 2048 * 512 + 512


def small(*layers: LayerSpec, world: int = 4, ep: int = 1, core: tuple[int, int] = (0, 16), **more: object) -> RunSpec:
    return RunSpec(
        model=ModelSpec(name="small", model_type="test", hidden_size=512, vocab_size=2048, layers=layers),
        parallel=ParallelSpec(world_size=world, expert_model_parallel_size=ep),
        batch=BatchSpec(seq_length=64),
        data_parallel=replace(FSDP, **more),
        implementation=ImplementationSpec(megatron_core=core, expandable_segments=True),
    )


def state(run: RunSpec) -> StageState:
    ctx = context_of(run)
    shapes = layout(run.model, run.parallel).shapes(run.model)[0]
    return engine_of(run).stage([chunk_units(run.model, shape, ctx) for shape in shapes])


def beside(run: RunSpec) -> EngineBytes:
    return state(run).concurrent[0]


def kept(run: RunSpec, role: Role | State) -> int:
    return sum(n for line, n in state(run).amounts if role in (line.role, line.state))


# ---- buckets ----


@pytest.mark.parametrize(
    ("shapes", "world", "elements"),
    [
        # Rows of 512: 512 x 512 + 512 fill 513 rows, which 4 ranks share as 516.
        ([((512, 512), 1), ((512,), 1)], 4, 516 * 512),
        # Rows of 6, then of 4: a row is 12. 60 elements are 5 rows; 16 take 2, whose last 8 hold the 7; 7 in all, of 8.
        ([((10, 6), 1), ((4, 4), 1), ((7,), 1)], 2, 8 * 12),
        # Two that end a row in 4 and 8 elements share its 12: 16 + 20 elements are 3 rows and not 4.
        ([((12, 12), 1), ((4, 4), 1), ((5, 4), 1)], 1, (12 + 3) * 12),
        # Experts are alike: 3 x 2 rows.
        ([((2, 8), 3)], 4, 8 * 8),
    ],
)
def test_every_rank_has_whole_rows(shapes: list[tuple[tuple[int, ...], int]], world: int, elements: int) -> None:
    """``build_data_parallel_buffer_index`` by hand."""
    assert aligned_to_rows(shapes, world) == elements


def test_the_buckets_of_the_measured_gpt_runs() -> None:
    """TP 2, 4 ranks: a layer has 1,577,728 elements in rows of 1,024, padded to 4,096: 1,581,056. Embedding, positions
    and final norm, 13,435,904 in rows of 512, are 13,436,928. As megatron-core 0.16.1 lays them out."""
    run = run_from_megatron_args(f"{GPT} {SHARDED}", world_size=8, megatron_core="0.16.1")
    divided = (13_436_928 + 12 * 1_581_056) // 4
    assert kept(run, State.PARAMETERS) == 2 * divided
    assert kept(run, State.MAIN_PARAMETERS) == kept(run, Role.GRADIENTS) == 4 * divided
    older = replace(run, implementation=replace(run.implementation, megatron_core=(0, 13)))
    assert kept(older, State.PARAMETERS) == 2 * (13_435_904 + 12 * 1_577_728) // 4


GPT = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 4 --global-batch-size 32 --vocab-size 50257 --bf16"
)
SHARDED = (
    "--tensor-model-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--use-distributed-optimizer"
)


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "optimizer"),
    [("no_shard", 1, 1, 1), ("optim", 1, 1, 4), ("optim_grads", 1, 4, 4), ("optim_grads_params", 4, 4, 4)],
)
def test_a_strategy_says_what_is_divided(strategy: str, weights: int, gradients: int, optimizer: int) -> None:
    """Over 4 ranks; all sizes are multiples of 4 x 2,048 elements but the norms', which fill one row more."""
    run = small(DENSE, DENSE, data_parallel_sharding_strategy=strategy)
    n = 2 * LAYER + OUTSIDE
    assert kept(run, Role.WEIGHTS) == pytest.approx(2 * n / weights, rel=0.01)
    assert kept(run, Role.GRADIENTS) == pytest.approx(4 * n / gradients, rel=0.01)
    assert kept(run, Role.OPTIMIZER) == pytest.approx(12 * n / optimizer, rel=0.01)


def test_main_parameters_are_kept_of_fp32_parameters_too() -> None:
    """``main_weight_buffer`` is made whatever the parameters' dtype; until 0.16 a fused optimizer has its own instead,
    which are of the dtype that it is told (TE ``FusedAdam.initialize_state``)."""
    run = small(DENSE)
    run = replace(run, precision=PrecisionSpec(params_dtype="fp32"))
    assert [s.width for s in fsdp_states(run) if s.state is State.MAIN_PARAMETERS] == [4]
    fp16 = OptimizerSpec(use_precision_aware_optimizer=True, main_params_dtype="fp16", store_param_remainders=False)
    fused = replace(run, optimizer=fp16)
    assert [s.width for s in fsdp_states(fused) if s.state is State.MAIN_PARAMETERS] == [2]
    newer = replace(fused, implementation=replace(run.implementation, megatron_core=(0, 17)))
    assert [s.width for s in fsdp_states(newer) if s.state is State.MAIN_PARAMETERS] == [4]


# ---- what moves ----


def test_all_of_a_small_model_is_gathered_ahead() -> None:
    """Half a billion elements ahead: the first of three layers finds all three whole, the last itself. On the way back
    the last finds all. In bf16."""
    found = beside(small(DENSE, DENSE, DENSE)).layers
    padded = (LAYER + 4 * 2048 - 1) // (4 * 2048) * (4 * 2048)
    assert [layer.forward for layer in found] == [3 * 2 * padded, 2 * 2 * padded, 2 * padded]
    own = 4 * padded  # fp32 gradients
    gradients = [3 * own, 2 * own, own]
    outside = found[-1].backward - 3 * 2 * padded - own
    assert outside == pytest.approx(4 * OUTSIDE, rel=0.01)  # of final norm and output layer, with the embedding
    assert [layer.backward for layer in found] == [
        ahead * 2 * padded + made + outside for ahead, made in zip((1, 2, 3), gradients, strict=True)
    ]


def test_a_unit_limits_what_is_gathered_and_what_waits() -> None:
    """Twice a layer waits, so one layer is gathered ahead: four layers, two whole at a time. Three gradients: one being
    made and two that wait, which make room before the fourth joins them."""
    padded = (LAYER + 4 * 2048 - 1) // (4 * 2048) * (4 * 2048)
    found = beside(small(*[DENSE] * 6, suggested_communication_unit_size=2 * padded)).layers
    assert [layer.forward // (2 * padded) for layer in found] == [2, 2, 2, 2, 2, 1]
    outside = found[-1].backward - 2 * 2 * padded - 4 * padded
    whole = [(layer.backward - outside) // (2 * padded) for layer in found]
    # Backward, in bf16 layers: gathered 2 (1 at the first), gradients 2 each: 1, 2, 3, then 4 while one leaves.
    assert whole == [1 + 8, 2 + 8, 2 + 8, 2 + 6, 2 + 4, 2 + 2]


def test_experts_have_buckets_and_ranks_of_their_own() -> None:
    """EP 2 of 4 ranks: a rank's 4 experts, 4 x 3 x 1024 x 512, are divided over 2 ranks and gathered by them. With
    EP 4 one rank has them all: nothing is gathered and no bucket of gradients is made."""
    run = small(EXPERTS, ep=2)
    experts = 4 * 3 * 1024 * 512
    dense = 4 * 512**2 + 2 * 512 + 8 * 512
    found = beside(run).layers[0]
    assert found.forward == pytest.approx(2 * (experts + dense), rel=0.01)
    assert found.backward_at_end - found.backward == pytest.approx(4 * dense, rel=0.01)
    alone = beside(small(EXPERTS, ep=4)).layers[0]
    assert alone.forward == pytest.approx(2 * dense, rel=0.01)


def test_beside_the_loss_older_releases_gather_all_layers_again() -> None:
    """Final norm and output layer lie outside of units: from 0.14 to 0.17 their hooks gather what comes after the
    embedding, all layers of a small model; from 0.18 on nothing, and in 0.13 until it is two layers with their own."""
    padded = (LAYER + 4 * 2048 - 1) // (4 * 2048) * (4 * 2048)
    for core, layers in (((0, 14), 3), ((0, 17), 3), ((0, 18), 0)):
        assert beside(small(DENSE, DENSE, DENSE, core=core)).loss.forward == layers * 2 * padded
    found = beside(small(DENSE, DENSE, DENSE, core=(0, 13)))
    assert found.loss.forward == pytest.approx(2 * 2 * LAYER, rel=0.01)
    assert found.final_norm.backward_at_end == pytest.approx(4 * OUTSIDE, rel=0.01)  # freed when backward begins


@pytest.mark.parametrize(
    ("core", "logged", "whole"),
    [
        ((0, 13), False, OUTSIDE), ((0, 16), False, OUTSIDE + 2 * LAYER), ((0, 16), True, 0),
        ((0, 18), False, OUTSIDE + 2 * LAYER), ((0, 18), True, OUTSIDE),
    ],
)  # fmt: skip
def test_what_is_whole_between_steps(core: tuple[int, int], logged: bool, whole: int) -> None:
    """A step ends with gathering the first bucket, and what comes after it, for the next. Logging the parameters' norm
    frees all (Megatron-LM ``calc_params_l2_norm: stop_communication``), from 0.18 on but what is outside of units."""
    run = small(DENSE, DENSE, core=core)
    run = replace(run, optimizer=OptimizerSpec(log_params_norm=logged))
    assert state(run).gathered_between_steps == pytest.approx(2 * whole, rel=0.01)
    names = [c.name for c in estimate(run).stages[0].carried_over if c.part is Part.DATA_PARALLEL]
    assert names == (["parameters gathered between steps"] if whole else [])


def test_gradients_in_bf16_leave_fp32_copies_until_the_next_step() -> None:
    """``update_main_grads`` casts this rank's part for the optimizer; zero_grad frees it."""
    run = small(DENSE, grad_reduce_in_fp32=False)
    assert state(run).gradient_copies == pytest.approx(4 * (LAYER + OUTSIDE) / 4, rel=0.01)
    left = {c.name: c.lifetime for c in estimate(run).stages[0].carried_over}
    assert left["main gradients in fp32"] is Lifetime.BETWEEN_STEPS


def test_a_link_of_two_layers_has_the_most_of_both() -> None:
    """Recomputed together: (10, 1) and (4, 7) are 10 forward and 7 backward. The loss has its own."""

    def link(label: Label, layers: int = 1) -> Link:
        return Link(label, 1, 100, 200, 200, str, str, layers=layers)

    held = EngineBytes(
        (Concurrent(10, 1, 1), Concurrent(4, 7, 7), Concurrent(2, 3, 3)), loss=Concurrent(5, least_backward=1_000)
    )
    links = [(link(Label.RECOMPUTED, 2), 1), (link(Label.LAYER), 1), (link(Label.LOSS), 1)]
    found = [(x.forward_peak, x.backward_peak) for x, _ in with_engine(links, held)]
    assert found == [(110, 207), (102, 203), (105, 1_000)]


# ---- options ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_sharding_strategy": None}, "engine (megatron_fsdp) needs data_parallel_sharding_strategy"),
        ({"engine": "megatron_ddp"}, "data_parallel_sharding_strategy (optim_grads_params) is for engine megatron_fs"),
        ({"engine": "megatron_ddp", "data_parallel_sharding_strategy": None, "grad_comm_dtype": "bf16"},
         "grad_comm_dtype (bf16) is for engine megatron_fsdp"),
        ({"use_distributed_optimizer": False}, "use_distributed_optimizer (False) is not supported"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as refused:
        small(DENSE, **changes)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_muon_is_refused() -> None:
    """Megatron-LM ``arguments.py: validate_args``."""
    run = small(DENSE)
    with pytest.raises(SpecError, match="optimizer \\(muon\\) is not supported with engine megatron_fsdp"):
        replace(run, optimizer=OptimizerSpec(optimizer="muon"))


def test_main_gradients_have_a_dtype_of_their_own_from_0_17_on() -> None:
    """``--megatron-fsdp-main-grads-dtype`` is "auto", the parameters' dtype, unless given; before,
    ``--accumulate-allreduce-grads-in-fp32`` decides, which bf16 implies."""
    older = run_from_megatron_args(f"{GPT} {SHARDED}", world_size=8, megatron_core="0.16.1")
    newer = run_from_megatron_args(f"{GPT} {SHARDED}", world_size=8, megatron_core="0.17.0")
    given = run_from_megatron_args(
        f"{GPT} {SHARDED} --megatron-fsdp-main-grads-dtype fp32 --suggested-communication-unit-size 1000",
        world_size=8, megatron_core="0.17.0",
    )  # fmt: skip
    assert [r.data_parallel.grad_reduce_in_fp32 for r in (older, newer, given)] == [True, False, True]
    assert given.data_parallel.suggested_communication_unit_size == 1000


# ---- measured ----

RUNS = "tests/data/measurements/runs.jsonl"


@pytest.fixture(scope="module")
def measured():
    """Runs under Megatron-FSDP, by id."""
    return {r.id: r for r in load_runs(RUNS) if "fsdp" in str(dict(r.arguments))}


@pytest.mark.parametrize(
    ("name", "static", "peak"),
    [
        ("gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor/dev_dgxh100_eos@dabfbc4c", 0.003, 0.002),
        ("gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor/dev_dgxh100_coreweave@dabfbc4c", 0.003, 0.002),
        ("gpt/gpt3_mr_mcore_te_tp2_zp_z3_resume_fsdp_dtensor_dgx_a100_1N8G/dev_dgx_h100@46a90b0b", 0.003, 0.002),
    ],
)  # fmt: skip
def test_measured_dense_runs(measured, name: str, static: float, peak: float) -> None:
    (outcome,) = predict(measured[f"megatron-lm/{name}"])
    assert outcome.status == "ok"
    assert abs(outcome.allocated_error) <= static
    assert abs(outcome.max_allocated_error) <= peak


def test_the_model_state_of_a_measured_run_with_experts(measured) -> None:
    name = "gpt3_mr_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router_dgx_a100_1N8G"
    (outcome,) = predict(measured[f"megatron-lm/gpt/{name}/dev@892c4c85"])
    assert abs(outcome.allocated_error) <= 0.003


# ---- megatron-core's own ----


def _oracle_cases() -> dict[str, RunSpec]:
    local = ImplementationSpec(
        transformer_impl="local", moe_grouped_gemm=False, gradient_accumulation_fusion=False, expandable_segments=True
    )
    dense = LayerSpec(AttentionSpec(32, 8, 128), MLPSpec(11008, gated=True))
    experts = LayerSpec(AttentionSpec(32, 8, 128), MoESpec(8, 2, 8192))

    def run(*layers: LayerSpec, seq: int = 512, vocab: int = 2048, ep: int = 1, **more: object) -> RunSpec:
        return RunSpec(
            model=ModelSpec(name="x", model_type="test", hidden_size=4096, vocab_size=vocab, layers=layers),
            parallel=ParallelSpec(world_size=8, expert_model_parallel_size=ep),
            batch=BatchSpec(seq_length=seq),
            data_parallel=replace(FSDP, **more), implementation=local,
        )  # fmt: skip

    return {
        "weights": run(*[dense] * 8),
        "activations": run(*[dense] * 8, seq=4096),
        "a vocabulary": run(*[dense] * 6, vocab=64000),
        "a small unit": run(*[dense] * 8, suggested_communication_unit_size=100_000_000),
        "bf16 gradients": run(*[dense] * 6, grad_reduce_in_fp32=False),
        "parameters whole": run(*[dense] * 4, data_parallel_sharding_strategy="optim_grads"),
        "gradients whole": run(*[dense] * 4, data_parallel_sharding_strategy="optim"),
        "nothing divided": run(*[dense] * 4, data_parallel_sharding_strategy="no_shard"),
        "experts": run(*[experts] * 4, seq=4096, ep=2),
        "both": run(*[dense] * 2, *[experts] * 4, ep=2),
    }


@pytest.mark.parametrize("name", _oracle_cases())
def test_megatron_cores_own_fsdp(name: str) -> None:
    """Its buckets to the element, and the peaks of both passes of its own modules under its own hooks within a fifth
    of a per cent (backward with experts 3: releases up to 0.16 make a rank's part of the sum apart)."""
    pytest.importorskip("megatron.core")
    from fsdp_on_meta import fsdp_passes

    from bridge_memory.engines.megatron_ddp import bucket_elements
    from bridge_memory.inventory.stack import chunk_inventory
    from bridge_memory.rehearsal.world import installed_release

    run = _oracle_cases()[name]
    release = installed_release() or (0, 16)
    run = replace(run, implementation=replace(run.implementation, megatron_core=release))
    found = fsdp_passes(run)
    shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
    ctx = context_of(run)
    units = chunk_units(run.model, shape, ctx)
    ours = Sharding(run).of_chunk(units, places_of(units), bucket_elements(run))
    assert [(b.size, b.numel, b.experts, b.unit) for b in ours] == [
        (b.size, b.numel, b.experts, b.unit) for b in found.buckets
    ]
    stage = engine_of(run).stage([units])
    static = sum(n for line, n in stage.amounts if line.state not in MADE_BY_FIRST_STEP)
    assert static == pytest.approx(found.static_bytes, rel=0.001)
    assert stage.gathered == pytest.approx(found.root_bytes, abs=MIB)
    inventory = chunk_inventory(run.model, shape, ctx, True, stage.concurrent[0])
    assert inventory.forward_peak == pytest.approx(found.forward_bytes, rel=0.002), found.forward_at
    margin = 0.002 if not run.model.has_experts else 0.03
    assert inventory.backward_peak == pytest.approx(found.backward_bytes, rel=margin), found.backward_at


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in _oracle_cases()])
def test_megatron_cores_own_fsdp_is_built_bucket_by_bucket(name: str) -> None:
    pytest.importorskip("megatron.core")
    from fsdp_on_meta import fsdp_built

    from bridge_memory.rehearsal.world import installed_release

    run = _oracle_cases()[name].with_fields(megatron_core=installed_release() or (0, 16))
    found = building(run, 0)
    if name == "nothing divided":
        assert found is None
        return
    assert total(found or ()).most == pytest.approx(fsdp_built(run)[0], rel=1e-3)


DOUBLE = [
    {},
    {"fsdp_db_use_persist_buf_on_alloc_fail": True},
    {"megatron_fsdp_max_pool_double_buffer": True},
]


@pytest.mark.parametrize("name", ["weights", "both"])
@pytest.mark.parametrize("options", DOUBLE, ids=str)
def test_megatron_cores_own_double_buffers(name: str, options: dict[str, bool]) -> None:
    """What stays after the first microbatch beyond what stays without them, and the peaks of both passes."""
    pytest.importorskip("megatron.core")
    from fsdp_on_meta import fsdp_passes
    from megatron.core.distributed import DistributedDataParallelConfig

    from bridge_memory.inventory.stack import chunk_inventory
    from bridge_memory.rehearsal.world import installed_release

    if any(not hasattr(DistributedDataParallelConfig, option) for option in ("fsdp_double_buffer", *options)):
        pytest.skip("a release without this option")
    run = _oracle_cases()[name]
    plain = replace(run, implementation=replace(run.implementation, megatron_core=installed_release() or (0, 16)))
    run = replace(plain, data_parallel=replace(plain.data_parallel, fsdp_double_buffer=True, **options))
    before, found = fsdp_passes(plain), fsdp_passes(run)
    shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
    ctx = context_of(run)
    stage = engine_of(run).stage([chunk_units(run.model, shape, ctx)])
    assert stage.pools == pytest.approx(found.between_bytes - before.between_bytes, rel=1e-6)
    inventory = chunk_inventory(run.model, shape, ctx, True, stage.concurrent[0])
    assert inventory.forward_peak == pytest.approx(found.forward_bytes, rel=0.002), found.forward_at
    assert inventory.backward_peak == pytest.approx(found.backward_bytes, rel=0.002), found.backward_at


def test_the_bytes_of_the_double_buffers() -> None:
    """Two layers' worth of weights in bf16 and of gradients in fp32: of 4096 x (4096 + 2 x 1024) + 4096 x 4096 +
    3 x 4096 x 11008 + 2 x 4096 parameters each, and biases; gradients in bf16 have two bytes."""
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    run = _oracle_cases()["weights"]
    for wide, width in ((True, 4), (False, 2)):
        options = replace(run.data_parallel, fsdp_double_buffer=True, grad_reduce_in_fp32=wide)
        stage = estimate(replace(run, data_parallel=options)).stages[0]
        (pools,) = [c.bytes for c in stage.components if c.name == "double buffers of units"]
        assert pools == pytest.approx(2 * layer * (2 + width), rel=0.003)


def test_double_buffers_are_refused_where_they_do_nothing() -> None:
    run = _oracle_cases()["weights"]
    with pytest.raises(SpecError, match="does nothing without fsdp_double_buffer"):
        replace(run, data_parallel=replace(run.data_parallel, megatron_fsdp_max_pool_double_buffer=True))
    with pytest.raises(SpecError, match="is for engine megatron_fsdp"):
        replace(run, data_parallel=DataParallelSpec(fsdp_double_buffer=True))
