"""Which attention runs, and what that means for memory."""

from __future__ import annotations

import pytest

from bridge_memory.estimation import clear_caches
from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.megatron import attention
from bridge_memory.readers import resolve_model
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor

SINKS = "openai/gpt-oss-20b"
LLAMA = "meta-llama/Llama-3.2-1B"


def layer(
    name: str, *, dtype: str = "bf16", tp: int = 1, cp: int = 1, batch: int = 1, softmax_in_fp32: bool = True,
    **impl: object,
) -> BlockCost:
    run = RunSpec(
        model=resolve_model(name),
        parallel=ParallelSpec(world_size=tp * cp, tensor_model_parallel_size=tp, context_parallel_size=cp),
        batch=BatchSpec(seq_length=2048, micro_batch_size=batch),
        precision=PrecisionSpec(params_dtype=dtype, attention_softmax_in_fp32=softmax_in_fp32),
        implementation=ImplementationSpec(**impl),
    )
    return layer_block(run.model.layers[0], context_of(run)).cost


def kept(cost: BlockCost, name: str) -> int:
    return sum(t.bytes for t in cost.tensors if t.name == name)


def test_fp32_attention_keeps_its_probabilities() -> None:
    """Neither FlashAttention nor cuDNN takes fp32 (TE get_attention_backend): 32 heads x 2048^2 x 4 bytes stay."""
    assert kept(layer(LLAMA, dtype="fp32"), "attention probabilities") == 32 * 2048**2 * 4
    assert kept(layer(LLAMA), "attention probabilities") == 0


def test_scaling_by_the_layer_number_puts_the_softmax_in_fp32() -> None:
    """Whatever attention_softmax_in_fp32 says (TransformerConfig.__post_init__): 32 heads x 2048^2 x 4 bytes stay."""
    name = "attention probabilities fp32"
    unfused = {"transformer_impl": "local", "masked_softmax_fusion": False, "softmax_in_fp32": False}
    assert kept(layer(LLAMA, **unfused), name) == 0
    assert kept(layer(LLAMA, **unfused, apply_query_key_layer_scaling=True), name) == 32 * 2048**2 * 4


@pytest.mark.parametrize("more", [{"attention_backend": "flash"}, {"attention_backend": "fused"}, {"cp": 2}])
def test_fp32_leaves_no_kernel_where_one_is_asked_for(more: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="params_dtype bf16 or fp16"):
        layer(LLAMA, dtype="fp32", **more)


def test_sinks_run_in_cudnn_even_before_hopper() -> None:
    """FlashAttention has none; with it the output would be there twice ([b, s] order, and [s, b] for linear_proj),
    but for a single sequence, whose two orders are one."""
    ampere, hopper = (layer(SINKS, gpu_arch=arch, batch=2) for arch in ("ampere", "hopper"))
    assert ampere.retained == hopper.retained
    assert layer(LLAMA, gpu_arch="ampere", batch=2).retained == layer(LLAMA, batch=2).retained + 2 * 2048 * 32 * 64 * 2
    assert layer(LLAMA, gpu_arch="ampere").retained == layer(LLAMA).retained
    with pytest.raises(SpecError, match=r"attention_backend.*sink"):
        layer(SINKS, attention_backend="flash")


def test_fp8_copies_attentions_output_only_where_megatron_does_not_ask_for_the_original() -> None:
    """From TE 2.6 linear_proj keeps the bf16 output that attention keeps anyway; before, and with the delayed recipe,
    a copy of 2048 x 2048 bytes beside it."""

    def saved(recipe: str, release: tuple[int, int]) -> int:
        run = RunSpec(
            model=resolve_model(LLAMA), batch=BatchSpec(seq_length=2048),
            precision=PrecisionSpec(fp8="e4m3", fp8_recipe=recipe),
            implementation=ImplementationSpec(transformer_engine=release),
        )
        return layer_block(run.model.layers[0], context_of(run)).cost.retained

    copy = 2048 * 2048
    assert saved("tensorwise", (2, 5)) == saved("tensorwise", (2, 6)) + copy
    assert saved("delayed", (2, 6)) == saved("delayed", (2, 5)) == saved("tensorwise", (2, 5))


