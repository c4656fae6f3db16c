"""What a Megatron rank holds while it is built, loads, saves and evaluates, by hand.

A model of two layers: hidden size 256, 4 heads, a gated MLP of width 512, 1,024 tokens, untied. On one GPU a layer has
4 x 256 x 256 of attention, 3 x 256 x 512 of the MLP and 2 x 256 of norms; with the final norm and both tables
1,836,288 parameters, of which 2 x 2 x 256 x 512 are the first weights of MLPs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge_memory import CheckpointSpec, ParallelSpec, RunSpec, SpecError, estimate, find_gpu
from bridge_memory.estimation import stage_phases
from bridge_memory.job.job import job_of
from bridge_memory.job.megatron.building import building, built
from bridge_memory.job.megatron.evaluation import evaluation
from bridge_memory.job.megatron.loading import How, loading, refusal
from bridge_memory.job.megatron.saving import host_of_saving, saving
from bridge_memory.job.megatron.to_try import to_try
from bridge_memory.outside.amount import Amount, total
from bridge_memory.spec import DataParallelSpec, ImplementationSpec, OptimizerSpec, PrecisionSpec
from bridge_memory.spec.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec

LAYER = LayerSpec(
    mixer=AttentionSpec(num_attention_heads=4, num_query_groups=4, kv_channels=64),
    ffn=MLPSpec(ffn_hidden_size=512, gated=True),
)
MODEL = ModelSpec(
    name="small", model_type="llama", hidden_size=256, vocab_size=1024, layers=(LAYER, LAYER),
    share_embeddings_and_output_weights=False,
)  # fmt: skip
TABLE, FC1 = 1024 * 256, 2 * 256 * 512
NUMEL = 2 * (4 * 256**2 + 3 * 256 * 512 + 2 * 256) + 256 + 2 * TABLE
LOW = OptimizerSpec(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
RESHARDABLE = CheckpointSpec(dist_ckpt_optim_fully_reshardable=True)


def run_of(gpus: int = 1, **more: object) -> RunSpec:
    return RunSpec(model=MODEL, parallel=ParallelSpec(world_size=gpus), **more)  # type: ignore[arg-type]


def bytes_of(amounts: tuple[Amount, ...] | None) -> int:
    assert amounts is not None
    least, most = total(amounts)
    assert least == most
    return most


def parts(amounts: tuple[Amount, ...] | None, *names: str) -> int:
    assert amounts is not None
    return sum(a.most for a in amounts if a.name in names)


def test_numel() -> None:
    assert NUMEL == 1_836_288


def test_build_of_one_gpu_ends_with_a_copy_of_the_embedding() -> None:
    """Weights 2 bytes, gradients 4, main parameters 4; the embedding is the last matrix, then come 5 vectors."""
    assert bytes_of(built(run_of(), 0)) == pytest.approx(10 * NUMEL, rel=1e-3)  # buffers are padded
    assert bytes_of(building(run_of(), 0)) - bytes_of(built(run_of(), 0)) == 2 * TABLE - 4 * 5 * 256


def test_buffers_are_made_while_modules_have_their_parameters() -> None:
    """On 8 ranks main parameters are few, so that DDP's buffers (6 bytes) beside the modules' 2 are the peak."""
    assert bytes_of(building(run_of(8), 0)) == pytest.approx(8 * NUMEL, rel=1e-3)


def test_without_a_distributed_optimizer_parameters_stay_where_they_are() -> None:
    run = run_of(8, data_parallel=DataParallelSpec(use_distributed_optimizer=False))
    # The last matrix is the output layer, after which the vectors come.
    assert bytes_of(building(run, 0)) == pytest.approx(10 * NUMEL + 2 * TABLE, rel=1e-2)


def test_weights_of_a_checkpoint_take_a_second_copy_of_what_is_saved_in_halves() -> None:
    merged = bytes_of(loading(run_of(), 0, How.TORCH_DIST)) - bytes_of(built(run_of(), 0))
    assert merged == 2 * 2 * FC1


@pytest.mark.parametrize(("core", "adopts", "times"), [
    ((0, 18), None, 2), ((0, 19), None, 1), (None, None, 1), ((0, 18), True, 1), ((0, 19), False, 2),
])  # fmt: skip
def test_resume_holds_moments_once_or_twice(core: tuple[int, int] | None, adopts: bool | None, times: int) -> None:
    """8 bytes of moments a parameter beside the model and its halves; twice where FusedAdam copies them, as before the
    megatron-core of Megatron Bridge 0.6 and in Megatron-LM."""
    implementation = ImplementationSpec(megatron_core=core)
    run = run_of(2, implementation=implementation, checkpoint=CheckpointSpec(adopt_optim_states=adopts))
    more = bytes_of(loading(run, 0, How.RESUME)) - bytes_of(loading(run, 0, How.TORCH_DIST))
    assert more == pytest.approx(times * 8 * NUMEL / 2, rel=1e-3)


def test_resume_of_bf16_moments_holds_28_bytes_for_6() -> None:
    """6 bytes of states (two moments, the lower halves of main parameters); 8 unscaled for the state dict, 8 unscaled
    again by FusedAdam, and 6 cast to the dtype of weights."""
    run = run_of(2, optimizer=LOW)
    more = bytes_of(loading(run, 0, How.RESUME)) - bytes_of(loading(run, 0, How.TORCH_DIST))
    assert more == pytest.approx(28 * NUMEL / 2, rel=1e-3)
    saved = saving(run, 0)
    assert parts(saved, "fp32 states in the state dict") == pytest.approx(8 * NUMEL / 2, rel=1e-3)


def test_whole_states_are_loaded_in_host_memory() -> None:
    """No unscaled states of the state dict on the GPU: 8 bytes of states (main parameters are whole), 8 unscaled and 6
    in the dtype of weights."""
    run = run_of(2, optimizer=replace(LOW, store_param_remainders=False), checkpoint=RESHARDABLE)
    more = bytes_of(loading(run, 0, How.RESUME)) - bytes_of(loading(run, 0, How.TORCH_DIST))
    assert more == pytest.approx(22 * NUMEL / 2, rel=1e-3)


def test_import_scatters_one_table() -> None:
    """The first of two tensor-parallel ranks: 2 x 2 bytes x 131,072 of both shards of the output layer, its own, and
    the shard of the embedding, which comes before. With one there is nothing to scatter: a norm is copied."""
    assert bytes_of(loading(run_of(2), 0, How.HUGGING_FACE)) - bytes_of(built(run_of(2), 0)) == 2 * 256
    run = RunSpec(model=MODEL, parallel=ParallelSpec(world_size=2, tensor_model_parallel_size=2))
    more = bytes_of(loading(run, 0, How.HUGGING_FACE)) - bytes_of(built(run, 0))
    assert more == 2 * (TABLE + TABLE // 2 + TABLE // 2)


def test_a_save_stages_what_the_rank_writes() -> None:
    """Of two ranks: half of the weights, and 12 bytes for each parameter of the rank's shard."""
    least, most = total(host_of_saving(run_of(2), 0) or ())
    assert least == pytest.approx((2 + 12) * NUMEL / 2, rel=1e-2)
    assert least < most < 2 * least
    whole = host_of_saving(run_of(2, checkpoint=CheckpointSpec(ckpt_fully_parallel_save=False)), 0)
    assert parts(whole, "weights") >= 2 * NUMEL


