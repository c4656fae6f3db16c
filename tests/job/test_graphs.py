"""Memory of CUDA graphs: hand counts, and a walk over every storage of a stage with a pool for those of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from bridge_memory import BatchSpec, LayerSpec, ModelSpec, ParallelSpec, RunSpec, estimate, explain, peaks
from bridge_memory.components import Lifetime, Part, Role
from bridge_memory.estimation import stage_parts
from bridge_memory.job.megatron.graphs import MASKS, MOVED, POOL, graphs
from bridge_memory.outside.amount import total
from bridge_memory.readers import resolve_model
from bridge_memory.reserved.megatron import _Job
from bridge_memory.spec import AttentionSpec, MambaSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.allocation_trace import Storages
from bridge_memory.workspaces.caching_allocator import CachingAllocator, DeviceFull

LLAMA, NANO, QWEN = "meta-llama/Llama-3.1-8B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen/Qwen3-30B-A3B"
SEQ = 4096


def first_layers(name: str, layers: int) -> ModelSpec:
    given = resolve_model(name)
    return replace(given, layers=given.layers[:layers], mtp_num_layers=0, mtp_layer=None)


def run_of(name: str = LLAMA, layers: int = 8, *, pp: int = 1, ep: int = 1, batch: int = 32, **fields: Any) -> RunSpec:
    run = RunSpec(
        model=first_layers(name, layers), batch=BatchSpec(seq_length=SEQ, global_batch_size=batch),
        parallel=ParallelSpec(
            world_size=pp * max(ep, 2), pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
            virtual_pipeline_model_parallel_size=fields.pop("vp", None),
        ),
    )  # fmt: skip
    return run.with_fields(**fields)


def amounts(run: RunSpec, stage: int = 0) -> dict[str, tuple[int, int]]:
    found = graphs(run, stage)
    assert found is not None
    return {amount.name: (amount.least, amount.most) for amount in found}


# ---- storage by storage ----

#: The pieces of a layer in order, and whether graphs cover each.
Pieces = Callable[[LayerSpec], Iterable[tuple[LayerSpec, bool]]]


def whole(kind: LayerSpec) -> Iterable[tuple[LayerSpec, bool]]:
    yield kind, True


def attention_apart(kind: LayerSpec) -> Iterable[tuple[LayerSpec, bool]]:
    if isinstance(kind.mixer, AttentionSpec):
        yield replace(kind, ffn=None), True
        if kind.ffn is not None:
            yield replace(kind, mixer=None), False
    else:
        yield kind, False


def feed_forward_apart(kind: LayerSpec) -> Iterable[tuple[LayerSpec, bool]]:
    yield replace(kind, ffn=None), False
    yield replace(kind, mixer=None), True


def mamba_apart(kind: LayerSpec) -> Iterable[tuple[LayerSpec, bool]]:
    yield kind, isinstance(kind.mixer, MambaSpec)


class _Tagged:
    """A block whose storages, of either pass, come from the pool of the graphs."""

    def __init__(self, job: TwoPools, block: Any) -> None:
        self.job, self.block = job, block

    def forward(self, x: int | None) -> tuple[int | None, Any]:
        out, back = self.job.inside(lambda: self.block.forward(x))
        return out, lambda gradient: self.job.inside(lambda: back(gradient))


class TwoPools(_Job):
    """The passes of a stage with two counters of bytes: those allocated in graphs, and the others."""

    def __init__(self, run: RunSpec, stage: int, pieces: Pieces) -> None:
        self.pieces, self.active = pieces, False
        self.now, self.most, self.where = [0, 0, 0], [0, 0, 0], dict[int, tuple[int, int]]()
        super().__init__(run, stage)

    def _new_storages(self) -> Storages:
        return Storages(self._report)

    def _report(self, number: int, nbytes: int | None) -> None:
        if nbytes is None:
            pool, size = self.where.pop(number)
            size = -size
        else:
            pool, size = int(self.active), nbytes
            self.where[number] = pool, size
        for which in (pool, 2):
            self.now[which] += size
            self.most[which] = max(self.most[which], self.now[which])

    def inside(self, run: Callable[[], Any]) -> Any:
        self.active = True
        try:
            return run()
        finally:
            self.active = False

    def _chunk(self, shape: ChunkShape) -> list[Any]:
        ends = super()._chunk(shape._replace(layers=()))
        layers: list[Any] = []
        for kind, count in shape.layers:
            for _ in range(count):
                for piece, graphed in self.pieces(kind):
                    block = self._layer(piece)
                    layers.append(_Tagged(self, block) if graphed else block)
        first = 1 if shape.embedding else 0
        return ends[:first] + layers + ends[first:]

    def extra(self) -> int:
        """What two pools need beyond one."""
        self._microbatches(self.ctx.hidden_bytes)
        return self.most[0] + self.most[1] - self.most[2]


class Replayed(TwoPools):
    """Through torch's allocator; graphs from the fourth step on. ``reserved``: by pool."""

    def __init__(self, run: RunSpec, stage: int, pieces: Pieces) -> None:
        self.allocator, self.captured, self.steps = CachingAllocator(expandable_segments=True), False, 0
        super().__init__(run, stage, pieces)

    @property
    def reserved(self) -> dict[Any, int]:
        return self.allocator.by_stream()

    def _report(self, number: int, nbytes: int | None) -> None:
        if nbytes is None:
            self.allocator.free(number)
        else:
            self.allocator.allocate(number, nbytes, "pool" if self.active and self.captured else "eager")

    def _microbatches(self, hidden: int) -> None:
        self.steps += 1
        if self.steps == 4:
            self.captured = True
            self.allocator.capacity = self.allocator.reserved
            with pytest.raises(DeviceFull):  # which empties the cache first, as a capture does
                self.allocator.allocate(-1, self.allocator.reserved + 1)
            self.allocator.capacity = None
        super()._microbatches(hidden)