def test_sinks_and_context_parallelism_need_a2a() -> None:
    with pytest.raises(SpecError, match=r"cp_comm_type.*a2a"):
        layer(SINKS, cp=2)
    assert layer(SINKS, cp=2, cp_comm_type="a2a").retained


def test_ranks_beyond_the_query_groups_hold_everyones_qkv_for_a_moment() -> None:
    """Llama-3.2-1B has 8 groups. At tp 32 (one head of 64 a rank) linear_qkv's output is gathered whole, 3072 wide, and
    q, k, v are views of it until they are copied: 2 x 2048 x 3072 x 2 bytes with the concatenation. All else of a
    layer is a 32nd. What stays is a rank's own q, k and v."""
    cost = layer(LLAMA, tp=32)
    assert kept(cost, "query rope") == kept(cost, "key rope") == kept(cost, "value") == 2048 * 64 * 2
    assert 1.3 * 2 * 2048 * 3072 * 2 > cost.forward_peak > 2 * 2048 * 3072 * 2


def test_cudnn_copies_what_does_not_lie_head_by_head() -> None:
    """Nemotron-3-Nano rotates nothing and has 2 query groups: on 4 ranks q (8 heads of 128) and one k and v are slices
    of everyone's qkv, of which TE get_qkv_layout makes contiguous copies. The gathered one (32 + 2 x 2 heads) goes."""
    run = RunSpec(
        model=resolve_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        parallel=ParallelSpec(world_size=4, tensor_model_parallel_size=4), batch=BatchSpec(seq_length=2048),
    )  # fmt: skip
    (attention, *_) = [kind for kind in run.model.layers if type(kind.mixer).__name__ == "AttentionSpec"]
    cost = layer_block(attention, context_of(run)).cost
    assert kept(cost, "gathered qkv") == 0
    assert kept(cost, "query") == 2048 * 8 * 128 * 2
    assert kept(cost, "key") == kept(cost, "value") == 2048 * 128 * 2


def test_context_parallelism_refuses_what_transformer_engine_refuses() -> None:
    """``context_parallel.py: attn_forward_func_with_cp`` asserts: windows need a2a or all_gather, MLA p2p (to 2.11)."""
    windows, mla = "google/gemma-3-27b-pt", "deepseek-ai/DeepSeek-V2-Lite"
    with pytest.raises(SpecError, match=r"cp_comm_type \(p2p\).*a2a or all_gather"):
        layer(windows, cp=2)
    assert layer(windows, cp=2, cp_comm_type="all_gather").retained
    with pytest.raises(SpecError, match=r"cp_comm_type \(a2a\).*multi-latent.*p2p"):
        layer(mla, cp=2, cp_comm_type="a2a", transformer_engine=(2, 11))
    assert layer(mla, cp=2, transformer_engine=(2, 11)).retained