def test_an_export_to_hugging_face_puts_one_parameter_together_at_a_time() -> None:
    """A save's states of bf16 moments are higher; without the optimizer a table is gathered, and joined. The first rank
    keeps all 3.7 MB of weights until their file is written."""
    run = run_of(2, checkpoint=CheckpointSpec(also_save_hf_checkpoint=True, save_optim=False))
    plain = run.with_fields(also_save_hf_checkpoint=False)
    more = [a - b for a, b in zip(total(saving(run, 0) or ()), total(saving(plain, 0) or ()), strict=True)]
    assert more == [2 * TABLE, 2 * 2 * TABLE]
    low = run.with_fields(optimizer=LOW, save_optim=True)
    assert saving(low, 0) == saving(low.with_fields(also_save_hf_checkpoint=False), 0)
    at_host, without = (job_of(estimate(each), find_gpu("H100")).host for each in (run, plain))
    assert at_host.node.most - without.node.most == 2 * 2 * 2 * TABLE + 2 * NUMEL


def test_an_evaluation_keeps_the_training_state_and_less_than_a_training_pass() -> None:
    run = run_of(2)
    found = bytes_of(evaluation(run, 0))
    state = bytes_of(built(run, 0)) + 8 * NUMEL // 2
    assert state < found
    assert found < max(stage_phases(run, 0).values())


