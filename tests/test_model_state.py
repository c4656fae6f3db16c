"""Weights, gradients and optimizer states, hand-counted in bytes a parameter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from spec_groups import groups_of

from bridge_memory.engines.megatron_ddp import dealt_share
from bridge_memory.estimation import StageEstimate, estimate, explain
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.readers import resolve_model
from bridge_memory.spec import DataParallelSpec, ImplementationSpec, ParallelSpec, PrecisionSpec, RunSpec, SpecError
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of

LLAMA = "meta-llama/Llama-3.2-1B"


def stage(name: str = LLAMA, *, dtype: str = "bf16", fp8: str | None = None, arch: str = "hopper", **optimizer: object):
    precision = PrecisionSpec(
        params_dtype=dtype, fp8="e4m3" if fp8 else None, fp8_recipe=fp8 or "delayed",
        fp8_param=bool(optimizer.pop("fp8_param", False)),
    )
    run = RunSpec(
        model=resolve_model(name), parallel=ParallelSpec(world_size=8), precision=precision,
        implementation=ImplementationSpec(gpu_arch=arch), **groups_of(**optimizer),
    )
    return estimate(run).stages[0]


def per_parameter(found: StageEstimate, kind: str, *, shards: int = 1) -> float:
    return found.bytes_of(kind) * shards / found.parameters


def test_adam_in_mixed_precision_shards_twelve_bytes() -> None:
    assert per_parameter(stage(), "optimizer", shards=8) == pytest.approx(12, rel=1e-4)
    assert per_parameter(stage(dtype="fp32"), "optimizer", shards=8) == pytest.approx(8, rel=1e-4)
    assert per_parameter(stage(optimizer="sgd"), "optimizer", shards=8) == pytest.approx(8, rel=1e-4)


def test_an_offloaded_optimizer_leaves_megatrons_main_parameters_on_the_gpu() -> None:
    """DistributedOptimizer makes fp32 shards on the GPU and hands them to HybridDeviceOptimizer, which copies them to
    the host and back: only the moments are away."""
    away = stage(optimizer_cpu_offload=True)
    assert per_parameter(away, "optimizer", shards=8) == pytest.approx(4, rel=1e-4)
    half = stage(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert per_parameter(half, "optimizer", shards=8) == pytest.approx(4 + 4, rel=1e-4)


def test_a_precision_aware_one_takes_them_along() -> None:
    """It hands over the bf16 weights; what is not offloaded gets fp32 copies and default Adam states, 12 bytes,
    neither remainders nor the dtypes of the precision-aware FusedAdam."""
    away = stage(optimizer_cpu_offload=True, use_precision_aware_optimizer=True)
    assert away.optimizer_bytes == 0
    half = stage(
        optimizer_cpu_offload=True, use_precision_aware_optimizer=True, optimizer_offload_fraction=0.5,
        exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16",
    )
    assert per_parameter(half, "optimizer", shards=8) == pytest.approx(6, rel=1e-4)


class _OnGpu:
    """As much of a CUDA tensor as megatron-core's HybridDeviceOptimizer looks at when it deals parameters out."""

    def __init__(self, elements: int, is_cuda: bool = True) -> None:
        self.elements, self.is_cuda, self.dtype = elements, is_cuda, None

    def numel(self) -> int:
        return self.elements

    def detach(self) -> _OnGpu:
        return self

    clone = pin_memory = detach

    def cpu(self) -> _OnGpu:
        return _OnGpu(self.elements, is_cuda=False)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("rank", range(8))