@pytest.mark.parametrize(
    ("cp", "options"),
    [
        (1, {"attention_backend": "flash"}), (1, {"attention_backend": "fused"}), (2, {"cp_comm_type": "p2p"}),
        (4, {"cp_comm_type": "p2p", "transformer_engine": (2, 11)}), (2, {"cp_comm_type": "a2a"}),
        (2, {"cp_comm_type": "all_gather", "transformer_engine": (2, 14)}),
        (2, {"cp_comm_type": "all_gather", "transformer_engine": (2, 15)}),
    ],
)  # fmt: skip
def test_every_kernel_keeps_the_same_of_the_softmax(
    cp: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fp32 log-sum-exp of 32 heads for each of a rank's 2,048 / cp tokens. What ``softmax_statistics`` would keep
    beside it is kept too: a new statistic has one place, whatever moves over context-parallel ranks."""

    def with_maxima(r: Recorder, rows: int, *, fp8: bool = False) -> tuple[Tensor, ...]:
        return (*statistics(r, rows, fp8=fp8), r.tape.tensor("softmax row maxima", 4 * rows, grad=False))

    statistics = attention.softmax_statistics
    clear_caches()
    monkeypatch.setattr(attention, "softmax_statistics", with_maxima)
    try:
        cost = layer(LLAMA, cp=cp, **options)
    finally:
        clear_caches()
    assert kept(cost, "softmax log-sum-exp") == kept(cost, "softmax row maxima") == 4 * 32 * 2048 // cp


@pytest.mark.parametrize(
    ("core", "batch", "rope_fusion", "more"),
    [((0, 13), 2, True, 1), ((0, 13), 2, False, 0), ((0, 13), 1, True, 0), ((0, 14), 2, True, 0)],
)
def test_releases_that_give_attention_sequences_first_keep_its_output_twice(
    core: tuple[int, int], batch: int, rope_fusion: bool, more: int
) -> None:
    """Attention keeps what it made, linear_proj the copy of it: 2,048 tokens a sequence, 32 heads of 64, two bytes."""
    output = batch * 2048 * 32 * 64 * 2
    made, later = (
        sum(t.bytes for t in layer(LLAMA, batch=batch, megatron_core=c, apply_rope_fusion=rope_fusion).tensors)
        for c in (core, (0, 14))
    )
    assert made - later == more * output


@pytest.mark.parametrize(
    ("heads", "width", "batch", "splits"),
    [(32, 64, 1, 1), (32, 80, 1, 1), (16, 160, 1, 1), (32, 64, 1, 4), (4, 64, 2, 14)],
)
def test_flash_attention_sums_gradients_of_padded_heads_in_every_split(
    heads: int, width: int, batch: int, splits: int
) -> None:
    """flash-attn ``flash_api.cpp: mha_bwd``: dq_accum [nsplits, b, s, a, d to the next 32, above 128 the next 64] in
    fp32, nsplits = ceil(108 / (b a)) on A100 if deterministic, and one fp32 sum a row."""
    run = RunSpec(
        model=ModelSpec(
            name="m", model_type="m", hidden_size=heads * width, vocab_size=1024,
            layers=(LayerSpec(AttentionSpec(heads, heads, width), MLPSpec(64, gated=False)),),
        ),
        parallel=ParallelSpec(world_size=1), batch=BatchSpec(seq_length=2048, micro_batch_size=batch),
        implementation=ImplementationSpec(gpu_arch="ampere", nvte_deterministic=splits > 1),
    )  # fmt: skip
    padded, rows = {64: 64, 80: 96, 160: 192}[width], batch * 2048 * heads
    r = Recorder(context_of(run))
    assert attention._gradient_sums(r, "flash", heads, heads * width) == 4 * rows * (splits * padded + 1)
    assert attention._gradient_sums(r, "fused", heads, heads * width) == 4 * rows * (width + 1)
    among_two = attention._gradient_sums(r, "flash", heads, heads * width, ranks=2)
    assert among_two == 4 * rows * ({1: 1, 4: 7, 14: 27}[splits] * padded + 1)


def test_deterministic_sinks_run_without_a_kernel_from_2_12_on() -> None:
    """TE ``get_attention_backend``: cuDNN's attention with sinks is ruled out, FlashAttention has none. The scores of
    [s, s] are saved then, in bf16 and with a column for the sink."""
    before, since = (
        layer(SINKS, transformer_engine=release, nvte_deterministic=True) for release in ((2, 11), (2, 12))
    )
    assert since.retained - before.retained > 2048 * 2048 * 64 * 2
    for more in ({"attention_backend": "fused"}, {"cp": 2, "cp_comm_type": "a2a"}):
        with pytest.raises(SpecError, match=r"nvte_deterministic \(True\) .*sinks.*leave one"):
            layer(SINKS, transformer_engine=(2, 12), nvte_deterministic=True, **more)