@pytest.mark.parametrize("function", [building, built, evaluation, saving, host_of_saving], ids=lambda f: f.__name__)
def test_another_stage_is_refused(function: object) -> None:
    with pytest.raises(SpecError, match="is not a stage"):
        function(run_of(), 1)  # type: ignore[operator]


def test_other_engines_are_not_modelled() -> None:
    run = RunSpec(
        model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=2),
        data_parallel=DataParallelSpec(engine="fsdp2"),
        implementation=ImplementationSpec(transformer_impl="transformers"),
    )  # fmt: skip
    assert [f(run, 0) for f in (building, built, evaluation, saving, host_of_saving)] == [None] * 5
    assert [loading(run, 0, how) for how in How] == [None] * 4


def test_resume_of_other_optimizers_is_not_modelled() -> None:
    run = run_of(optimizer=OptimizerSpec(optimizer="sgd"))
    assert loading(run, 0, How.RESUME) is None
    assert loading(run, 0, How.TORCH_DIST) is not None


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_resume_of_an_optimizer_in_host_memory_makes_its_device_part_anew_twice(share: float) -> None:
    """Of what stays on the device 4 bytes of main parameters, made at once, 8 of moments, 4 of gradients, and the main
    parameters twice more; all in host memory, random bf16 gradients of all parameters, or halves put together."""
    run = run_of(optimizer=OptimizerSpec(
        optimizer_cpu_offload=True, optimizer_offload_fraction=share, use_precision_aware_optimizer=True,
    ))  # fmt: skip
    stays = (1 - share) * NUMEL
    assert bytes_of(built(run, 0)) == pytest.approx(6 * NUMEL + 4 * stays, rel=1e-3)
    least, most = total(loading(run, 0, How.RESUME) or ())
    moments = (12 * stays + 2 * NUMEL, 2 * 2 * FC1 + 20 * stays + 2 * TABLE)
    assert most - bytes_of(built(run, 0)) == pytest.approx(max(moments), rel=1e-2)
    assert least >= most - 2 * TABLE
    assert bytes_of(saving(run, 0)) >= 6 * NUMEL + 12 * stays
    staged = (2 + 12 * (1 - share)) * NUMEL  # what is in host memory is not staged again
    assert total(host_of_saving(run, 0) or ()).least == pytest.approx(staged, rel=1e-2)


def test_the_load_of_a_warm_start_is_explained() -> None:
    """Nemotron-3-Nano-30B, EP 4 on 64 GPUs, experts in one tensor a layer (a fork of Megatron Bridge, published): 89.9
    GB at most and 55.19 GiB after loading, of which a transposed copy of the experts was 13.679 GiB. The rest is the
    same again, put together, and the projections of Mamba's mixers."""
    run = RunSpec(
        model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", optimizer=LOW,
        parallel=ParallelSpec(world_size=64, expert_model_parallel_size=4),
        implementation=ImplementationSpec(transformer_impl="local", moe_grouped_gemm=True),
    )  # fmt: skip
    found = loading(run, 0, How.TORCH_DIST)
    assert parts(found, "weights of experts, transposed") == pytest.approx(13.679 * 2**30, rel=1e-4)
    measured = 89.9e9 - 55.19 * 2**30
    assert bytes_of(found) - bytes_of(built(run, 0)) == pytest.approx(measured, rel=0.01)


