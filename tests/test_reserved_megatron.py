"""Reserved memory of megatron-core's stages: the replay beside the estimate, and beside measured runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import EncoderSpec, EncoderStructure, RunSpec
from bridge_memory.cli import main
from bridge_memory.estimation import estimate, stage_parts
from bridge_memory.readers import resolve_model
from bridge_memory.reserved import replayed, why_not
from bridge_memory.reserved.megatron import COMPUTE, EXCHANGE, _Job, _Streams, trace_of
from bridge_memory.spec import BatchSpec, ImplementationSpec, MambaSpec, MoESpec, ParallelSpec, RecomputeSpec, SpecError
from bridge_memory.tapes.allocation_trace import Passes, Storages
from bridge_memory.tapes.tape import Tape
from bridge_memory.workspaces.caching_allocator import CachingAllocator

MIB = 1 << 20


def run_of(
    name: str, layers: int, recompute: RecomputeSpec | None = None, world: int = 8, depths: int = 0, **fields: Any
) -> RunSpec:  # fmt: skip
    given = resolve_model(name)
    implementation = fields.pop("implementation", {})
    depth = given.layers[-1] if depths else None
    model = replace(given, layers=given.layers[:layers], mtp_num_layers=depths, mtp_layer=depth)
    return RunSpec(
        model=model, parallel=ParallelSpec(world_size=world, **fields),
        batch=BatchSpec(seq_length=4096, micro_batch_size=1, global_batch_size=64),
        recompute=recompute or RecomputeSpec(),
        implementation=ImplementationSpec(**{"moe_permute_fusion": True, **implementation}),
    )  # fmt: skip


def modules(*names: str) -> RecomputeSpec:
    return RecomputeSpec(granularity="selective", modules=names)


def full(number: int, method: str = "uniform") -> RecomputeSpec:
    return RecomputeSpec(granularity="full", method=method, num_layers=number)


def asked_for(run: RunSpec, stage: int) -> int:
    """The most bytes of a stage's storages at once, in its first two steps."""
    trace = trace_of(run, stage)
    sizes: dict[int, int] = {}
    alive = highest = 0
    for number, nbytes, _ in (*trace.first, *trace.each):
        if nbytes > 0:
            sizes[number] = nbytes
            alive += nbytes
            highest = max(highest, alive)
        else:
            alive -= sizes.pop(number, 0)
    return highest


LLAMA, QWEN, NANO = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP = {"expert_model_parallel_size": 8}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
LATER = {**OVERLAP, "delay_wgrad_compute": True}
HYBRID_EP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
VP = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **EP}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_of(LLAMA, 8), id="dense"),
        pytest.param(run_of(LLAMA, 8, modules("core_attn", "mlp"), **SP), id="modules run again"),
        pytest.param(run_of(LLAMA, 8, full(1)), id="layers run again"),
        pytest.param(run_of(LLAMA, 8, full(4)), id="four layers run again together"),
        pytest.param(run_of(LLAMA, 8, full(3)), id="groups that do not fill"),
        pytest.param(run_of(LLAMA, 8, full(3, "block")), id="the first layers run again"),
        pytest.param(run_of(LLAMA, 8, pipeline_model_parallel_size=4), id="pipeline"),
        pytest.param(
            run_of(LLAMA, 8, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), id="interleaved"
        ),
        pytest.param(run_of(QWEN, 6, **EP), id="experts"),
        pytest.param(run_of(QWEN, 6, modules("moe_act", "layernorm"), **EP), id="discarded outputs"),
        pytest.param(run_of(QWEN, 6, modules("moe"), **EP), id="MoE layers run again"),
        pytest.param(run_of(NANO, 14, modules("moe", "shared_experts"), **EP), id="hybrid"),
        pytest.param(run_of("meta-llama/Llama-3.2-1B", 8, pipeline_model_parallel_size=2), id="tied"),
        pytest.param(run_of(QWEN, 6, implementation=OVERLAP, **EP), id="overlapped"),
        pytest.param(
            run_of(QWEN, 6, modules("moe_act", "layernorm"), implementation=OVERLAP, **EP),
            id="overlapped, discarded outputs",
        ),
        pytest.param(run_of(QWEN, 6, implementation=LATER, **EP), id="overlapped, weight gradients later"),
        pytest.param(run_of(NANO, 14, implementation={**OVERLAP, **HYBRID_EP}, **EP), id="overlapped HybridEP"),
        pytest.param(run_of(QWEN, 8, world=16, implementation=OVERLAP, **VP), id="overlapped, interleaved"),
        pytest.param(
            run_of("deepseek-ai/DeepSeek-V3", 8, world=16, implementation=OVERLAP, **VP),
            id="overlapped, dense layers and latent attention",
        ),
        pytest.param(
            run_of(QWEN, 6, implementation=OVERLAP, **EP).with_fields(global_batch_size=8),
            id="overlapped, one microbatch",
        ),
        pytest.param(run_of(LLAMA, 4, depths=1), id="MTP"),
        pytest.param(run_of(LLAMA, 4, depths=2, **SP), id="two MTP depths"),
        pytest.param(run_of(LLAMA, 4, full(1), depths=1), id="MTP, layers run again"),
        pytest.param(run_of(QWEN, 8, world=16, depths=1, implementation=OVERLAP, **VP), id="overlapped, MTP"),
    ],
)
def test_most_is_allocated_where_the_estimate_says(run: RunSpec) -> None:
    """Two ways to one figure: the estimate adds up what links of a chain have at their highest moments, the replay what
    comes and goes. What the allocator says has also what it does not split off, below 1 MiB a block."""
    assert why_not(run) is None
    for stage in estimate(run).stages:
        assert asked_for(run, stage.stage) == pytest.approx(stage.peak_bytes, rel=0.0005)
        found = replayed(run, stage.stage)
        assert found.allocated == pytest.approx(stage.peak_bytes, rel=0.01)
        assert found.segments >= found.allocated
        assert found.expandable >= 0.995 * stage.peak_bytes


