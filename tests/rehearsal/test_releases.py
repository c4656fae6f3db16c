"""The megatron-core that is installed here, whichever of 0.13 to 0.19 it is, is rehearsed by its own rules.

``.ci/run`` runs this file once for each release, in a process of its own; the other tests of rehearsals know 0.16.
Seconds, not minutes: one model of a kind, and the layers whose code differs between the releases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from parameters_of import stage_parameters

from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal.compare import compare_layer
from bridge_memory.rehearsal.model import NotBuildable, build_chunks, parameter_shapes
from bridge_memory.rehearsal.patches import building
from bridge_memory.rehearsal.run import rehearse, rehearse_layer
from bridge_memory.rehearsal.te_shapes import parameter_shapes_with_te
from bridge_memory.rehearsal.world import fake_world, installed_release, quiet
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.layout import layout
from bridge_memory.spec.ranks import rank_of_stage
from bridge_memory.tapes.chain import ChunkInventory
from bridge_memory.tapes.context import context_of

HERE = installed_release() or (0, 0)
LOCAL = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False, megatron_core=HERE)


def parallel(world: int, tp: int = 1, pp: int = 1, **more: Any) -> ParallelSpec:
    return ParallelSpec(world_size=world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **more)


#: Model, layout, stage.
RANKS: dict[str, tuple[str, ParallelSpec, int]] = {
    "dense, virtual stages": (
        "meta-llama/Llama-3.2-1B", parallel(8, 2, 2, virtual_pipeline_model_parallel_size=4), 1
    ),
    "layout string": (
        "Qwen/Qwen3-8B", parallel(32, 2, 4, pipeline_model_parallel_layout="Et*8|t*10|t*10|t*8L"), 3
    ),
    "experts": (
        "mistralai/Mixtral-8x7B-v0.1",
        parallel(32, 2, 4, expert_model_parallel_size=4, expert_tensor_parallel_size=1), 2,
    ),
    "shared experts with a gate": ("Qwen/Qwen1.5-MoE-A2.7B", parallel(16, 2, 2, expert_model_parallel_size=4), 0),
    "multi-latent attention and MTP": (
        "deepseek-ai/DeepSeek-V3",
        parallel(128, 4, 4, expert_model_parallel_size=8, num_layers_in_last_pipeline_stage=16), 3,
    ),
}  # fmt: skip
HYBRID = ("nvidia/Nemotron-H-56B-Base-8K", parallel(32, 8, 2), 1)


def test_modules_of_two_releases_do_not_mix() -> None:
    """Another release in front of the installed one (PYTHONPATH) must serve every module of megatron.core."""
    core = sys.modules["megatron.core"]
    folder = Path(str(core.__file__)).parent
    files = [
        Path(m.__file__)
        for name, m in list(sys.modules.items())
        if name.startswith("megatron.core.") and getattr(m, "__file__", None)
    ]
    assert len(files) > 10
    assert all(folder in file.parents for file in files)


@pytest.mark.parametrize("case", RANKS)
def test_a_rank_owns_what_megatron_core_builds(case: str) -> None:
    name, layout, stage = RANKS[case]
    run = RunSpec(model=resolve_model(name), parallel=layout, implementation=LOCAL)
    with quiet(), fake_world(layout, rank_of_stage(layout, stage)), building():
        built = parameter_shapes(build_chunks(run))
    assert [{p.name: tuple(p.shape) for p in chunk} for chunk in stage_parameters(run, stage)] == built


def wrong_names(run: RunSpec, stage: int, built: list[dict[str, tuple[int, ...]]] | str) -> list[str]:
    """Parameters in which the inventory and megatron-core differ."""
    assert not isinstance(built, str), built
    ours = {p.name: tuple(p.shape) for chunk in stage_parameters(run, stage) for p in chunk}
    real = {name: shape for chunk in built for name, shape in chunk.items()}
    return [n for n in sorted(ours.keys() | real.keys()) if ours.get(n) != real.get(n)]


def test_a_rank_owns_what_megatron_core_builds_with_transformer_engine() -> None:
    """Hybrids, which exist with Transformer Engine alone, and what differs with it: fused norms, grouped experts."""
    te = ImplementationSpec(megatron_core=HERE)
    cases = {**RANKS, "hybrid": HYBRID}
    jobs = [
        (RunSpec(model=resolve_model(name), parallel=layout, implementation=te), stage)
        for name, layout, stage in cases.values()
    ]
    wrong = {
        case: wrong_names(run, stage, built)
        for case, (run, stage), built in zip(cases, jobs, parameter_shapes_with_te(jobs), strict=True)
    }
    assert not any(wrong.values()), wrong


def test_a_whole_rank_to_the_byte() -> None:
    """DeepSeek-V3's last stage: MLA, experts, MTP. DDP's buffers, the optimizer and half a per cent of what is kept."""
    name, layout, stage = RANKS["multi-latent attention and MTP"]
    batch = BatchSpec(seq_length=1024)
    run = RunSpec(model=resolve_model(name), parallel=layout, batch=batch, implementation=LOCAL)
    found, ours = rehearse(run, stage), estimate(run).stages[stage]
    assert found.weights_bytes == ours.weights_bytes
    assert found.gradients_bytes == ours.gradients_bytes
    assert found.optimizer_bytes == ours.optimizer_bytes
    saved = found.chunks[0].passes.saved_bytes
    assert abs(compare_saved(run, stage) - saved) <= 0.005 * saved


def inventory_of(run: RunSpec, stage: int) -> ChunkInventory:
    """Of the only chunk of a stage."""
    return chunk_inventory(run.model, layout(run.model, run.parallel).shapes(run.model)[stage][0], context_of(run))


def compare_saved(run: RunSpec, stage: int) -> int:
    """Predicted bytes that the only chunk of a stage keeps for backward."""
    return inventory_of(run, stage).retained


def two_layers(mixer: Any, ffn: Any, hidden: int, **more: Any) -> ModelSpec:
    layer = LayerSpec(mixer, ffn)
    return ModelSpec(
        name="two layers", model_type="test", hidden_size=hidden, vocab_size=32000, layers=(layer, layer), **more
    )


GQA = AttentionSpec(32, 8, 128)
SWIGLU = MLPSpec(14336, gated=True)
LAYERS: dict[str, ModelSpec] = {
    "grouped-query attention": two_layers(GQA, SWIGLU, 4096),
    "biases and dropout": two_layers(
        AttentionSpec(32, 32, 128, add_qkv_bias=True, add_output_bias=True),
        MLPSpec(16384, gated=False, activation="gelu", add_bias=True), 4096,
        normalization="LayerNorm", hidden_dropout=0.1, attention_dropout=0.1,
        position_embedding_type="learned_absolute",
    ),
    "squared ReLU": two_layers(GQA, MLPSpec(14336, gated=False, activation="relu2"), 4096),
    "gated shared experts": two_layers(
        AttentionSpec(16, 16, 128),
        MoESpec(60, 4, 1408, shared_expert_intermediate_size=5632, shared_expert_gate=True), 2048,
    ),
    "multi-latent attention": two_layers(
        MLASpec(16, 1536, 512, 128, 64, 128),
        MoESpec(64, 6, 1408, router_enable_expert_bias=True, router_score_function="sigmoid",
                router_load_balancing_type="seq_aux_loss"), 2048,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dispatcher"),
    [(c, d) for c, m in LAYERS.items() for d in ("alltoall", "allgather")[: 1 + isinstance(m.layers[0].ffn, MoESpec)]],
)
def test_a_layer_keeps_what_the_inventory_says(case: str, dispatcher: str) -> None:
    """Half a per cent of the bytes saved for backward."""
    model = LAYERS[case]
    experts = isinstance(model.layers[0].ffn, MoESpec)
    run = RunSpec(
        model=model, parallel=parallel(16, 2, expert_model_parallel_size=4 if experts else 1),
        batch=BatchSpec(seq_length=2048), implementation=replace(LOCAL, moe_token_dispatcher_type=dispatcher),
    )  # fmt: skip
    found = compare_layer(run, 1)
    assert abs(found.saved_error) <= 0.005, "\n" + "\n".join(found.lines())


@pytest.mark.parametrize("mixer", [GQA, MLASpec(16, 1536, 512, 128, 64, 128)], ids=["GQA", "MLA"])
def test_a_layer_peaks_where_the_inventory_says(mixer: Any) -> None:
    """Half a per cent of both passes, beside a small MLP and with short sequences: the variables of attention's forward
    count more than its scores."""
    run = RunSpec(
        model=two_layers(mixer, MLPSpec(1024, gated=True), 4096), parallel=parallel(8, 2),
        batch=BatchSpec(seq_length=1024), implementation=LOCAL,
    )  # fmt: skip
    found = compare_layer(run, 1)
    assert abs(found.forward_error) <= 0.005, "\n" + "\n".join(found.lines())
    assert abs(found.backward_error) <= 0.005, "\n" + "\n".join(found.lines())


def test_recomputed_up_projections_of_latents() -> None:
    """The norms of the latents are recomputed with them in some releases: half a per cent of what is kept."""
    run = RunSpec(
        model=LAYERS["multi-latent attention"], parallel=parallel(16, 2, expert_model_parallel_size=4),
        batch=BatchSpec(seq_length=2048), implementation=LOCAL,
        recompute=RecomputeSpec(granularity="selective", modules=("mla_up_proj",)),
    )  # fmt: skip
    found = compare_layer(run, 1)
    # Each latent's norm of its own shard, [1024, 1536] and [1024, 512]: more than the bound is.
    assert abs(found.saved_error) <= 0.002, "\n" + "\n".join(found.lines())


MTP_MODEL = replace(
    two_layers(GQA, SWIGLU, 4096), layers=(LayerSpec(GQA, SWIGLU),) * 4, vocab_size=64000, mtp_num_layers=1,
    mtp_layer=LayerSpec(GQA, SWIGLU),
)  # fmt: skip


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_stage_of_mtp(depths: int, tp: int, tied: bool, batch: int) -> None:
    """Every parameter, and half a per cent of what is kept and of both peaks: when the losses of the depths are made,
    what of the hidden states they keep, whether their logits are held. With few tokens the output weight's gradients,
    of which each loss makes one, make the backward peak."""
    model = replace(MTP_MODEL, mtp_num_layers=depths, share_embeddings_and_output_weights=tied)
    run = RunSpec(
        model=model, parallel=parallel(8, tp, 2), batch=BatchSpec(seq_length=2048, micro_batch_size=batch),
        implementation=LOCAL,
    )  # fmt: skip
    chunk = rehearse(run, 1).chunks[0]
    assert {p.name: tuple(p.shape) for p in stage_parameters(run, 1)[0]} == chunk.parameters
    passes, ours = chunk.passes, inventory_of(run, 1)
    assert ours.retained == pytest.approx(passes.saved_bytes, rel=0.002)
    assert ours.forward_peak == pytest.approx(passes.forward_bytes, rel=0.005)
    assert ours.backward_peak == pytest.approx(passes.backward_bytes, rel=0.005)


@pytest.mark.parametrize(("text", "since"), [("Et*2|t*2|mL", (0, 14)), ("Et*2|t*2m|L", (0, 16))])
def test_mtp_in_a_layout_string(text: str, since: tuple[int, int]) -> None:
    """Each stage holds what it builds, the final norm too. 0.13 refuses m; 0.14 and 0.15 take it before the last stage
    and build MTP on the last, which is refused here."""
    sizes = parallel(6, 1, 3, pipeline_model_parallel_layout=text)
    if since > HERE:
        with pytest.raises(SpecError, match=rf"needs megatron-core 0\.{16 if HERE >= (0, 14) else 14} or later"):
            RunSpec(model=MTP_MODEL, parallel=sizes, implementation=LOCAL)
        if HERE < (0, 14):
            from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

            with quiet(), fake_world(parallel(6, 1, 3), 0), pytest.raises(NotImplementedError, match="MTP"):
                PipelineParallelLayerLayout.from_str(text, 3).validate_layer_layout(4)
        return
    run = RunSpec(model=MTP_MODEL, parallel=sizes, implementation=LOCAL)
    for stage in range(sizes.pp):
        with quiet(), fake_world(sizes, rank_of_stage(sizes, stage)), building():
            built = parameter_shapes(build_chunks(run))
        assert [{p.name: tuple(p.shape) for p in chunk} for chunk in stage_parameters(run, stage)] == built


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeSpec(granularity="full", method="uniform", num_layers=1),
        RecomputeSpec(granularity="selective", modules=("core_attn", "layernorm", "mlp")),
    ],
    ids=["full", "selective"],
)
def test_recomputation_runs(recompute: RecomputeSpec) -> None:
    """A chunk of two layers keeps what the inventory says."""
    run = RunSpec(
        model=LAYERS["grouped-query attention"], parallel=parallel(8, 2), batch=BatchSpec(seq_length=2048),
        implementation=LOCAL, recompute=recompute,
    )  # fmt: skip
    saved = rehearse(run, 0).chunks[0].passes.saved_bytes
    assert abs(compare_saved(run, 0) - saved) <= 0.005 * saved


def test_a_recomputed_norm_is_copied_or_not() -> None:
    """Half a per cent of the backward peak beside a small MLP, of which a copy of the norm's output, [2048, 4096], is
    ten times as much."""
    run = RunSpec(
        model=two_layers(GQA, MLPSpec(1024, gated=True), 4096), parallel=parallel(8, 2),
        batch=BatchSpec(seq_length=1024), implementation=LOCAL,
        recompute=RecomputeSpec(granularity="selective", modules=("layernorm",)),
    )  # fmt: skip
    found = compare_layer(run, 1)
    assert abs(found.backward_error) <= 0.002, "\n" + "\n".join(found.lines())


@pytest.mark.skipif(HERE < (0, 16), reason="hybrids are split otherwise before")
def test_a_hybrid_recomputes_or_not() -> None:
    """Layers of Nemotron-H under full recomputation: half a per cent of what is kept, all of theirs or their inputs."""
    model = resolve_model(HYBRID[0])
    run = RunSpec(
        model=replace(model, layers=model.layers[6:10]), parallel=parallel(8, 8), batch=BatchSpec(seq_length=1024),
        implementation=LOCAL, recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    )  # fmt: skip
    saved = rehearse(run, 0).chunks[0].passes.saved_bytes
    assert abs(compare_saved(run, 0) - saved) <= 0.005 * saved


@pytest.mark.parametrize("gate", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 4), (2, 4), (2, 1)])
def test_shared_experts_that_overlap_the_exchange(tp: int, ep: int, gate: bool) -> None:
    """A fifth of a per cent: fc2 of the shared experts, whose output and its gradient, [2048, 2048], are 2 to 5 %
    of the peaks, runs with the exchange back, before or after what was sent is gone."""
    experts = MoESpec(32, 4, 512, shared_expert_intermediate_size=1024, shared_expert_gate=gate)
    run = RunSpec(
        model=two_layers(AttentionSpec(16, 4, 128), experts, 2048),
        parallel=parallel(8, tp, expert_model_parallel_size=ep), batch=BatchSpec(seq_length=2048),
        implementation=replace(LOCAL, moe_shared_expert_overlap=True),
    )  # fmt: skip
    found = compare_layer(run, 1)
    explained = "\n" + "\n".join(found.lines())
    assert abs(found.saved_error) <= 0.002, explained
    assert abs(found.forward_error) <= 0.002, explained
    assert abs(found.backward_error) <= 0.002, explained


@pytest.mark.skipif(HERE < (0, 19), reason="hybrids have MTP from megatron-core 0.19 on")
def test_experts_that_only_mtp_has_are_balanced() -> None:
    """One Mamba layer, and an MTP depth with experts of which 22 take each token: routed to one, the exchange's rows
    would be 22 times too few, which megatron-core refuses."""
    model = resolve_model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16")
    model = replace(model, layers=model.layers[:1], mtp_num_layers=1)
    batch = BatchSpec(seq_length=512)
    run = RunSpec(model=model, parallel=parallel(8, expert_model_parallel_size=8), implementation=LOCAL, batch=batch)
    (found,), expected = rehearse(run, 0).chunks, estimate(run).stages[0]
    assert 0 < found.passes.saved_bytes < expected.peak_bytes


@pytest.mark.parametrize("bias", [False, True])
def test_what_a_router_keeps(bias: bool) -> None:
    """Beside experts so small that a table of the router, [2048, 512], counts: 2 bytes or 4 for each place."""
    experts = MoESpec(
        512, 2, 64, router_score_function="sigmoid", router_enable_expert_bias=bias,
        router_load_balancing_type="seq_aux_loss",
    )  # fmt: skip
    run = RunSpec(
        model=two_layers(AttentionSpec(8, 8, 64), experts, 512), parallel=parallel(64, expert_model_parallel_size=64),
        batch=BatchSpec(seq_length=2048), implementation=LOCAL,
        recompute=RecomputeSpec(granularity="selective", modules=("core_attn",)),
    )  # fmt: skip
    found = compare_layer(run, 1)
    assert abs(found.saved_error) <= 0.01, "\n" + "\n".join(found.lines())


@pytest.mark.skipif(HERE < (0, 16), reason="the gated delta net came with megatron-core 0.16")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_gated_delta_net(batch: int) -> None:
    """A fifth of a per cent of what is kept, half a per cent of both peaks."""
    model = resolve_model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    layers = tuple(LayerSpec(layer.mixer, MLPSpec(1024, gated=True)) for layer in model.layers[:4])
    run = RunSpec(
        model=replace(model, layers=layers, mtp_num_layers=0, mtp_layer=None), parallel=parallel(8, 2),
        batch=BatchSpec(seq_length=2048, micro_batch_size=batch), implementation=LOCAL,
    )  # fmt: skip
    found = compare_layer(run, 0)
    assert abs(found.saved_error) <= 0.002, "\n" + "\n".join(found.lines())
    assert abs(found.forward_error) <= 0.005, "\n" + "\n".join(found.lines())
    assert abs(found.backward_error) <= 0.005, "\n" + "\n".join(found.lines())


def test_a_mamba_layer_keeps_what_a_hand_counts() -> None:
    """Nemotron-H-56B, TP 8, s = 2048: h 8192, and a rank has 32 heads of 64 (2048), one group of state 256.

    bf16: the norm's input and in_proj's, an eighth of the sequence each; zxBCdt; the scan before and after its gate;
    the grouped norm's output, which out_proj keeps. fp32: a deviation a row of either norm; A made from A_log: exp and
    dt_bias of 32 heads each, and A itself.
    """
    model = resolve_model(HYBRID[0])
    first = next(i for i, layer in enumerate(model.layers) if isinstance(layer.mixer, MambaSpec))
    run = RunSpec(model=model, parallel=parallel(8, 8), batch=BatchSpec(seq_length=2048), implementation=LOCAL)
    s, h, inner, width = 2048, 8192, 2048, 2 * 2048 + 2 * 256 + 32
    count = 2 * (2 * s // 8 * h + s * (width + 3 * inner)) + 4 * (s // 8 + s + 3 * 32)
    assert rehearse_layer(run, first).saved_bytes == count


def test_a_mamba_layer_of_two_sequences_holds_its_projection_or_not() -> None:
    """zxBCdt is copied, sequence by sequence; from 0.15 on a variable holds it beside its copy all through the scan:
    9.5 MB at the forward peak."""
    model = resolve_model(HYBRID[0])
    first = next(i for i, layer in enumerate(model.layers) if isinstance(layer.mixer, MambaSpec))
    run = RunSpec(
        model=model, parallel=parallel(8, 8), batch=BatchSpec(seq_length=512, micro_batch_size=2), implementation=LOCAL
    )
    found = compare_layer(run, first)
    assert abs(found.forward_error) <= 0.002, "\n" + "\n".join(found.lines())


#: What came later than 0.13: model, release, in which layout.
LATER: dict[str, tuple[ModelSpec, tuple[int, int], ParallelSpec]] = {
    "softmax sink": (
        two_layers(AttentionSpec(32, 8, 128, learnable_softmax_sink=True), SWIGLU, 4096), (0, 15), parallel(8, 2)
    ),
    "output gate": (
        two_layers(AttentionSpec(32, 8, 128, attention_output_gate=True), SWIGLU, 4096), (0, 16), parallel(8, 2)
    ),
    "gated delta net": (
        resolve_model("Qwen/Qwen3-Next-80B-A3B-Instruct"), (0, 16), parallel(64, 2, 4, expert_model_parallel_size=8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LATER)
def test_what_a_release_lacks_is_refused_by_the_release_that_has_it(case: str) -> None:
    model, since, layout = LATER[case]
    run = RunSpec(model=model, parallel=layout, implementation=LOCAL)
    with quiet(), fake_world(layout, 0), building():
        if since <= HERE:
            ours = [{p.name: tuple(p.shape) for p in chunk} for chunk in stage_parameters(run, 0)]
            assert parameter_shapes(build_chunks(run)) == ours
            return
        with pytest.raises(NotBuildable, match=rf"needs megatron-core 0\.{since[1]} or later") as refusal:
            build_chunks(run)
        assert "\n" not in str(refusal.value)


def test_a_hybrid_with_experts_needs_a_release_that_has_them() -> None:
    name, layout = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", parallel(32, 2, expert_model_parallel_size=8)
    run = RunSpec(model=resolve_model(name), parallel=layout, implementation=LOCAL)
    with quiet(), fake_world(layout, 0), building():
        if HERE >= (0, 16):
            assert build_chunks(run)
            return
        with pytest.raises(NotBuildable, match=r"needs megatron-core 0\.16 or later"):
            build_chunks(run)


def test_a_layout_string_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    name, layout, _ = RANKS["layout string"]
    with fake_world(layout, 0), building():
        build_chunks(RunSpec(model=resolve_model(name), parallel=layout, implementation=LOCAL))
    assert capsys.readouterr().out == ""


def test_the_command_is_quiet_and_speaks_by_the_release_here() -> None:
    """Importing megatron-core without Apex and Transformer Engine warns a dozen times; none of it is for the user."""
    command = ["rehearse", "meta-llama/Llama-3.2-1B", "--tp", "2", "--num-gpus", "4", "--seq-length", "1024"]
    done = subprocess.run(
        [sys.executable, "-m", "bridge_memory", *command, "--transformer-impl", "local"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "peak" in done.stdout


@pytest.mark.skipif(HERE < (0, 15), reason="experts with biases came back with megatron-core 0.15")
def test_local_experts_are_predicted_as_they_are_built(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss: grouped experts would have no biases of their own; local ones run one by one, and do."""
    command = ["rehearse", "openai/gpt-oss-20b", "--ep", "4", "--pp", "4", "--num-gpus", "16", "--seq-length", "512"]
    assert main([*command, "--transformer-impl", "local", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "one by one" in answer["notes"][0]
    rows = {r["name"]: r["difference"] for r in answer["rows"]}
    assert rows["parameters (elements)"] == rows["weights"] == rows["gradients"] == 0


def test_a_release_that_is_too_old_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.12.3")
    assert main(["rehearse", "meta-llama/Llama-3.2-1B", "--num-gpus", "4"]) == 2
    assert "needs megatron-core 0.13 or later, not 0.12" in capsys.readouterr().err


def test_another_release_than_the_one_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    other = "0.13" if HERE != (0, 13) else "0.14"
    command = ["rehearse", "meta-llama/Llama-3.2-1B", "--num-gpus", "4", "--transformer-impl", "local"]
    assert main([*command, "--megatron-core", other]) == 2
    said = capsys.readouterr().err.strip()
    assert f"--megatron-core ({other}) is not the release installed here ({HERE[0]}.{HERE[1]})" in said
    assert "\n" not in said