def test_what_stays_of_a_partly_offloaded_optimizer_is_bounded(fraction: float, rank: int) -> None:
    """megatron-core's own HybridDeviceOptimizer deals out Llama-3.2-1B's parameters of one data-parallel rank of eight,
    in the order of its gradient buffer (last parameter first); what stays is below our number by less than a
    parameter, and never above it. Everything but Megatron's own main parameters is said to be a formula."""
    hybrid = pytest.importorskip("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    layer = [2048, 2048 * 3072, 2048 * 2048, 2048, 2048 * 16384, 8192 * 2048]
    sizes = [128256 * 2048, *layer * 16, 2048][::-1]
    total = sum(sizes)
    start, end = rank * total // 8, (rank + 1) * total // 8
    shards, at = [], 0
    for size in sizes:
        shards.append(max(0, min(end, at + size) - max(start, at)))
        at += size
    shards = [n for n in shards if n]
    dealt = SimpleNamespace(param_groups=[{"params": [_OnGpu(n) for n in shards]}], param_update_in_fp32=False)
    _, groups, *_ = hybrid.HybridDeviceOptimizer._get_sub_optimizer_param_groups(dealt, fraction)
    stays = 4 * sum(p.numel() for group in groups for p in group["params"])
    found = stage(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    states = {c.name: c for c in found.components if c.role == "optimizer"}
    assert states["exp_avg"].bytes - 4 * max(shards) - 4096 < stays <= states["exp_avg"].bytes + 4096
    assert {n: c.provenance for n, c in states.items()} == {
        "main parameters": "exact", "exp_avg": "formula", "exp_avg_sq": "formula"
    }


@pytest.mark.parametrize(
    ("recipe", "arch", "param", "bytes_each", "scales"),
    [
        ("tensorwise", "hopper", False, 2, 1), ("tensorwise", "hopper", True, 1, 1),
        ("tensorwise", "blackwell", False, 1, 1), ("blockwise", "hopper", False, 2 * (1 + 4 / 128**2), 0),
        ("mxfp8", "blackwell", False, 2 * (1 + 1 / 32), 0),
    ],
)  # fmt: skip
def test_fp8_copies_of_weights(recipe: str, arch: str, param: bool, bytes_each: float, scales: int) -> None:
    """16 layers of Llama-3.2-1B: qkv 3072 x 2048, proj 2048^2, fc1 2 x 8192 x 2048, fc2 8192 x 2048. Row-wise and
    column-wise fp8, with a scale a block of 32 values (mxfp8, one byte) or of 128 x 128 (blockwise, four), or one of
    four bytes for each of the four tensors of a layer."""
    gemm = 16 * 2048 * (3072 + 2048 + 3 * 8192)
    found = stage(fp8=recipe, arch=arch, fp8_param=param)
    copies = sum(c.bytes for c in found.components if c.name == "fp8 weight copies")
    assert copies == pytest.approx(gemm * bytes_each + 16 * 4 * 4 * scales, abs=1)
    plain = stage().weights_bytes
    assert found.weights_bytes - copies == plain - (gemm if param else 0)


def test_of_more_ranks_than_parameters_the_fullest_has_the_largest() -> None:
    """Llama-3.2-1B, whole parameters dealt out over 2^23 ranks: 128,256 x 2,048 elements of the tied embedding."""
    run = RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=2**23))
    (shapes,) = layout(run.model, run.parallel).shapes(run.model)
    units = chunk_units(run.model, shapes[0], context_of(run))
    assert dealt_share(units, (False,), 2**23) == {False: (128_256 * 2_048, 0)}


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_each_rank_has_the_parameters_that_megatron_deals_to_it(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-3.2-1B: of the real ``shard_params``, the elements that each rank's optimizer gets, and the states of
    Muon that follow: a main copy and a momentum for matrices, three states for all others."""
    module = pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer")
    torch = pytest.importorskip("torch")
    parallel = ParallelSpec(world_size=ranks)
    run = RunSpec(model=LLAMA, parallel=parallel, **groups_of(optimizer="muon", use_distributed_optimizer=False,
                                                              use_layer_wise_distributed_optimizer=True))
    (shapes,) = layout(run.model, run.parallel).shapes(run.model)
    units = chunk_units(run.model, shapes[0], context_of(run))
    parameters = [
        p
        for unit in units
        for _ in range(unit.times)
        for few, times in unit.parameters.runs(False)
        for p in few * times
    ]
    monkeypatch.setattr(module, "get_pg_size", lambda group: group[0])
    monkeypatch.setattr(module, "get_pg_rank", lambda group: group[1])
    states = []
    for rank in range(ranks):
        matrices, others = (
            {"params": [torch.empty(p.numel, device="meta") for p in parameters if p.is_matrix is kind]}
            for kind in (True, False)
        )
        group = SimpleNamespace(dp_cp=(ranks, rank), expt_dp=(1, 0))
        dealing = SimpleNamespace(pg_collection=group)
        module.LayerWiseDistributedOptimizer.shard_params(dealing, [SimpleNamespace(param_groups=[matrices, others])])
        of_matrices, of_others = (sum(p.numel() for p in g["params"]) for g in (matrices, others))
        assert dealt_share(units, (False,), ranks, rank) == {False: (of_matrices + of_others, of_matrices)}
        states.append(8 * of_matrices + 12 * of_others)
        assert explain(run, 0, rank=rank).optimizer_bytes == states[-1]
    assert explain(run, 0).optimizer_bytes == max(states) > min(states)
    with pytest.raises(SpecError, match="rank"):
        explain(run, 0, rank=ranks)


def test_muon_keeps_one_state_for_every_matrix_but_embedding_and_output() -> None:
    """OLMoE has 16 layers with a router of 64 x 2048, which is a matrix too: 4 bytes for it instead of Adam's 8."""
    found = stage("allenai/OLMoE-1B-7B-0924", optimizer="muon", use_distributed_optimizer=False)
    momentum = sum(c.bytes for c in found.components if c.name == "Muon momentum")
    router, attention = 64 * 2048, (3 + 1) * 2048 * 2048
    assert momentum == 4 * 16 * (router + attention)


@pytest.mark.parametrize("distributed", [False, True])
def test_mtp_depths_are_not_built_in_fp8_before_0_15(distributed: bool) -> None:
    """Gathered in fp8, a weight has two bytes an element, row-wise and column-wise; an MTP depth's has two of
    bf16 and both copies beside them. The depth of Llama-3.1-8B: h = 4096, f = 14336, 48 x 128 rows of qkv, and eh_proj
    [h, 2 h]."""
    h, f = 4096, 14336
    depth = 48 * 128 * h + h * h + 3 * f * h + 2 * h * h
    llama = resolve_model("meta-llama/Llama-3.1-8B")
    found = []
    for release in ((0, 14), (0, 15)):
        run = RunSpec(
            model=replace(llama, layers=llama.layers[:2], mtp_num_layers=1, mtp_layer=llama.layers[0]),
            precision=PrecisionSpec(fp8="hybrid", fp8_param=True),
            data_parallel=DataParallelSpec(use_distributed_optimizer=distributed),
            implementation=ImplementationSpec(megatron_core=release),
        )
        found.append(estimate(run).stages[0].weights_bytes)
    assert found[0] - found[1] == 2 * depth