SEES = EncoderStructure(
    kind="glm4v", hidden_size=1536, ffn_hidden_size=4096, num_layers=6, num_heads=12, out_size=2048, patch_size=14,
    temporal_patch_size=2, merge_size=2, merger_size=1024, positions=576, qkv_bias=False,
)  # fmt: skip


@pytest.mark.parametrize("frozen", [(), ("",), ("patch_embed", "embeddings", "post_conv", "blocks")], ids=str)
@pytest.mark.parametrize("again", [RecomputeSpec(), full(1)], ids=["", "layers run again"])
def test_encoders_are_replayed(frozen: tuple[str, ...], again: RecomputeSpec) -> None:
    """The first stage of two has the encoder, and no loss: its most is allocated in the encoder where that trains."""
    model = resolve_model("meta-llama/Llama-3.2-1B")
    encoder = EncoderSpec("visual", 200_000_000, structure=SEES, frozen=frozen)
    run = RunSpec(
        model=replace(model, layers=model.layers[:2], encoders=(encoder,)), recompute=again,
        parallel=ParallelSpec(world_size=2, pipeline_model_parallel_size=2),
        batch=BatchSpec(patches_per_image=16000, seq_length=8192, global_batch_size=4),
    )
    assert why_not(run) is None
    for stage in estimate(run).stages:
        found = replayed(run, stage.stage)
        assert found.allocated == pytest.approx(stage.peak_bytes, rel=0.01)
        assert found.segments >= found.allocated


def test_encoders_of_megatrons_layers_that_run_again_are_not_replayed() -> None:
    model = resolve_model("meta-llama/Llama-3.2-1B")
    ours = replace(SEES, kind="qwen3_vl", deepstack_layers=(1, 3))
    run = RunSpec(model=replace(model, encoders=(EncoderSpec("visual", 200_000_000, structure=ours),)),
                  batch=BatchSpec(patches_per_image=400), recompute=full(1))  # fmt: skip
    assert "layers that run again" in (why_not(run) or "")


@pytest.mark.parametrize("frozen", [(), ("",)], ids=["trained", "frozen"])
@pytest.mark.parametrize("overlap", [{}, OVERLAP], ids=["", "overlapped"])
def test_features_of_several_layers_are_replayed(frozen: tuple[str, ...], overlap: dict[str, bool]) -> None:
    """Two ways to one figure; the first stage's peak is in the encoder where that trains."""
    deep = replace(SEES, kind="qwen3_omni_vision", deepstack_layers=(1, 3))
    run = run_of(QWEN, 8, world=16, implementation=overlap, **VP)
    run = run.with_(
        model=replace(run.model, encoders=(EncoderSpec("visual", 200_000_000, structure=deep, frozen=frozen),)),
        batch=BatchSpec(patches_per_image=4000, seq_length=4096, global_batch_size=64),
    )
    assert why_not(run) is None
    for stage in estimate(run).stages:
        assert asked_for(run, stage.stage) == pytest.approx(stage.peak_bytes, rel=0.0005)