ATTN = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("attn",)}
MLP = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("mlp",)}
MAMBA = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("mamba",)}
LOCAL = {"cuda_graph_impl": "local"}
CASES: dict[str, tuple[RunSpec, int, Pieces]] = {
    "whole layers": (run_of(**LOCAL), 0, whole),
    "whole layers, first stage": (run_of(pp=4, **LOCAL), 0, whole),
    "whole layers, last stage": (run_of(pp=4, **LOCAL), 3, whole),
    "whole layers, interleaved": (run_of(pp=2, vp=2, **LOCAL), 0, whole),
    "attention": (run_of(**ATTN), 0, attention_apart),
    "attention, second stage": (run_of(pp=4, **ATTN), 1, attention_apart),
    "attention of a mixture of experts": (run_of(QWEN, 8, ep=8, **ATTN), 0, attention_apart),
    "attention, interleaved": (run_of(pp=2, vp=2, **ATTN), 1, attention_apart),
    "feed-forward": (run_of(**MLP), 0, feed_forward_apart),
    "feed-forward, first stage": (run_of(pp=4, **MLP), 0, feed_forward_apart),
    "Mamba": (run_of(NANO, 12, ep=8, **MAMBA), 0, mamba_apart),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_two_pools_need_what_every_storage_says(case: str) -> None:
    """The walk copies no input and no gradient into static buffers: up to three hidden states, of 32 MiB."""
    run, stage, pieces = CASES[case]
    found, hidden = amounts(run, stage), stage_parts(run, stage).hidden_state
    job = TwoPools(run, stage, pieces)
    expected = job.extra()
    assert expected <= found[POOL][0] + found[MOVED][0] <= expected + 3 * hidden
    assert job.most[1] <= found[POOL][0] <= job.most[1] + 6 * hidden
    assert found[POOL][0] > 30 * hidden


# ---- by hand ----


def test_none_without_graphs() -> None:
    assert graphs(run_of(), 0) is None


def test_whole_layers_are_in_the_pool() -> None:
    """What eight layers save for backward, and what one of them needs beside it."""
    run = run_of(**LOCAL)
    layers = {Part.LAYER_INPUT, Part.ATTENTION, Part.MLP}
    saved = sum(c.bytes for c in explain(run, 0).components if c.role is Role.ACTIVATION and c.part in layers)
    pool = amounts(run)[POOL]
    assert pool[0] == pool[1]
    assert saved < pool[0] < saved + saved // 8 * 2


def test_graphs_of_a_layer_copy_the_output_of_the_one_before() -> None:
    """Transformer Engine's graphs have inputs of their own: between eight layers seven hidden states more."""
    engine, local = (amounts(run_of(cuda_graph_impl=name))[POOL][0] for name in ("transformer_engine", "local"))
    assert engine - local == 7 * SEQ * 4096 * 2


def test_static_masks_are_those_of_the_layers() -> None:
    """[1, 1, s, s] in bool for each of eight layers."""
    assert amounts(run_of(**ATTN))[MASKS] == (8 * SEQ * SEQ, 8 * SEQ * SEQ)
    assert MASKS not in amounts(run_of(**MLP))


def test_in_flight_microbatches_are_in_the_pool() -> None:
    """Stage 0 of four has four, the last one: of what two layers save."""
    first, last = (amounts(run_of(pp=4, **LOCAL), stage)[POOL][0] for stage in (0, 3))
    one = amounts(run_of(layers=2, **LOCAL))[POOL][0]
    assert last == one
    assert 3 * one < first < 4 * one


def test_expandable_segments_leave_nothing_behind() -> None:
    """Else what the first steps cached may be held by the optimizer's states, at most all of it."""
    classic, expandable = (
        amounts(run_of(expandable_segments=on, **LOCAL))[MOVED] for on in (False, True)
    )  # fmt: skip
    assert expandable[0] == expandable[1] == classic[0] < 0
    assert classic[1] == 0
    found = graphs(run_of(**LOCAL), 0, left=1 << 20)
    assert found is not None
    assert total(found) == (amounts(run_of(**LOCAL))[POOL][0] + classic[0], total(found).least + (1 << 20))


def test_a_replayed_allocator_agrees() -> None:
    """Three eager steps, an emptied cache, and then a pool that reserves apart: through torch's allocator."""
    run = run_of(NANO, 12, ep=8, expandable_segments=True, **MAMBA)
    job = Replayed(run, 0, mamba_apart)
    job.start()
    for step in range(1, 5):
        job.step(step)
    pool, eager = job.reserved["pool"], job.reserved["eager"]
    found, (peak,) = graphs(run, 0), peaks(run)
    assert found is not None
    assert pool == pytest.approx(amounts(run)[POOL][0], rel=0.02)
    assert pool + eager == pytest.approx(peak.peak_bytes + total(found).least, rel=0.02)


def test_a_graph_of_the_iteration_holds_all_passes() -> None:
    """Outside of it: what is alive between steps, and in the optimizer's step."""
    run = run_of(cuda_graph_impl="full_iteration", expandable_segments=True)
    found, (peak,) = graphs(run, 0), peaks(run)
    assert found is not None
    parts = stage_parts(run, 0)
    between = sum(c.bytes for c in parts.between_steps) + parts.in_step
    static = peak.static_bytes - sum(c.bytes for c in parts.between_steps)
    assert amounts(run)[POOL] == (peak.peak_bytes - static,) * 2
    assert total(found) == (between, between)
    assert not any(c.lifetime is Lifetime.BACKWARD for c in parts.persistent)


def test_what_is_sent_is_not_reused_in_a_capture() -> None:
    """Between two neighbours an output, an input and their gradients a microbatch: of 32 on a middle stage of four."""
    run = run_of(pp=4, cuda_graph_impl="full_iteration")
    for stage, tensors in enumerate((2, 4, 4, 2)):
        least, most = amounts(run, stage)[POOL]
        assert most - least == tensors * 16 * SEQ * 4096 * 2


ROUTER = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("moe_router",)}