RESHARDABLE_RUN = run_of(2, checkpoint=RESHARDABLE)


def test_experts_in_one_tensor_are_loaded_three_times() -> None:
    """Of 2 layers with 4 of 8 experts on a rank: 2 bytes x 3 x 256 x 512 each, transposed, and put together."""
    layer = LayerSpec(AttentionSpec(8, 4, 32), MoESpec(8, 2, 512))
    model = ModelSpec(name="x", model_type="test", hidden_size=256, vocab_size=1024, layers=(layer,) * 2)
    run = RunSpec(model=model, parallel=ParallelSpec(world_size=2, expert_model_parallel_size=2))
    one = run.with_fields(experts_in_one_tensor=True)
    more = bytes_of(loading(one, 0, How.TORCH_DIST)) - bytes_of(loading(run, 0, How.TORCH_DIST))
    fc1, fc2 = 2 * 2 * 4 * 2 * 256 * 512, 2 * 2 * 4 * 256 * 512
    assert more == fc1 + 2 * fc2  # halves of fc1 are put together either way


def test_whole_states_over_gloo_stay_in_host_memory() -> None:
    """On the GPU nothing is gathered; of two ranks the first holds 12 bytes a parameter, 6 of its own shards, and of
    one state 4 received and 4 put together; on 64 ranks it holds more once it has copied all 12 to write them."""
    run = RESHARDABLE_RUN.with_fields(distrib_optim_fully_reshardable_mem_efficient=True)
    assert parts(saving(RESHARDABLE_RUN, 0), "gathered states") == pytest.approx(4 * 1.5 * NUMEL, rel=1e-2)
    assert parts(saving(run, 0), "gathered states") == 0
    least, most = total(tuple(a for a in host_of_saving(run, 0) or () if a.name.startswith("optimizer")))
    assert most == pytest.approx((12 + 6 + 4 + 4) * NUMEL, rel=1e-2)
    assert least == pytest.approx(12 * NUMEL / 2, rel=1e-2)
    many = host_of_saving(run.with_fields(world_size=64), 0) or ()
    assert sum(a.most for a in many if a.name.startswith("optimizer")) == pytest.approx(2 * 12 * NUMEL, rel=1e-2)


def test_without_an_optimizer_weights_are_loaded_and_saved() -> None:
    for field in ("load_optim", "save_optim"):
        run = run_of(2).with_fields(**{field: False})
        assert loading(run, 0, How.RESUME) == loading(run, 0, How.TORCH_DIST)
    run = run_of(2, optimizer=LOW).with_fields(save_optim=False)
    assert parts(saving(run, 0), "fp32 states in the state dict", "fp32 copies of states") == 0
    assert [a.name for a in host_of_saving(run, 0) or ()] == ["weights"]


def test_another_format_is_not_modelled_and_named() -> None:
    run = run_of(2).with_fields(ckpt_format="torch_dcp")
    assert loading(run, 0, How.RESUME) is loading(run, 0, How.TORCH_DIST) is saving(run, 0) is None
    assert loading(run, 0, How.HUGGING_FACE) is not None
    assert [why for why in job_of(estimate(run), find_gpu("H100")).not_modelled if "ckpt_format (torch_dcp)" in why]


def test_quantized_weights_are_dequantized_one_by_one_or_all() -> None:
    """Of 16 bits, the largest (a table is none of them: 2 x 2 x 256 x 512), or all linears."""
    precision = PrecisionSpec(fp8="hybrid", fp8_recipe="blockwise", fp8_param=True)
    linears = 2 * (4 * 256**2 + 3 * 256 * 512)
    found = {}
    for core in ((0, 16), (0, 19), None):
        for streams in (True, False):
            run = run_of(precision=precision, implementation=ImplementationSpec(megatron_core=core))
            amounts = loading(run.with_fields(stream_ckpt_dequant=streams), 0, How.TORCH_DIST) or ()
            (one,) = (a for a in amounts if a.name == "dequantized weights")
            found[core, streams] = [one.least, one.most]
    one, whole = 2 * FC1, 2 * linears
    assert found == {
        ((0, 16), True): [whole, whole], ((0, 16), False): [whole, whole], ((0, 19), True): [one, one],
        ((0, 19), False): [whole, whole], (None, True): [one, whole], (None, False): [whole, whole],
    }  # fmt: skip


