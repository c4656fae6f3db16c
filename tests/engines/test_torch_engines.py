"""Estimates beside torch's real engines on CPU, with a small Llama of transformers: every storage of three steps."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from real_engines import BATCH, CONFIG, LAYERS, SEQ, Measured, expected, measured, run_of, world  # noqa: E402

from bridge_memory.spec import DDPOptions, FSDPOptions, OptimizerSpec  # noqa: E402

DDP = torch.nn.parallel.DistributedDataParallel
#: What is not a copy of the parameters: a block of the allocator for each parameter's number of steps (on the CPU,
#: but for fused optimizers), the rotary embedding's two frequencies, the batch.
STEPS = (3 + 9 * LAYERS) * 512
BESIDE = STEPS + 2048
MIXED = FSDPOptions(param_dtype="bf16", reduce_dtype="fp32")


def fsdp2(ranks: int, *, mixed: bool = False, **kwargs: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def wrap(model: Any) -> Any:
        given = {**kwargs, "mesh": init_device_mesh("cpu", (ranks,))}
        if mixed:
            given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, **given)
        return fully_shard(model, **given)

    return wrap


def no_sync(model: Any, last: bool) -> Any:
    return nullcontext() if last else model.no_sync()


@contextmanager
def gradient_sync(model: Any, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    yield


def check(run: Any, real: Measured, *, within: float = 0.01) -> None:
    ours = expected(run)
    assert 0 <= real.after_step - ours["state"] <= BESIDE
    for phase, beside in (("forward", 0), ("backward", 0), ("step", BESIDE)):
        assert ours[phase] == pytest.approx(getattr(real, phase), rel=within, abs=beside), phase


@pytest.mark.parametrize("implementation", ["foreach", "for-loop", "fused"])
def test_one_gpu(implementation: str) -> None:
    """Moments in the parameters' dtype; the loop's two tensors of the largest parameter, foreach's of all."""
    how = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    real = measured(lambda m: m, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-9, **how))
    check(run_of("single", optimizer=OptimizerSpec(optimizer="adamw", torch_implementation=implementation)), real)


@pytest.mark.parametrize("view", [False, True])
def test_ddp(view: bool) -> None:
    """Without views gradients are there beside their buckets."""
    real = measured(lambda m: DDP(m, gradient_as_bucket_view=view), backend="gloo")
    check(run_of("ddp", ddp=DDPOptions(gradient_as_bucket_view=view)), real)


def test_ddp_accumulates_beside_its_buckets_until_the_last_microbatch() -> None:
    real = measured(
        lambda m: DDP(m, gradient_as_bucket_view=True), backend="gloo", microbatches=2, no_sync=no_sync
    )
    check(run_of("ddp", microbatches=2, ddp=DDPOptions(gradient_as_bucket_view=True)), real)


@pytest.mark.parametrize("reshard", [None, False])
def test_fsdp2_in_one_dtype(reshard: bool | None) -> None:
    kwargs = {} if reshard is None else {"reshard_after_forward": reshard}
    real = measured(fsdp2(2, **kwargs), size=2)
    check(run_of("fsdp2", ranks=2, fsdp=FSDPOptions(reshard_after_forward=reshard)), real)


def test_fsdp2_in_mixed_precision() -> None:
    """fp32 shards, bf16 whole parameters, and reductions in fp32: 4 bytes a parameter of the last unit."""
    check(run_of("fsdp2", ranks=4, fsdp=MIXED), measured(fsdp2(4, mixed=True), size=4))


def test_fsdp2_with_gradient_checkpointing() -> None:
    """Layers run again in backward, beside their unit's whole parameters."""
    wrap = fsdp2(4, mixed=True)

    def checkpointed(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return wrap(model)

    options = {"gradient_checkpointing": True, "use_reentrant": False}
    run = run_of("fsdp2", ranks=4, fsdp=MIXED, transformers_options=options)
    check(run, measured(checkpointed, size=4), within=0.001)


def test_fsdp2_accumulates_whole_gradients_in_fp32() -> None:
    real = measured(fsdp2(4, mixed=True), size=4, microbatches=2, no_sync=gradient_sync)
    check(run_of("fsdp2", ranks=4, microbatches=2, fsdp=MIXED), real)


def test_fsdp2_that_reduces_every_microbatch_keeps_shards() -> None:
    real = measured(fsdp2(4, mixed=True), size=4, microbatches=2)
    check(run_of("fsdp2", ranks=4, microbatches=2, sync_each_batch=True, fsdp=MIXED), real)


def fsdp1(*, mixed: bool = False, **kwargs: Any) -> Any:
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    if mixed:
        kwargs["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return lambda m: FullyShardedDataParallel(m, auto_wrap_policy=layers, device_id=torch.device("cpu"), **kwargs)


def test_fsdp1_in_one_dtype() -> None:
    check(run_of("fsdp1", ranks=2), measured(fsdp1(), size=2))


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "NO_PREFETCH"])
def test_fsdp1_with_a_tied_table(prefetch: str) -> None:
    """What the output layer gives of the table's gradient waits while the gradients of a layer are joined."""
    from torch.distributed.fsdp import BackwardPrefetch

    tied = {"tie_word_embeddings": True, "vocab_size": 1024}
    real = measured(fsdp1(backward_prefetch=getattr(BackwardPrefetch, prefetch, None)), size=2, config=tied)
    run = run_of("fsdp1", ranks=2, config=tied, fsdp=FSDPOptions(backward_prefetch=prefetch))
    check(run, real, within=0.001)


def test_fsdp1_in_mixed_precision() -> None:
    """The flat gradient, its copy in fp32 and the part that comes of it."""
    check(run_of("fsdp1", ranks=4, fsdp=MIXED), measured(fsdp1(mixed=True), size=4))


def test_fsdp1_that_divides_gradients_and_states_alone() -> None:
    from torch.distributed.fsdp import ShardingStrategy

    real = measured(fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), size=2)
    check(run_of("fsdp1", ranks=2, fsdp=FSDPOptions(sharding_strategy="SHARD_GRAD_OP")), real)


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_fsdp2_beside_torchs_own_tracker(mixed: bool) -> None:
    """A second opinion on the peak of a step: ``FSDPMemTracker`` counts storages by its own hooks."""
    tools = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(**CONFIG)
    settings._attn_implementation = "eager"
    with world("fake", 4):
        model = fsdp2(4, mixed=mixed)(LlamaForCausalLM(settings))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, foreach=True)
        tracker = tools.FSDPMemTracker(model, optimizer)
        tracker.track_inputs(())
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
        tracker.track_external(tokens)
        for _ in range(2):
            tracker.reset_mod_stats()
            with tracker:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()
    (found,) = tracker.get_tracker_snapshot("peak").values()
    ours = expected(run_of("fsdp2", ranks=4, fsdp=MIXED if mixed else FSDPOptions()))
    assert max(ours[phase] for phase in ("forward", "backward", "step")) == pytest.approx(found["Total"], rel=0.01)
