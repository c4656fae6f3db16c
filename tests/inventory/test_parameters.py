"""Sums over lists that say once what is there many times, against the same parameters one by one."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parameters_of import stage_parameters

from bridge_memory.components import Role
from bridge_memory.engines.megatron_ddp import MegatronDDP
from bridge_memory.inventory.stack import Unit, chunk_units, named_parameters
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, DataParallelSpec, ParallelSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.parameters import (
    Column,
    Parameter,
    ParameterList,
    Repeated,
    Use,
    aligned_elements,
    elements,
    gemm_elements,
    matrix_elements,
    rounded_bytes,
)

COLUMNS: tuple[Column, ...] = (
    (elements, 0), (aligned_elements, 64), (gemm_elements, 0), (matrix_elements, 0), (rounded_bytes, 2),
)  # fmt: skip
SHAPES = st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple)
PARAMETERS = st.builds(
    Parameter, st.sampled_from(["weight", "experts.*.weight", "bias*"]), SHAPES, st.booleans(), st.booleans(),
    st.sampled_from(Use),
)  # fmt: skip
LISTS = st.lists(
    st.builds(Repeated, st.lists(PARAMETERS, min_size=1, max_size=3).map(tuple), st.integers(1, 4)), max_size=4
).map(ParameterList)


def one_by_one(parameters: Sequence[Parameter], *, experts: bool) -> tuple[int, ...]:
    """``COLUMNS`` from the shapes: elements, from one 128-byte boundary of 16-bit values to the next, in weights of
    GEMMs that fp8 copies, in what Muon takes for a matrix, in blocks of 512 bytes."""
    mine = [p for p in parameters if p.expert is experts]
    numels = [prod(p.shape) for p in mine]
    matrices = [len(p.shape) == 2 and p.use not in (Use.EMBEDDING, Use.OUTPUT) for p in mine]
    gemms = [matrix and p.use not in (Use.ROUTER, Use.UNQUANTIZED) for p, matrix in zip(mine, matrices, strict=True)]
    return (
        sum(numels), sum(ceil(n / 64) * 64 for n in numels),
        sum(n for n, gemm in zip(numels, gemms, strict=True) if gemm),
        sum(n for n, matrix in zip(numels, matrices, strict=True) if matrix),
        sum(ceil(2 * n / 512) * 512 for n in numels),
    )  # fmt: skip


@given(LISTS)
def test_sums_are_those_of_the_parameters_one_by_one(found: ParameterList) -> None:
    parameters = list(found.expanded())
    assert found.sums(COLUMNS) == (one_by_one(parameters, experts=False), one_by_one(parameters, experts=True))
    assert found.numel == sum(p.numel for p in parameters)
    assert found.sums(COLUMNS[::-1])[0] == found.sums(COLUMNS)[0][::-1]
    for experts in (False, True):
        in_order = [p.numel for few, times in found.runs(experts) for _ in range(times) for p in few]
        assert in_order == [p.numel for p in parameters if p.expert is experts]


def test_experts_are_numbered_and_others_are_not() -> None:
    found = ParameterList([
        Repeated((Parameter("router.weight", (4, 8)),)),
        Repeated((Parameter("experts.*.fc1.weight", (8, 8), True), Parameter("experts.*.fc2.weight", (8, 8), True)), 2),
    ])
    assert [p.name for p in found.expanded("mlp.")] == [
        "mlp.router.weight", "mlp.experts.0.fc1.weight", "mlp.experts.0.fc2.weight", "mlp.experts.1.fc1.weight",
        "mlp.experts.1.fc2.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B"])
def test_units_of_a_stage_sum_to_its_named_parameters(name: str) -> None:
    parallel = ParallelSpec(
        world_size=16, tensor_model_parallel_size=2, pipeline_model_parallel_size=1, expert_model_parallel_size=8
    ) if "Llama" not in name else ParallelSpec(world_size=16, tensor_model_parallel_size=2)
    run = RunSpec(model=resolve_model(name), parallel=parallel)
    (shape,) = layout(run.model, run.parallel).shapes(run.model)[0]
    units = chunk_units(run.model, shape, context_of(run))
    (parameters,) = stage_parameters(run, 0)
    assert list(named_parameters(units)) == parameters
    assert len({p.name for p in parameters}) == len(parameters)
    for experts in (False, True):
        sums = [u.parameters.sums(COLUMNS)[experts] for u in units for _ in range(u.times)]
        assert tuple(map(sum, zip(*sums, strict=True))) == one_by_one(parameters, experts=experts)


# ---- buckets ----


def laid_out(numels: Sequence[int], bucket_size: int | None, world: int) -> int:
    """Elements of a gradient buffer, parameter by parameter, last first.

    megatron-core ``distributed/param_and_grad_buffer.py: _ParamAndGradBuffer.__init__`` under the distributed
    optimizer: a parameter starts at a multiple of 64, a bucket ends once it has ``bucket_size`` elements, at a multiple
    of lcm(data-parallel size, 128).
    """
    divisor = lcm(world, 128)
    param_start = bucket_start = end = 0
    in_bucket = 0
    for numel in reversed(numels):
        param_start = -(-param_start // 64) * 64
        end = param_start + numel
        in_bucket += 1
        if bucket_size is not None and end - bucket_start >= bucket_size:
            bucket_start = param_start = -(-end // divisor) * divisor
            in_bucket = 0
        else:
            param_start = end
    return -(-end // divisor) * divisor if in_bucket else bucket_start


def gradient_elements(run: RunSpec, units: Sequence[Unit]) -> dict[bool, int]:
    """Elements of gradients of a stage of one chunk: dense, experts."""
    found = MegatronDDP(run).stage([units])
    amounts = {line.experts: nbytes for line, nbytes in found.amounts if line.role is Role.GRADIENTS}
    return {experts: nbytes // 4 for experts, nbytes in amounts.items()}


UNITS = st.lists(
    st.builds(lambda parameters, times: Unit(Label.LAYER, "decoder.layers.{}.", parameters, times), LISTS,
              st.integers(1, 30)),
    min_size=1, max_size=4,
)  # fmt: skip


@given(UNITS, st.none() | st.integers(1, 200_000), st.sampled_from([1, 2, 3, 8, 96]), st.booleans())
def test_a_buffer_of_repeated_units_is_laid_out_as_parameter_by_parameter(
    units: list[Unit], bucket: int | None, world: int, apart: bool
) -> None:
    """Experts lie ``apart`` with expert parallelism, else among the dense parameters in their order."""
    ep = 2 if apart else 1
    run = RunSpec(
        model=resolve_model("allenai/OLMoE-1B-7B-0924"),
        parallel=ParallelSpec(world_size=ep * world, expert_model_parallel_size=ep),
        batch=BatchSpec(global_batch_size=ep * world),
        data_parallel=DataParallelSpec(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=bucket is not None,
            bucket_size=bucket,
        ),
    )
    found = gradient_elements(run, units)
    parameters = list(named_parameters(units))
    if not apart:
        assert sum(found.values()) == laid_out([p.numel for p in parameters], bucket, world)
        return
    for experts in (False, True):
        numels = [p.numel for p in parameters if p.expert is experts]
        assert found.get(experts, 0) == laid_out(numels, bucket, world if experts else ep * world)


def test_megatrons_own_bucket_size() -> None:
    """``DistributedDataParallel.__init__``: 40 M elements, or a million a rank; one bucket where nothing overlaps. The
    hand count: three layers of 30 M and one of 5 M, last first, on 96 ranks (multiples of 384)."""
    million = 1_000_000

    def unit(n: int, times: int) -> Unit:
        return Unit(Label.LAYER, "decoder.layers.{}.", ParameterList([Repeated((Parameter("w", (n,)),))]), times)

    units = [unit(5 * million, 1), unit(30 * million, 3)]
    for world, overlap, expected in (
        # 30 and 30 M reach 40 M: 60 M + 0, a multiple of 128; then 30 M + 5 M.
        (1, True, [60 * million, 35 * million]),
        # A bucket of 96 M is never full.
        (96, True, [95 * million]),
        (1, False, [95 * million]),
    ):
        run = RunSpec(
            model=resolve_model("meta-llama/Llama-3.2-1B"), parallel=ParallelSpec(world_size=world),
            batch=BatchSpec(global_batch_size=world),
            data_parallel=DataParallelSpec(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
            ),
        )
        divisor = lcm(world, 128)
        assert gradient_elements(run, units) == {False: sum(-(-n // divisor) * divisor for n in expected)}