def test_what_to_try_lowers_the_resume_and_is_named_only_then() -> None:
    """Unscaled states of the state dict leave the GPU: 8 bytes a parameter of the shard. States in fp32 are in the
    state dict as they are, and again in FusedAdam: those are the same in host memory. A save would gather states on the
    GPU with the first flag alone, more than it takes now."""
    run = run_of(2, optimizer=replace(LOW, store_param_remainders=False))
    found = to_try(run, 0)
    assert found is not None
    alone = run.with_fields(dist_ckpt_optim_fully_reshardable=True)
    assert found.flag == "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient"
    now, gathered, then = (total(saving(each, 0) or ()).most for each in (run, alone, found.run))
    assert then <= now < gathered
    peaks = [bytes_of(loading(each, 0, How.RESUME)) for each in (run, found.run)]
    assert found.less == peaks[0] - peaks[1]
    assert found.less == pytest.approx(8 * NUMEL / 2, rel=1e-2)
    assert to_try(found.run, 0) is None
    # It would fail (refusal), and needs no less.
    assert to_try(run_of(2, optimizer=LOW), 0) is None
    assert to_try(run_of(1, data_parallel=DataParallelSpec(use_distributed_optimizer=False)), 0) is None


@pytest.mark.parametrize("core", [(0, 13), (0, 14), (0, 16), (0, 17), (0, 19), None], ids=str)
def test_resumes_that_fail_in_megatron_core_are_named(core: tuple[int, int] | None) -> None:
    run = run_of(2, optimizer=LOW, implementation=ImplementationSpec(megatron_core=core))
    fails = core in ((0, 14), (0, 16))
    assert (refusal(run) is not None) is (loading(run, 0, How.RESUME) is None) is fails
    assert (refusal(run.with_(checkpoint=RESHARDABLE)) or "").endswith("set store_param_remainders to False")
    assert refusal(run.with_(checkpoint=RESHARDABLE).with_fields(store_param_remainders=False)) is None
    assert refusal(run.with_fields(load_optim=False)) is None
    job = job_of(estimate(run), find_gpu("H100"))
    assert [why for why in job.not_modelled if why.startswith("resume of a precision-aware")] == [refusal(run)] * fails


def test_the_process_that_writes_has_a_context_on_the_gpu() -> None:
    plain, beside = (job_of(estimate(run_of(2).with_fields(async_save=on)), find_gpu("H100")) for on in (False, True))
    for one, other in zip(plain.phases, beside.phases, strict=True):
        assert one.driver.most < other.driver.most <= one.driver.most + 2**29
        assert (one.driver.least < other.driver.least) is (str(one.phase) in ("training", "evaluation", "save"))


@pytest.mark.parametrize("states", [{}, {"dist_ckpt_optim_fully_reshardable": True}, {"load_optim": False}], ids=str)
def test_exchanging_tensors_lowers_no_peak(states: dict[str, bool]) -> None:
    """What is certain without a fully parallel load is certain with one; the upper end is the exchange."""
    run = RunSpec(
        model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=16, expert_model_parallel_size=8),
        optimizer=replace(LOW, store_param_remainders=False),
    ).with_fields(**states)
    plain = total(loading(run, 0, How.RESUME) or ())
    least, most = total(loading(run.with_fields(ckpt_fully_parallel_load=True), 0, How.RESUME) or ())
    assert plain.least == plain.most == least < most
    if "load_optim" not in states:
        return
    found = to_try(run.with_fields(ckpt_fully_parallel_load=True, dist_ckpt_optim_fully_reshardable=True), 0)
    assert found is not None and found.flag == "--no-ckpt-fully-parallel-load"