@pytest.mark.parametrize("sequences", [8, 64], ids=["one microbatch", "eight"])
@pytest.mark.parametrize("tokens", [256, 1024])
def test_a_tied_gradient_waits_through_an_overlapped_backward_pass(tokens: int, sequences: int) -> None:
    """Few tokens: the most is allocated where the gradients of both uses of the table are summed. Of several
    microbatches, all that the next one's forward pass has saved is there too."""
    run = run_of(QWEN, 6, implementation=OVERLAP, **EP)
    tied = replace(run.model, share_embeddings_and_output_weights=True)
    run = run.with_(model=tied, batch=BatchSpec(seq_length=tokens, micro_batch_size=1, global_batch_size=sequences))
    peak = estimate(run).peak_stage.peak_bytes
    assert replayed(run).allocated == pytest.approx(peak, rel=0.001)


def test_the_highest_stage_is_replayed_by_default() -> None:
    run = run_of(LLAMA, 8, pipeline_model_parallel_size=4)
    highest = max(estimate(run).stages, key=lambda stage: stage.peak_bytes).stage
    assert replayed(run) == replayed(run, highest)
    assert replayed(run) != replayed(run, (highest + 2) % 4)


def test_the_first_step_reserves_no_more_than_later_ones() -> None:
    run = run_of(LLAMA, 8)
    first, later = replayed(run, steps=1), replayed(run)
    assert first.segments < later.segments
    assert first.expandable < later.expandable


def test_models_and_their_flat_copies_are_alive_together_once() -> None:
    """2 layers and 2 x 128256 x 4096 in bf16: the module's own weights beside DDP's buffers of weights and fp32
    gradients, before any activation; without these a run of one sequence of 64 tokens would not come near."""
    run = run_of(LLAMA, 2, world=1)
    run = run.with_(batch=BatchSpec(seq_length=64, micro_batch_size=1, global_batch_size=1))
    weights = 2 * (2 * 128256 * 4096 + 2 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096) + 4096)
    assert replayed(run).segments >= weights + weights + 2 * weights


def discarding(*, refills: bool) -> Tape:
    """a makes b, which is discarded and made again for the backward of c; b is 3 MiB, all others 1 KiB."""
    tape = Tape()
    if refills:
        tape._refills = True
    x = tape.input("x", 1024)
    a = tape.make("a", x, 1024, saves=(x,))
    with tape.discardable("again", (a,)) as region:
        b = tape.make("b", a, 3 * MIB, saves=(a,))
    c = tape.make("c", b, 1024, saves=(b,))
    tape.discard(region, b)
    tape.output(c)
    return tape


@pytest.mark.parametrize("refills", [False, True], ids=["taken over", "copied back"])
def test_a_discarded_output_comes_back_under_another_number(refills: bool) -> None:
    events: list[tuple[int, int | None]] = []
    storages = Storages(lambda number, nbytes: events.append((number, nbytes)))
    x = storages.make(1024)
    out, back = Passes(discarding(refills=refills), storages).forward(x)
    large = [number for number, nbytes in events if nbytes == 3 * MIB]
    assert len(large) == 1
    assert (large[0], None) in events  # freed at the end of forward
    (gradient,) = back(storages.make(1024)).values()
    again = [number for number, nbytes in events if nbytes == 3 * MIB and number != large[0]]
    assert len(again) == 2 + refills  # the second storage, its copy, and b's gradient
    for number in (out, gradient, x):
        storages.drop(number)
    made = {number for number, nbytes in events if nbytes is not None}
    gone = [number for number, nbytes in events if nbytes is None]
    assert sorted(gone) == sorted(made)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cuda_graph_impl": "local"}, "CUDA graphs"),
        ({"offload_modules": ("core_attn",)}, "offloaded activations"),
    ],
    ids=["graphs", "offloading"],
)
def test_what_is_not_replayed_says_why(fields: dict[str, Any], words: str) -> None:
    run = run_of(QWEN, 4, **EP).with_fields(**fields)
    assert words in (why_not(run) or "")