def test_permuted_tokens_stay_where_preprocessing_is_graphed() -> None:
    """An all-to-all dispatcher permutes before it sends: 4096 x 8 rows of 2048 in bf16, in eight layers."""
    router = run_of(QWEN, 8, ep=8, **ROUTER)
    both = router.with_fields(cuda_graph_modules=("moe_router", "moe_preprocess"))
    assert amounts(both)[POOL][0] - amounts(router)[POOL][0] == 8 * SEQ * 8 * 2048 * 2
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    assert amounts(both.with_fields(**flex))[POOL] == amounts(router.with_fields(**flex))[POOL]


@pytest.mark.parametrize("modules", [("attn",), ("mlp",), ("attn", "mlp")], ids="+".join)
def test_local_graphs_cover_a_layer_whichever_module_is_named(modules: tuple[str, ...]) -> None:
    assert amounts(run_of(cuda_graph_modules=modules, **LOCAL)) == amounts(run_of(**LOCAL))


def test_a_stage_without_layers() -> None:
    """Embedding and loss on stages of their own: nothing there is in a graph."""
    run = run_of(pp=4, **LOCAL).with_fields(pipeline_model_parallel_layout="E|t*4|t*4|L")
    assert amounts(run, 0) == amounts(run, 3) == {POOL: (0, 0), MOVED: (0, 0)}
    assert amounts(run, 1)[POOL][0] > 0


def test_bounds_hold_where_layers_are_not_divided() -> None:
    """Full recomputation, which megatron-core refuses with graphs of layers from 0.16 on."""
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    run = run_of(**again, **LOCAL, megatron_core=(0, 15))
    (name, (least, most)), = amounts(run).items()
    (peak,) = peaks(run)
    assert (name, least) == (POOL, 0)
    assert 0 < most <= peak.peak_bytes


def test_what_a_graph_of_the_iteration_needs_beside_overlapped_exchanges_is_said() -> None:
    """torch frees no block that another stream has used while a graph is captured, unless it is told to."""
    run = RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(
        world_size=8, expert_model_parallel_size=8, overlap_moe_expert_parallel_comm=True
    )
    said = [
        any("graph_capture_record_stream_reuse" in one for one in estimate(run.with_fields(**fields)).assumptions)
        for fields in ({"cuda_graph_impl": "full_iteration"}, {"cuda_graph_impl": "none"})
    ]
    assert said == [True, False]