@pytest.mark.parametrize("fused", [True, False], ids=["dummy gradient", "waits through backward"])
def test_gradients_of_a_tied_embedding_are_summed(fused: bool) -> None:
    """In a short sequence the sum at the embedding decides the peak. Two ways to one figure."""
    run = RunSpec(model="meta-llama/Llama-3.2-1B", batch=BatchSpec(seq_length=256, micro_batch_size=1))
    run = run.with_fields(gradient_accumulation_fusion=fused)
    peak = estimate(run).peak_stage
    assert "embedding" in peak.peak_operation
    assert replayed(run).allocated == pytest.approx(peak.peak_bytes, rel=0.002)


def of_images(engine: str) -> RunSpec:
    config = Path(__file__).parent / "data" / "encoders" / "qwen2_5_vl.json"
    run = RunSpec(model=str(config), batch=BatchSpec(seq_length=4096, micro_batch_size=1, global_batch_size=1))
    return run.with_fields(engine=engine)


@pytest.mark.parametrize("images", [0, 1])
def test_a_step_of_images_or_of_text_alone(images: int) -> None:
    """Two ways to one figure; without the encoder's passes the replay allocated less than the peak."""
    run = of_images("megatron_ddp").with_fields(images_per_sample=images)
    assert replayed(run).allocated == pytest.approx(estimate(run).peak_stage.peak_bytes, rel=0.005)


@pytest.mark.parametrize("engine", ["fsdp2", "single"])
def test_encoders_under_torchs_engines_are_not_replayed(engine: str) -> None:
    assert "encoders" in (why_not(of_images(engine)) or "")


# ---- overlapped exchanges ----


def test_streams_do_not_share_memory() -> None:
    """Beside an equal run one after the other: what the exchanges need is not there for what computes. The most that
    either stream has is reserved, though not at one time."""
    run = run_of(QWEN, 6, implementation=OVERLAP, **EP)
    one = replayed(run.with_fields(overlap_moe_expert_parallel_comm=False))
    two = replayed(run)
    assert [name for name, _ in one.expandable_of] == ["compute"]
    assert [name for name, _ in two.expandable_of] == ["compute", "communication"]
    assert two.expandable - two.allocated > 3 * (one.expandable - one.allocated)
    # The rows that one exchange brings: 4096 tokens to 8 experts, 2048 wide, in bf16.
    assert dict(two.expandable_of)["communication"] > 6 * 2 * 4096 * 8 * 2048


def test_shared_experts_outputs_stay_until_backward() -> None:
    """[s, b, h] in bf16 of every layer with shared experts, which otherwise only the sum refers to."""
    run = run_of(NANO, 14, implementation=HYBRID_EP, **EP)
    layers = sum(isinstance(layer.ffn, MoESpec) for layer in run.model.layers)
    tables = 4 * 4096 * 128  # the probabilities, which the exchange takes
    one = stage_parts(run, 0).inventories[0].retained
    two = stage_parts(run.with_fields(overlap_moe_expert_parallel_comm=True), 0).inventories[0].retained
    assert two - one == pytest.approx(layers * 2 * 4096 * 2688, abs=layers * tables)


def of_two_streams() -> tuple[_Streams, Callable[[str, int, int | None], None], CachingAllocator]:
    allocator = CachingAllocator()
    streams = _Streams([allocator])

    def report(stream: str, number: int, nbytes: int | None) -> None:
        streams.running = stream
        streams.report(number, nbytes)

    return streams, report, allocator


def test_a_recorded_block_waits_for_the_other_stream() -> None:
    """20 MiB made by one stream and used by the other: once freed, a second 20 MiB need a segment of their own until
    the other stream has come so far."""
    streams, report, allocator = of_two_streams()
    report(COMPUTE, 1, 20 * MIB)
    streams.running = EXCHANGE
    streams.record(1)
    report(COMPUTE, 1, None)
    assert allocator.allocated == 0
    report(COMPUTE, 2, 20 * MIB)
    assert allocator.reserved == 40 * MIB
    streams.wait()
    report(COMPUTE, 3, 20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_what_computes_after_the_mark_is_not_waited_for() -> None:
    streams, report, allocator = of_two_streams()
    for number in (1, 2):
        report(EXCHANGE, number, 20 * MIB)
    for number in (1, 2):
        streams.running = COMPUTE
        streams.record(number)
        streams.report(number, None)
        if number == 1:
            streams.mark()
    streams.wait()
    report(EXCHANGE, 3, 20 * MIB)
    assert allocator.reserved == 40 * MIB  # the first's block
    report(EXCHANGE, 4, 20 * MIB)
    assert allocator.reserved == 60 * MIB
    streams.wait(everything=True)
    report(EXCHANGE, 5, 20 * MIB)
    assert allocator.reserved == 60 * MIB


def in_two_nodes() -> Tape:
    """A node makes r and s of x, another their sum."""
    tape = Tape()
    x = tape.input("x", 1024)
    r, s = (tape.make(name, x, 1024, saves=(x,)) for name in "rs")
    tape.cut()
    tape.output(tape.make("y", (r, s), 1024, alias=True))
    return tape


def test_leaves_get_gradients_of_their_own() -> None:
    """The sum's gradient is that of both its inputs; between graphs each gets a copy, since whoever runs the node
    refers to the sum's until it has run."""
    alive: dict[int, int] = {}

    def report(number: int, nbytes: int | None) -> None:
        if nbytes is None:
            del alive[number]
        else:
            alive[number] = nbytes

    storages = Storages(report)
    x = storages.make(1024)
    passes = Passes(in_two_nodes(), storages)
    nodes = passes.nodes(x)
    assert len(nodes) == passes.number_of_nodes == 2
    assert nodes.forward(0) is None
    out = nodes.forward(1)
    assert out is not None
    storages.drop(out)
    assert set(alive) == {x}
    gradient, taken = storages.make(1024), list[int]()
    assert nodes.backward(1, gradient, taken.append) == {}
    assert taken == [gradient]
    assert len(alive) == 2 + 2  # x, the sum's, and the copies
    storages.drop_all(taken)
    (grad,) = nodes.backward(0, None, storages.drop).values()
    assert set(alive) == {x, grad}
    storages.drop_all((x, grad))
    assert not alive


def test_estimate_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["estimate", LLAMA, "--num-gpus", "8", "--tp", "2", "--num-layers", "4"]
    assert main([*argv, "--reserved"]) == 0
    assert "with expandable_segments:True" in capsys.readouterr().out


def drawn(number: int) -> Iterator[RunSpec]:
    """Runs of any of these models, recomputation and sizes that the spec takes and that can be replayed."""
    rng = random.Random("reserved")
    while number:
        name = rng.choice((LLAMA, QWEN, NANO, "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct"))
        recompute = rng.choice((
            None, full(rng.choice((1, 2, 3))), full(2, "block"),
            modules(*rng.sample(("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts"), 2)),
        ))  # fmt: skip
        try:
            run = run_of(
                name, rng.choice((4, 7, 8)), recompute, 16, implementation=rng.choice(({}, {}, OVERLAP, LATER)),
                tensor_model_parallel_size=rng.choice((1, 2)),
                sequence_parallel=True, pipeline_model_parallel_size=rng.choice((1, 2)),
                expert_model_parallel_size=rng.choice((1, 4)), context_parallel_size=rng.choice((1, 2)),
            )  # fmt: skip
        except SpecError:
            continue
        if why_not(run) is None:
            number -= 1
            yield run


def test_drawn_runs_are_replayed_without_a_leak() -> None:
    """The replay's most is the estimate's but for what that counts beside chains of blocks: tensors that recomputed
    routers carry over, and states that schedules hold."""
    for run in drawn(12):
        for stage in estimate(run).stages:
            found = replayed(run, stage.stage)
            assert found.allocated == pytest.approx(stage.peak_bytes, rel=0.03), run
    assert any(isinstance(layer.mixer, MambaSpec) for run in drawn(12) for layer in run.model.layers)


@pytest.mark.parametrize("fields", [{}, {"recompute_granularity": "full", "recompute_method": "uniform",
                                         "recompute_num_layers": 2}], ids=["plain", "recomputed"])  # fmt: skip
def test_passes_that_are_repeated_are_those_made_anew(fields: dict[str, Any]) -> None:
    run = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(
        world_size=4, pipeline_model_parallel_size=2, global_batch_size=16, **fields
    )
    for stage in (0, 1):
        again, anew = _Job(run, stage, repeats=True), _Job(run, stage)
        for step in range(3):
            calls = [(job.step(step) if step else job.start()) for job in (again, anew)]
            assert calls[0] == calls[1]
        assert again._recorded is not None


def test_an_option_without_recomputation_leaves_nothing_out() -> None:
    run = run_of(LLAMA, 1)
    assert why_not(run.with_fields(distribute_saved_activations=True)) is None
